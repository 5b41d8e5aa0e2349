"""The figures of a report and the numbers behind each: rows of runs -> figures with captions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fedgma.errors import DataError, FedgmaError
from fedgma.records.format import Record
from fedgma.records.reader import Run, curve, number, numbers
from fedgma.reports.plots.curves import BANDS, draw_accuracy, draw_over_time
from fedgma.reports.plots.federations import draw_classes
from fedgma.reports.plots.grids import MARKS, draw_fairness, draw_rates
from fedgma.reports.plots.masks import GRID_OF_TAUS, draw_agreement, draw_layers, draw_stability, draw_taus, same_mask
from fedgma.reports.plots.specifications import Specification, draw_specifications, shown_choices
from fedgma.reports.plots.style import plain_text
from fedgma.reports.tables import slug
from fedgma.statistics.arms import Row, Spread, frozen
from fedgma.statistics.comparisons import Comparison
from fedgma.statistics.labels import ARM, arm, in_title, plain, short, title_of
from fedgma.statistics.metrics import ACCURACY, Metric, metrics_of
from fedgma.statistics.targets import times

MOST = 12  # settings whose accuracy is drawn
MANY_CELLS = 10  # settings; a comparison of more has a specification curve
MOST_SAMPLES = 10**12  # of a class at a client; a record of more is damaged
CLOSELY = 4  # settings whose masks and clients are drawn
RATES = ("server_learning_rate", "client_learning_rate")


class Picture(NamedTuple):
    """A figure with its file name, heading and caption."""

    name: str
    kind: str  # the heading, shared by the figures of other settings
    title: str  # the setting
    caption: str
    figure: Figure


Scene = dict[str, Row]  # arm -> row, all of one setting
Drawer = Callable[[str, Scene], Picture | None]


def make_pictures(rows: Sequence[Row], comparisons: Sequence[Comparison] = ()) -> list[Picture]:
    """Every figure that these rows, and comparisons of many settings, have the numbers for."""
    with plain_text():
        curves = [specification_curve(pair) for pair in comparisons if len(pair.cells) > MANY_CELLS]
        return list(_with_own_names([*curves, *_drawn(rows)]))


def specification_curve(comparison: Comparison) -> Picture:
    """The differences of two arms in all settings, sorted, with the settings below."""
    first, second = comparison.names
    cells = [Specification(cell.label, cell.verdict) for cell in comparison.cells]
    outcomes = [cell.verdict.outcome for cell in cells]
    ahead, behind = outcomes.count("first ahead"), outcomes.count("second ahead")
    drawn = {name for name, _ in shown_choices(cells)}
    left = [short(name) for name in cells[0].choices if name not in drawn]
    caption = (
        f"How far {first} is ahead of {second} in {len(cells)} settings, sorted, with 95 % CIs. After Holm's "
        f"correction for {comparison.tests} tests {first} is ahead in {ahead} and behind in {behind}. "
        "Below: what each setting chose." + (f" Not shown, for their many values: {', '.join(left)}." if left else "")
    )
    title = f"{first} against {second}"
    return _picture("specifications", title, "Specification curve", caption, draw_specifications(cells))


def plot_accuracy(rows: Sequence[Row]) -> Figure:
    """Scores by round of all rows in one figure; rows of several settings are lines without a paired difference."""
    if not rows:
        raise DataError("expected runs with evaluated rounds, got none; set evaluate_every to 1 or more")
    settings = scenes(rows)
    arms = next(iter(settings.values())) if len(settings) == 1 else {row.name: row for row in rows}
    with plain_text():
        return draw_accuracy(_test_curves(arms, rows[0].metric), metric=rows[0].metric)


def _drawn(rows: Sequence[Row]) -> Iterator[Picture]:
    chosen = best_rates(rows)
    settings = list(scenes(chosen).items())
    metric = rows[0].metric if rows else ACCURACY
    extreme = "highest" if metric.better == "higher" else "lowest"
    picked = (
        f" Of the learning rates, the pair with the {extreme} last10 over the arms." if len(chosen) < len(rows) else ""
    )
    metrics = dict.fromkeys((metric, *(metrics_of(rows[0].runs[0]) if rows else ())))
    curves: list[Drawer] = [partial(_accuracy, metric=metric) for metric in metrics]
    closely: list[Drawer] = [_agreement, _layers, _stability, _taus, _fairness]
    for draw, most in [*((draw, MOST) for draw in curves), *((draw, CLOSELY) for draw in closely)]:
        left = f" {most} of {len(settings)} settings are drawn." if len(settings) > most else ""
        for title, scene in settings[:most]:
            if picture := draw(title, scene):
                yield picture._replace(caption=picture.caption + picked + left)
    yield from [*_over_time(chosen), *_rates(rows), *_partitions(rows)]


def _with_own_names(pictures: Sequence[Picture]) -> Iterator[Picture]:
    """Number the figures whose truncated titles give the same file name."""
    taken: set[str] = set()
    for picture in pictures:
        name, again = picture.name, 1
        while name in taken:
            again += 1
            name = f"{picture.name}-{again}"
        taken.add(name)
        yield picture._replace(name=name)


def scenes(rows: Sequence[Row]) -> dict[str, Scene]:
    """Rows grouped by all settings but the aggregation: one scene per setting, with its arms."""
    by_title: dict[str, Scene] = {}
    for row in rows:
        by_title.setdefault(title_of(row.label), {})[arm(row.runs[0], list(row.label))] = row
    return by_title


def best_rates(rows: Sequence[Row]) -> list[Row]:
    """If learning rates were varied, the rows of the pair with the best mean last10 over the arms."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        others = {name: value for name, value in row.label.items() if name not in ARM}
        rates = {name: others.pop(name) for name in RATES if name in others}
        groups.setdefault(frozen(others), {}).setdefault(frozen(rates), []).append(row)
    best = [max(pairs.values(), key=_level) for pairs in groups.values()]
    return [row for pair in best for row in pair]


def _level(rows: Sequence[Row]) -> float:
    return rows[0].metric.sign * sum(row.scores["last10"].mean for row in rows) / len(rows)


def _picture(kind: str, title: str, heading: str, caption: str, figure: Figure) -> Picture:
    return Picture(slug(f"{kind} {title}"), heading, title, caption, figure)


def _accuracy(title: str, scene: Scene, metric: Metric = ACCURACY) -> Picture | None:
    seeds = max(len(row.runs) for row in scene.values())
    several = seeds > 1
    caption = f"Test {metric.words} after each evaluated round, {f'mean of {seeds} seeds' if several else 'one seed'}"
    if len(scene) > BANDS:
        caption += ". Below: the paired difference to the mean."
    else:
        caption += "; bands: one standard deviation." if several else "."
        if len(scene) > 1:
            verdict = ", which the verdict is on" if metric == next(iter(scene.values())).metric else ""
            caption += f" Below: the paired difference{verdict}" + ("; band: 95 % CI." if several else ".")
    drawn = draw_accuracy(_test_curves(scene, metric), metric=metric)
    return _picture(metric.name, title, f"{metric.title} by round", caption, drawn)


def _over_time(rows: Sequence[Row]) -> Iterator[Picture]:
    """The scores against simulated time, runs of different clocks in one figure."""
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        clock = {name: value for name, value in row.label.items() if name.startswith("clock.")}
        others = title_of({name: value for name, value in row.label.items() if name not in clock})
        words = ", ".join(filter(None, [title_of(clock), arm(row.runs[0], list(row.label))]))
        groups.setdefault(others, {})[words] = row
    for title, scene in list(groups.items())[:MOST]:
        metric = next(iter(scene.values())).metric
        courses = {name: [_by_time(run, metric) for run in row.runs] for name, row in scene.items()}
        arms = {name: seeds for name, seeds in courses.items() if all(course and max(course)[0] for course in seeds)}
        if arms:
            caption = f"Test {metric.words} against simulated time, mean over seeds."
            drawn = draw_over_time(arms, metric)
            yield _picture("time", title, f"{metric.title} by simulated time", caption, drawn)


def _by_time(run: Run, metric: Metric) -> list[tuple[float, float]]:
    """Time and score of every evaluated round."""
    clock = times(run)
    return [(clock[round], score) for round, score in curve(run, "test", metric.name).items() if round in clock]


def _test_curves(scene: Scene, metric: Metric) -> dict[str, dict[int, dict[int, float]]]:
    """Arm -> seed -> round -> test score."""
    return {name: {run.seed: curve(run, "test", metric.name) for run in row.runs} for name, row in scene.items()}


def _agreement(title: str, scene: Scene) -> Picture | None:
    """The first and the last measured round of the first masked arm (or the only arm)."""
    name, row = _masked(scene)
    measured = [_measured(run, "histogram") for run in row.runs]
    measured = [records for records in measured if records]
    if not measured:
        return None
    stages = {f"round {measured[0][at]['round']}": at for at in (0, -1)}
    histograms = {stage: _histogram([records[at] for records in measured]) for stage, at in stages.items()}
    shares = {stage: part for stage, part in histograms.items() if part is not None}
    if len({len(part) for part in shares.values()}) != 1:
        return None
    tau = number(row.runs[0].settings, "tau")
    caption = (
        f"How many of the sampled clients move an entry the same way ({name}). Entries left of tau are scaled down. "
        "Circles: what to expect if every client voted by a fair coin."
    )
    return _picture("agreement", title, "Agreement", caption, draw_agreement(shares, tau))


def _layers(title: str, scene: Scene) -> Picture | None:
    name, row = _masked(scene)
    measured = [_measured(run, "layers") for run in row.runs]
    rounds = sorted(set.intersection(*({r["round"] for r in records} for records in measured)))
    layers = list(measured[0][0]["mask"]["layers"]) if rounds else []
    cells = [
        [[_below(records, round, layer) for round in rounds] for layer in layers]
        for records in ({r["round"]: r for r in run} for run in measured)
    ]
    shares = np.array(cells, float)
    if not layers or len(rounds) < 2 or np.isnan(shares).any():
        return None
    caption = f"Share of each layer's entries whose agreement is below tau ({name}, mean over seeds)."
    drawn = draw_layers(shares.mean(axis=0), rounds, layers)
    return _picture("layers", title, "Where clients disagree", caption, drawn)


def _stability(title: str, scene: Scene) -> Picture | None:
    """How much the mask changed since it was last measured, and how much independent masks would differ."""
    name, row = _masked(scene)
    tables = [_steadiness(run) for run in row.runs]
    rounds = sorted(set.intersection(*map(set, tables)))
    if len(rounds) < 2:
        return None
    gap, *figures = np.array([[table[r] for r in rounds] for table in tables]).mean(axis=0).T
    flipped, overlap, by_chance, again_by_chance = figures
    usual = f"{np.median(gap):g} round{'s' if np.median(gap) > 1 else ''}"
    caption = (
        f"The mask compared with that of {usual} earlier ({name}, mean over seeds). Above: share of the entries that "
        "crossed tau. Below: of the entries masked in either round, the share masked in both. Dotted: independent "
        "masks of the same sizes."
    )
    drawn = draw_stability({"crossed tau": (flipped, by_chance), "masked again": (overlap, again_by_chance)}, rounds)
    return _picture("stability", title, "How steady the mask is", caption, drawn)


def _steadiness(run: Run) -> dict[int, tuple[float, ...]]:
    """Round -> rounds since the last measured mask, share of entries flipped, overlap, and both expected by chance."""
    below = curve(run, "mask", "below")
    since, flipped, overlap = (curve(run, "mask", name) for name in ("since", "flipped", "overlap"))
    measured = {}
    for round in set(since) & set(flipped) & set(overlap) & set(below):
        now, before = below[round], below.get(int(since[round]), np.nan)
        both, either = now * before, now + before - now * before
        chance = (now + before - 2 * both, both / either if either else 1.0)
        measured[round] = (round - since[round], flipped[round], overlap[round], *chance)
    return {round: figures for round, figures in measured.items() if not np.isnan(figures).any()}


def _taus(title: str, scene: Scene) -> Picture | None:
    name, row = _masked(scene)
    late = [records[-1] for run in row.runs if (records := _measured(run, "histogram"))]
    shares = _histogram(late) if late else None
    if shares is None:
        return None
    by_tau = {row.label["tau"]: row.scores["last10"] for row in scene.values() if _has_tau(row)}
    scores: Mapping[float, Spread] = by_tau if len(by_tau) > 1 else {}
    different = len(same_mask(shares, GRID_OF_TAUS))
    caption = f"Share of the entries that each tau would mask, from the votes of the last measured round ({name})."
    if different < len(GRID_OF_TAUS):
        caption += (
            f" The {len(GRID_OF_TAUS)} values 0.1, 0.2, ... 1 make {different} different masks. Dots on one level "
            "line mask the same entries, since no entry's agreement lies between them."
        )
    return _picture("taus", title, "Thresholds", caption, draw_taus(shares, scores, label=row.metric.label))


def _fairness(title: str, scene: Scene) -> Picture | None:
    arms = {}
    for name, row in scene.items():
        curves = {mark: [curve(run, "clients", mark) for run in row.runs] for mark in MARKS}
        factor = metrics_of(row.runs[0])[0].factor
        arms[name] = {mark: [factor * c[max(c)] for c in values if c] for mark, values in curves.items() if any(values)}
    arms = {name: figures for name, figures in arms.items() if figures}
    if not arms:
        return None
    metric = metrics_of(next(iter(scene.values())).runs[0])[0]
    caption = (
        f"{metric.title} on the clients' own test samples after the last round: the worst tenth of clients, all "
        "clients, those sampled in the last round and the others. Small dots are seeds."
    )
    return _picture("clients", title, "Clients", caption, draw_fairness(arms, metric=metric))


def _rates(rows: Sequence[Row]) -> Iterator[Picture]:
    """A heat map of the learning rates, if they were varied."""
    if not rows or not any(name in rows[0].label for name in RATES):
        return
    groups: dict[str, dict[str, dict[tuple[float, float], float]]] = {}
    for row in rows:
        others = [in_title(n, v) for n, v in row.label.items() if n not in (*RATES, *ARM)]
        server_rate, client_rate = (number(row.runs[0].settings, name) for name in RATES)
        if server_rate is not None and client_rate is not None:
            arms = groups.setdefault(", ".join(others), {}).setdefault(arm(row.runs[0], list(row.label)), {})
            arms[server_rate, client_rate] = row.scores["last10"].mean
    metric = rows[0].metric
    caption = f"last10 {metric.in_words}, mean over seeds, one colour scale; each arm's best pair is framed."
    for title, drawn in list(groups.items())[:MOST]:
        server, client = (sorted({at[axis] for cells in drawn.values() for at in cells}) for axis in (0, 1))
        grids = {
            name: np.array([[cells.get((s, c), np.nan) for s in server] for c in client])
            for name, cells in drawn.items()
        }
        yield _picture("rates", title, "Learning rates", caption, draw_rates(grids, server, client, metric=metric))


def _partitions(rows: Sequence[Row]) -> Iterator[Picture]:
    """Samples of each class at each client: one figure for each partition that is recorded or can be recomputed."""
    seen: set[str] = set()
    for row in rows:
        run = row.runs[0]
        parts = {k: v for k, v in run.settings.items() if k.startswith("partition.")}
        title = ", ".join([str(run.settings.get("dataset")), *_partition_words(parts)])
        if title not in seen and len(seen) < MOST:
            seen.add(title)
            if (counts := _class_counts(run)) is not None:
                caption = f"Samples of each class at each client, seed {run.seed}."
                yield _picture("partition", title, "Partition", caption, draw_classes(*counts))


def _partition_words(parts: Mapping[str, Any]) -> list[str]:
    named = [n for n in ("clients", "classes_per_client", "alpha", "beta") if parts.get(f"partition.{n}") is not None]
    return [plain(parts.get("partition.name")), *(in_title(n, parts[f"partition.{n}"]) for n in named)]


def _class_counts(run: Run) -> tuple[Any, tuple[str, ...]] | None:
    """Counts [client, class] and class names: as recorded, or recomputed from the same data; None if neither works."""
    recorded = run.head.get("data")
    recorded = recorded if isinstance(recorded, dict) else {}
    counts = recorded.get("counts")
    if isinstance(counts, list) and counts and all(numbers({"": row}, "") for row in counts):
        valid = len({len(row) for row in counts}) == 1 and all(0 <= n <= MOST_SAMPLES for row in counts for n in row)
        table = np.array(counts, np.int64) if valid else None
        return None if table is None else (table, _class_names(recorded.get("classes"), table.shape[1]))
    return _recounted(run)


def _class_names(recorded: Any, classes: int) -> tuple[str, ...]:
    named = isinstance(recorded, list) and len(recorded) == classes
    return tuple(map(str, recorded if named else range(classes)))


def _recounted(run: Run) -> tuple[Any, tuple[str, ...]] | None:
    from fedgma.data.files import load
    from fedgma.data.files.locate import names
    from fedgma.data.skew import class_counts
    from fedgma.data.splits import divide

    wanted = {k.removeprefix("partition."): v for k, v in run.settings.items() if k.startswith("partition.")}
    name, clients, seed = (wanted.pop(key, None) for key in ("name", "clients", "seed"))
    more = {key: value for key, value in wanted.items() if value is not None}
    if run.settings.get("dataset") not in names():
        return None
    try:
        data = load(run.settings["dataset"])
        parts = divide(data, name, clients, seed=run.seed if seed is None else seed, **more)
    except (FedgmaError, TypeError, ValueError, OSError):
        return None  # the data are not on this machine, or this version does not know the partition
    return class_counts(parts, data.train.y, len(data.classes)), tuple(data.classes)


def _masked(scene: Scene) -> tuple[str, Row]:
    """The arm whose votes are shown: GMA, else the first masked arm, else the first arm."""
    order = sorted(scene.items(), key=lambda item: item[1].runs[0].settings["aggregator"] != "gma")
    return order[0]


def _has_tau(row: Row) -> bool:
    return row.runs[0].settings["aggregator"] == "gma" and isinstance(row.label.get("tau"), int | float)


def _measured(run: Run, what: str) -> list[Record]:
    """The rounds whose mask statistics include `what`."""
    return [record for record in run.rounds if isinstance(record.get("mask"), dict) and record["mask"].get(what)]


def _histogram(records: Sequence[Record]) -> np.ndarray | None:
    """Mean of the histograms that have the length of the first; None if there is none."""
    listed = [numbers(record, "mask", "histogram") for record in records]
    valid = [shares for shares in listed if shares is not None]
    same = [shares for shares in valid if len(shares) == len(valid[0])]
    return np.array(same).mean(axis=0) if valid and len(valid[0]) > 1 else None


def _below(records: Mapping[int, Record], round: int, layer: str) -> float:
    value = number(records[round], "mask", "layers", layer, "below")
    return np.nan if value is None else value

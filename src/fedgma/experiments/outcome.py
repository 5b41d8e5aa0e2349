"""What `fedgma.run` returns, and what is read from run folders: verdicts, tables, curves, a plot, trained models."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from fedgma.documents import PathLike
from fedgma.errors import ConfigError
from fedgma.experiments.notebook import shown
from fedgma.records.checkpoints import State
from fedgma.records.reader import Run, read_runs
from fedgma.records.trained import read_model
from fedgma.reports.report import verdict_of
from fedgma.reports.tables import Table, Value, html, text
from fedgma.reports.trackers import scalars
from fedgma.statistics.arms import Row, Summary, grouped, last_rounds, rows, summary_of, without_extended
from fedgma.statistics.baseline import against_baseline
from fedgma.statistics.comparisons import Comparison
from fedgma.statistics.labels import counted
from fedgma.statistics.metrics import ACCURACY
from fedgma.statistics.selection import select
from fedgma.statistics.selection import where as chosen_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from fedgma.training.models import Model


class Network(NamedTuple):
    """What the module of a run is built from, as by `fedgma.training.models.build`."""

    model: "Model"
    shape: tuple[int, ...]  # of a sample
    classes: int
    seed: int


class Outcome(NamedTuple):
    """The results: runs with their rounds, arms over seeds, and each other arm against the plain mean."""

    runs: tuple[Run, ...]
    arms: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]  # of the metric `last10`, cell by cell
    notes: tuple[str, ...] = ()  # warnings on the identity of runs
    models: Mapping[str, State] = {}  # of runs without a folder, by fingerprint
    networks: Mapping[str, Network] = {}  # what `model` builds, by fingerprint

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The verdict of each comparison as a sentence."""
        return tuple(verdict_of(pair, alone=len(self.comparisons) == 1) for pair in self.comparisons)

    def table(self) -> Any:
        """One row for each run: its arm, the settings that tell it apart, seed, rounds, and scores (shares in percent).

        A pandas DataFrame if pandas is installed, else a list of dicts.
        """
        return _frame([_scores(run, row) for row in grouped(self.runs) for run in row.runs])

    def curves(self) -> Any:
        """One row for each round of each run, with every number that was recorded, such as `test/accuracy`.

        A pandas DataFrame if pandas is installed, else a list of dicts. What a round did not measure is missing.
        """
        return _frame(
            [
                {"arm": row.name, "seed": run.seed, "round": record["round"], **_numbers(record)}
                for row in grouped(self.runs)
                for run in row.runs
                for record in run.rounds
            ]
        )

    def state_dict(self, arm: str | None = None, seed: int | None = None) -> "dict[str, Tensor]":
        """The trained model of one run, for `load_state_dict` of the same module in plain torch.

        `arm` is a name in the table or words such as "gma" or "aggregator=gma,tau=0.4"; it may be left out if there is
        one arm. Without `seed`, the run of the arm's first seed is taken.
        """
        import torch

        run = _chosen(self.runs, arm, seed)
        model = self.models.get(str(run.head.get("fingerprint")))
        arrays = read_model(run.folder).arrays if model is None else model
        return {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}

    def model(self, arm: str | None = None, seed: int | None = None) -> "nn.Module":
        """The trained module of one run, on the CPU and in evaluation mode; arguments are those of `state_dict`.

        Its input is a batch as the run saw it: images are normalised by what `run.json` records.
        """
        from fedgma.training.models import build

        run = _chosen(self.runs, arm, seed)
        state = self.state_dict(arm, seed)
        network = self.networks.get(str(run.head.get("fingerprint"))) or _recorded(run, state)
        if network is None:
            raise ConfigError(
                f"the module of run {run.folder.name} is not at hand: its model is not one of fedgma's, or the run is "
                "of an older fedgma; build it as for the run, and load its state_dict: "
                "net.load_state_dict(outcome.state_dict(...))"
            )
        module = build(*network)
        module.load_state_dict(state)
        return module.eval()

    def plot(self) -> "Figure":
        """Test accuracy or the task's first metric by round, mean over seeds.

        If it is one setting, the paired difference to the plain mean is below.

        A matplotlib figure: a notebook shows it, and `figure.savefig("curves.png")` writes it.
        """
        from fedgma.reports.pictures import plot_accuracy

        return shown(plot_accuracy(self.arms))

    def __repr__(self) -> str:
        """A short summary; the fields hold everything."""
        return "\n".join([self._title, text(_summary(self)), *(f"{line}." for line in self.verdicts)])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        lines = "".join(f"<p>{escape(line)}.</p>" for line in self.verdicts)
        return f"<p>{escape(self._title)}</p>{html(_summary(self))}{lines}"

    @property
    def _title(self) -> str:
        seeds = len({run.seed for run in self.runs})
        arms = len(self.arms)
        scores = " and ".join(dict.fromkeys(arm.metric.in_words for arm in self.arms)) or ACCURACY.in_words
        return f"{counted(len(self.runs), 'run')}: {counted(arms, 'arm')}, {counted(seeds, 'seed')}; test {scores}"


def outcome_of(runs: Sequence[Run], notes: Sequence[str] = (), models: Mapping[str, State] | None = None) -> Outcome:
    """The outcome of runs, finished or not; runs without an evaluation are in no arm."""
    scored = [run for run in runs if summary_of(run) is not None]
    return Outcome(tuple(runs), tuple(rows(scored)), tuple(against_baseline(scored)), tuple(notes), models or {})


def read_outcome(folders: PathLike | Sequence[PathLike], where: str | Sequence[str] = ()) -> Outcome:
    """The outcome of runs that were made before, by any command or script, from their folders.

    `where` chooses runs as `fedgma report --where` does: "dataset=mine.npz", or several such words. Of a run that was
    extended to more rounds, only the longer one counts.
    """
    runs, _ = without_extended(chosen_runs(read_runs(folders), where))
    return outcome_of(runs, tuple(dict.fromkeys(note for run in runs for note in run.head.get("notes", []))))


def _recorded(run: Run, state: "Mapping[str, Tensor]") -> Network | None:
    """What the module of a run is built from, by its folder and its weights; None for a model of a user's own."""
    from fedgma.training.models import MODELS, build

    model, shape = str(run.settings.get("model")), tuple(run.head.get("data", {}).get("shape", ()))
    built_in = str(run.head.get("identity", {}).get("model")).startswith(f"{model}, ")  # else it is a checksum
    if model not in MODELS or not built_in or not shape:
        return None
    *_, bias = build(model, shape, 1, 0).state_dict()  # the last array of each has an entry for each output
    return Network(model, shape, len(state[bias]), 0)


def _summary(outcome: Outcome) -> Table:
    """The arms with their scores over seeds."""
    names = {"last10": last_rounds(outcome.runs)} if outcome.runs else {}
    header = ("arm", *(names.get(name, name) for name in Summary._fields), "seeds")
    lines: list[tuple[Value, ...]] = [(arm.name, *arm.scores.values(), len(arm.runs)) for arm in outcome.arms]
    means = [spread.mean for arm in outcome.arms for spread in arm.scores.values()]
    digits = outcome.arms[0].metric.decimals(*means) if outcome.arms else 2
    return Table("arms", "", header, tuple(lines), decimals=(2, *(digits,) * len(Summary._fields), 2))


def _scores(run: Run, row: Row) -> dict[str, Any]:
    summary = summary_of(run)
    scores = dict.fromkeys(Summary._fields) if summary is None else summary._asdict()
    return {"run": run.folder.name, "arm": row.name, **row.label, "seed": run.seed, "rounds": len(run.rounds), **scores}


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round, without those of single layers."""
    return {name: value for name, value in scalars(record) if not name.startswith("mask/layers/")}


def _frame(records: list[dict[str, Any]]) -> Any:
    try:
        import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return records
    return pandas.DataFrame(records)


def _chosen(runs: Sequence[Run], arm: str | None, seed: int | None) -> Run:
    """The one run that an arm and a seed name."""
    arms = grouped(runs)
    names = [row.name for row in arms]
    if arm is not None and arm not in names:
        arms = grouped(select(runs, arm)[0])
    elif arm is not None:
        arms = [arms[names.index(arm)]]
    if len(arms) != 1:
        known = ", ".join(map(repr, names))
        raise ConfigError(f"expected one arm, got {arm!r}, which fits {len(arms)} of them; name one of: {known}")
    seeds = sorted(run.seed for run in arms[0].runs)
    wanted = seeds[0] if seed is None else seed
    if wanted not in seeds:
        raise ConfigError(f"no run of {arms[0].name!r} has seed {seed}; its seeds are {', '.join(map(str, seeds))}")
    return next(run for run in arms[0].runs if run.seed == wanted)

import re

import numpy as np
import pytest

from fedgma.aggregation.masks import soft_mask
from fedgma.reports.plots import (
    draw_accuracy,
    draw_agreement,
    draw_fairness,
    draw_layers,
    draw_rates,
    draw_taus,
    save,
    svg,
)
from fedgma.reports.plots.masks import GRID_OF_TAUS, coins, same_mask
from fedgma.reports.plots.style import colour_of


def luminance(colour):
    values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("ground", ["#f5f7f9", "#1d2329"])
def test_every_line_stands_out_on_light_and_dark_ground(ground):
    names = ["mean", *"abcdef"]
    for name in names:
        light, dark = sorted([luminance(colour_of(name, names)[0]), luminance(ground)], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 2.9, name


def test_arms_differ_in_their_dashes_too_up_to_five():
    names = ["mean", *"abcd"]
    assert len({str(colour_of(name, names)[1]) for name in names}) == 5


def test_ten_clients_leave_five_different_taus_of_the_papers_grid():
    groups = same_mask(coins(10), GRID_OF_TAUS)
    assert groups == [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8], [0.9, 1.0]]


def test_taus_of_a_group_mask_the_same_entries_and_others_do_not():
    votes = np.array([0, 2, 4, 6, 8, 10], np.int8)
    masks = {tau: soft_mask(tau)(votes, 10, "float64").tolist() for tau in GRID_OF_TAUS}
    groups = same_mask(coins(10), GRID_OF_TAUS)
    assert all(masks[tau] == masks[group[0]] for group in groups for tau in group)
    assert len({str(masks[group[0]]) for group in groups}) == len(groups)


def test_the_tau_profile_is_the_share_below_each_threshold():
    shares = np.array([0.2, 0.0, 0.5, 0.0, 0.3])
    (axes,) = draw_taus(shares).axes
    steps = axes.lines[0]
    assert dict(zip(steps.get_xdata(), np.round(steps.get_ydata(), 9), strict=True)) == {
        0.0: 0.0,
        0.25: 20.0,
        0.5: 20.0,
        0.75: 70.0,
        1.0: 70.0,
    }


def test_the_accuracy_picture_shows_the_mean_of_the_seeds_and_the_paired_difference():
    mean = {0: {1: 0.5, 2: 0.6}, 1: {1: 0.3, 2: 0.4}}
    gma = {0: {1: 0.51, 2: 0.62}, 1: {1: 0.31, 2: 0.42}}
    above, below = draw_accuracy({"mean": mean, "GMA": gma}).axes
    np.testing.assert_allclose(above.lines[0].get_ydata(), [40, 50])
    np.testing.assert_allclose(below.lines[0].get_ydata(), [1, 2])


def test_bands_are_left_out_where_many_arms_would_hide_each_other():
    seeds = {0: {1: 0.5, 2: 0.6}, 1: {1: 0.3, 2: 0.4}}
    few = draw_accuracy(dict.fromkeys(["mean", "a", "b"], seeds))
    many = draw_accuracy(dict.fromkeys(["mean", "a", "b", "c"], seeds))
    assert [len(axes.collections) for axes in few.axes] == [3, 2]
    assert [len(axes.collections) for axes in many.axes] == [0, 0]


def test_a_single_arm_has_no_panel_of_differences():
    assert len(draw_accuracy({"GMA": {0: {1: 0.5}}}).axes) == 1


def test_the_layers_picture_has_a_row_a_layer_in_the_models_order():
    axes = draw_layers(np.array([[0.1, 0.2], [0.3, 0.4]]), [1, 5], ["conv", "fc"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["conv", "fc"]
    np.testing.assert_allclose(np.asarray(axes.collections[0].get_array()).ravel(), [10, 20, 30, 40])
    assert axes.yaxis_inverted()


def test_the_rates_picture_frames_each_arms_best_pair_and_leaves_holes_open():
    grid = np.array([[50.0, 60.0], [np.nan, 55.0]])
    (axes,) = draw_rates({"mean": grid}, [0.1, 1.0], [0.01, 0.1]).axes
    (frame,) = axes.patches
    assert (round(frame.get_x() + 0.46), round(frame.get_y() + 0.42)) == (1, 0)
    assert [text.get_text() for text in axes.texts] == ["50.0", "60.0", "-", "55.0"]


def test_the_agreement_picture_sets_tau_between_what_is_masked_and_what_is_kept():
    (axes,) = draw_agreement({"round 1": coins(10)}, tau=0.4).axes
    (line,) = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert line.get_xdata()[0] == pytest.approx(0.3)  # 0.2 is masked, 0.4 is kept


def test_the_clients_picture_shows_only_what_was_measured():
    (axes,) = draw_fairness({"mean": {"worst_decile": [40.0], "mean": [70.0, 72.0]}}).axes
    assert axes.get_legend_handles_labels()[1] == ["worst tenth of clients", "all clients"]


def test_a_picture_for_a_page_has_its_own_ids_and_the_pages_colours():
    text = svg(draw_agreement({"a": coins(4)}, tau=0.5), "one")
    assert text.startswith("<svg")
    assert "currentColor" in text
    assert "#1d2329" not in text
    assert 'id="figure_1"' not in text
    assert 'id="one-figure_1"' in text


def test_pictures_are_the_same_bytes_every_time(tmp_path):
    def once(name):
        return save(draw_agreement({"a": coins(4)}), tmp_path / name).read_bytes()

    assert once("a.svg") == once("a.svg")


def hovered(drawn):
    """The words of each invisible shape of an SVG with its first coordinates."""
    shapes = re.findall(r'<(?:circle c|rect )x="([\d.-]+)" c?y="([\d.-]+)"[^>]*><title>([^<]*)', drawn)
    return {words: (float(x), float(y)) for x, y, words in shapes}


def test_a_pointer_finds_the_value_of_each_point_where_it_is_drawn():
    arms = {"GMA <b>": {0: {1: 0.25, 2: 0.5, 4: 0.625}}, "mean": {0: {1: 0.25, 2: 0.75, 4: 0.5}}}
    drawn = svg(draw_accuracy(arms), "one")
    found = hovered(drawn)
    words = [f"GMA &lt;b&gt;, round {r}: {v} (test accuracy, %)" for r, v in ((1, "25"), (2, "50"), (4, "62.5"))]
    assert set(words) < set(found)
    assert found["round 2: -25 (ahead of mean, points)"][0] == found[words[1]][0]
    marks = re.findall(r'<use xlink:href="#\S+" x="([\d.]+)" y="([\d.]+)"[^>]*fill: #2b83c6', drawn)
    apart = np.subtract.outer(
        [complex(*found[word]) for word in words], [complex(float(x), float(y)) for x, y in marks]
    )
    assert abs(apart).min(axis=1).max() < 0.1


def test_a_pointer_reads_bars_cells_and_rows():
    counts = np.array([12.0, 0, 24, 0, 4])
    bars = hovered(svg(draw_agreement({"round 1": counts / counts.sum()}, tau=0.5), "two"))
    assert any(words.startswith("round 1, agreement") and ": 60 (share of entries, %)" in words for words in bars)
    cells = hovered(svg(draw_layers(np.array([[0.5, 0.25], [0.1, 0.2]]), [1, 2], ["conv", "fc"]), "three"))
    assert set(cells) == {"conv, round 1: 50", "conv, round 2: 25", "fc, round 1: 10", "fc, round 2: 20"}

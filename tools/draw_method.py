"""Draws docs/pictures/masked-averaging.png: ten clients' updates, the mean, the mask and the masked mean.

python tools/draw_method.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import fedgma

CLIENTS, ENTRIES, TAU = 10, 30, 0.4
BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#a0aec0"


def example_updates():
    """Updates whose common part grows from left to right: from pure disagreement to one voice."""
    rng = np.random.default_rng(5)
    common = np.linspace(0, 1.1, ENTRIES) * rng.choice([-1, 1], ENTRIES)
    return common + rng.standard_normal((CLIENTS, ENTRIES))


def main():
    """Draw the picture."""
    updates = example_updates()
    merged = fedgma.masked_mean(TAU)({"w": updates})
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(9, 5.4), sharex=True, height_ratios=[2.2, 1, 1.4], layout="constrained"
    )
    top.imshow(updates, cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto", interpolation="nearest")
    top.set_ylabel("client")
    top.set_yticks([0, 4, 9], ["1", "5", "10"])
    top.set_title("Updates of ten clients, thirty parameters (red: up, blue: down)", loc="left", fontsize=11)

    place, mask = np.arange(ENTRIES), merged.mask["w"]
    middle.bar(place, mask, color=np.where(mask == 1, BLUE, ORANGE), width=0.8)
    middle.set_ylim(0, 1.08)
    middle.set_yticks([0, 0.5, 1])
    middle.set_ylabel("mask")
    middle.set_title(
        "Mask: 1 where at least 7 of 10 clients agree (tau = 0.4), else the agreement", loc="left", fontsize=11
    )

    bottom.bar(place, merged.mean["w"], color=GREY, width=0.8, label="plain mean")
    bottom.bar(place, merged.update["w"], color=BLUE, width=0.45, label="masked mean")
    bottom.axhline(0, color="black", linewidth=0.6)
    bottom.set_ylabel("step")
    bottom.set_xlabel("parameter")
    bottom.legend(frameon=False, ncols=2, loc="upper left")
    bottom.set_title("The server's step", loc="left", fontsize=11)
    for axes in (middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    target = Path(__file__).parents[1] / "docs" / "pictures" / "masked-averaging.png"
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()

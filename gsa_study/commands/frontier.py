"""Draw `docs/figures/frontier.png` from the table "Retrieval and speed of each selection" in performance.md.

    python -m gsa_study.commands.frontier

Each mark is a selection method at one sequence length. The x axis is the speed-up of a training step. The y axis is the
needles found in a retrieval test, in percent of the dense model. Methods lacking either value are omitted. If a model
was trained with a method, only that model's retrieval is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, StrMethodFormatter

from gsa_study.figure import plots
from gsa_train.process.as_command import as_command

PAGE, FIGURE = Path("docs/reference/performance.md"), Path("docs/figures/frontier.png")
SECTION = "\n### Retrieval and speed of each selection\n"
LENGTHS = {"8K": "tab:green", "32K": "tab:blue", "128K": "tab:purple"}
RETRIEVAL = {
    "trained": ("o", "model trained with it"),
    "indexer": ("s", "indexer trained alone"),
    "perfect": ("^", "perfect indexer"),
}


def table(page: str) -> list[dict[str, str]]:
    """Return the rows of the section's table by column."""
    section = page.partition(SECTION)[2].partition("\n### ")[0]
    lines = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def draw(ax: Axes, row: Mapping[str, str]) -> None:
    speeds = {length: float(row[length].rstrip("‡")) for length in LENGTHS if row[length]}
    kinds = ["trained"] if row["trained"] else [kind for kind in RETRIEVAL if row[kind]]
    for kind in kinds if speeds else ():
        needles = float(row[kind].rstrip("†"))
        filled = "full" if row["keys"] == row["keys, speed"] else "none"
        ax.plot(list(speeds.values()), [needles] * len(speeds), color="0.8", zorder=1)
        for length, speed in speeds.items():
            ax.plot(speed, needles, RETRIEVAL[kind][0], color=LENGTHS[length], fillstyle=filled)
        name = row["selection"].removesuffix(" (removed)")
        at = min(speeds.values()), needles
        ax.annotate(name, at, xytext=(0, 6), textcoords="offset points", fontsize="small")


@as_command()
def main() -> None:
    figure, (ax,) = plots(9, 4.4)
    for row in table(PAGE.read_text(encoding="utf-8")):
        draw(ax, row)
    for length, color in LENGTHS.items():
        ax.plot([], [], "o", color=color, label=f"step at {length} tokens")
    for marker, meaning in RETRIEVAL.values():
        ax.plot([], [], marker, color="0.4", label=meaning)
    ax.plot([], [], "o", color="0.4", fillstyle="none", label="speed with more keys than retrieval")
    ax.axhline(100, color="0.6", linestyle=":")
    ax.axvline(1, color="0.6", linestyle=":")
    ax.set_xscale("log")
    ax.set_xticks([0.7, 1, 1.5, 2, 3, 4])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.set_xlim(0.67, 4.2)
    ax.set_xlabel("speed-up of a training step over dense attention (1.7B model)")
    ax.set_ylabel("needles found (percent of the dense model)")
    ax.set_ylim(0, 115)
    ax.legend(loc="center right", fontsize="small")
    figure.savefig(FIGURE)


if __name__ == "__main__":
    main()

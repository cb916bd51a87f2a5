"""What another seed does to the loss, over the arms of all studies: seeds.csv beside the studies' CSVs."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gsa_study.spread import median_and_deviation
from gsa_study.tables import VALUES_HEAD, csv_text
from gsa_train.files import write_atomically

NAME, ALL = "seeds", "all"
KEY = "val_perplexity"
"""Its logarithm is the validation loss at the end of a run."""


def write_seeds(studies: Iterable[str], out: Path) -> list[Path]:
    """Of each arm the loss of its second seed less that of its first, as `<study>.<arm>`; of `all` the median, the
    deviation, the number of arms, and by how much two perplexities of one seed may differ without a difference of the
    arms: two deviations. Returns the files that were written: none where fewer than two arms have two seeds.

    Read from the CSVs of the studies, as texts are: they are there for studies whose folders are elsewhere, too.
    """
    rows: list[Sequence[object]] = []
    for study in studies:
        for arm, losses in _losses(out / f"{study}.csv").items():
            first, second, *_ = [*sorted(losses), None, None]
            if first is not None and second is not None:
                title, at = "loss of the second seed less the first one's", f"seeds {first} and {second}"
                apart = losses[second] - losses[first]
                rows.append((f"{study}.{arm}", second, title, "difference", at, repr(apart), "", "", ""))
    if len(rows) < 2:
        return []
    median, deviation = median_and_deviation([float(str(row[5])) for row in rows])
    of_all = (
        ("median of the differences", "median", median),
        (
            "deviation of the differences: 1.4826 times their median distance from the median",
            "deviation",
            deviation,
        ),
        ("arms", "arms", len(rows)),
        ("two deviations, as a share of the perplexity", "no_difference", math.expm1(2 * deviation)),
    )
    rows += [(ALL, 1, title, key, "all studies", repr(value), "", "", "") for title, key, value in of_all]
    write_atomically(path := out / f"{NAME}.csv", csv_text([VALUES_HEAD, *rows]))
    return [path]


def _losses(path: Path) -> Mapping[str, Mapping[int, float]]:
    """Arm -> seed -> finite validation loss."""
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["key"] == KEY and math.isfinite(value := float(row["value"])):
                    losses[row["arm"]][int(row["seed"])] = math.log(value)
    return losses

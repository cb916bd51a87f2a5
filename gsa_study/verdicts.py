"""What people say of studies: `verdicts/<study>.md` of the pages' folder, with numbers filled from the pages' CSVs.

`{recipe/no_warmup/val_perplexity:.1f}` is the mean over the seeds of a study's arm, in Python's format, and
`{recipe/no_warmup-seed1/val_perplexity:.1f}` the value of one run. Where a metric stands at several points, one of them
is named: `{context/gsa_k512/data.validation.loss@evaluation k-k128:.3f}`. Between two of these, ` / ` is their ratio,
over the seeds that both have: `{selection/block_32/val_loss / selection/paper/val_loss:.2f}`.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import fmean

from gsa_train.config import ConfigError

VERDICTS = "verdicts"
_OF_AN_ARM = r"[\w.]+/[\w.]+(?:-seed\d+)?/[\w.]+(?:@[^:{}/]+?)?"
NUMBER = re.compile(rf"\{{({_OF_AN_ARM})(?: / ({_OF_AN_ARM}))?:([^{{}}]+)\}}")
BRACE = re.compile(r"\{[^{}]*\}?")
"""What a filled verdict has none of: a reference with a mistake would stand on the page."""


def read_verdict(out: Path, name: str) -> str:
    """Empty where nobody has written one.

    Raises:
        ConfigError: a number that is not in the CSVs.
    """
    path = out / VERDICTS / f"{name}.md"
    if not path.is_file():
        return ""
    problems: list[str] = []

    def fill(found: re.Match[str]) -> str:
        above, below, form = found.groups()
        try:
            value = _ratio(out, above, below) if below else fmean(_by_seed(out, above).values())
            return format(value, form)
        except ValueError as error:
            problems.append(f"{found.group()}: {error}")
            return ""

    text = NUMBER.sub(fill, path.read_text(encoding="utf-8").strip())
    problems += [
        f"{brace}: not a number of a study; write {{study/arm/metric:.1f}}" for brace in BRACE.findall(text)
    ]
    if problems:
        raise ConfigError(path, problems)
    return text


def _ratio(out: Path, above: str, below: str) -> float:
    """Of two means over the seeds that both have: another seed is another text, which moves the losses of all arms.

    Raises:
        ValueError: nothing of these names, or no seed in common.
    """
    one, other = _by_seed(out, above), _by_seed(out, below)
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        raise ValueError(f"{above} and {below} have no seed in common")
    return fmean(one[seed] for seed in seeds) / fmean(other[seed] for seed in seeds)


def _by_seed(out: Path, reference: str) -> dict[int, float]:
    """Seed -> value, of the seed that is named or of all.

    Raises:
        ValueError: nothing of this name, or at several points.
    """
    path, _, at = reference.partition("@")
    study, named, key = path.split("/")
    arm, _, only = named.partition("-seed")
    source = out / f"{study}.csv"
    if not source.is_file():
        raise ValueError(f"no {source}; give a study with finished runs")
    with source.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["arm"], row["key"]) == (arm, key)]
    rows = [row for row in rows if only in ("", row["seed"])]
    points = sorted({row["at"] for row in rows})
    if not rows:
        raise ValueError(f"{source} has no {key} of {named}")
    if at not in points and (at or len(points) > 1):
        raise ValueError(f"{key} of {named} stands {', '.join(points)}; name one of these behind @")
    return {int(row["seed"]): float(row["value"]) for row in rows if not at or row["at"] == at}

"""Write the page of time and memory, which compares the benchmarks of one machine with the theory.

efficiency.csv receives all numbers in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gsa_data.whole_files import parse_json
from gsa_study.efficiency_cases import (
    BENCHES,
    KEYS,
    PAPER,
    Bench,
    Case,
    generation,
    measured_steps,
    scaled_steps,
    selections,
    steps,
)
from gsa_study.results import Standing, write_with_verdict
from gsa_study.tables import VALUES_HEAD, bullets, csv_text, markdown_table
from gsa_train.config import Config, ConfigError
from gsa_train.files import write_atomically

NAME, TITLE = "efficiency", "Time and memory, 4K to 128K tokens"
QUESTION = (
    "How much time and memory does GSA take, relative to the standard model or to dense attention? Below 1 GSA is "
    "faster or needs less memory. `theory` compares operations of matrix products, as theorem 1 of the paper does. In "
    f"decoding it compares times to read weights and caches. The paper has {PAPER['step']} for a training step. At "
    f"128K tokens it has {PAPER['prefill']} for prefill, {PAPER['decode']} for decoding and {PAPER['memory']} for "
    "memory. `r` is the number of keys that a tile of queries reads, divided by the number that one query selects."
)


HEADS = {
    "ms": "ms",
    "time": "over standard",
    "forward": "forward",
    "theory": "theory",
    "forward_backward": "forward + backward",
    "with_indexer_loss": "with indexer loss",
    "gib": "peak memory, GiB",
    "memory": "peak memory over standard or dense",
}


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    """Headings of the cells that say what a row is about."""
    keys: Sequence[str]
    """Keys of the values that follow."""
    cases: Sequence[Case]

    def rows(self) -> list[list[str]]:
        """Return the rows. The last column has the commit if the rows of the bench have several."""
        commits = any(case.commit for case in self.cases)
        rows = [[*self.head, *(HEADS[key] for key in self.keys), *["commit"] * commits]]
        for case in self.cases:
            if case.is_shown:
                numbers = (number(key, case.values.get(key)) for key in self.keys)
                rows.append([*map(str, case.about), *numbers, *[case.commit] * commits])
        return rows


def number(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if key == "gib" or (key == "ms" and value >= 100) else f"{value:.2f}"


def read_benches(folder: Path) -> dict[str, Bench]:
    """Read the JSON files that the benches wrote with `--out`. Missing files are left out.

    Raises:
        ConfigError: a file is damaged.
    """
    found = {}
    for name in BENCHES:
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                content = parse_json(path.read_text(encoding="utf-8"))
                where = content["environment"]
                about = f"{where['gpu']}, torch {where['torch']}, Triton {where['triton']}, {where['commit']}"
                found[name] = Bench(content["rows"], path, where["commit"], f"`{name}`: {about}")
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    path, [f"damaged ({error!r}); write it again by {name}.py --out"]
                ) from error
    return found


def efficiency_tables(benches: Mapping[str, Bench], shapes: Mapping[str, Config]) -> list[Table]:
    """
    Args:
        shapes: config by the benches' name of its shape, `1.7B`.
    """
    of_layer = ("forward", "theory", "forward_backward", "with_indexer_loss", "memory")
    of_step = ("ms", "time", "theory", "gib", "memory")
    found = [
        Table(
            "One layer's attention",
            ("shape", "tokens", "selection", "r"),
            of_layer,
            [*selections(benches, shapes)],
        ),
        Table(
            "A training step of the whole model",
            ("config",),
            ("ms", "time", "gib", "memory"),
            [*steps(benches)],
        ),
        Table(
            "Training steps from 4K to 128K tokens",
            ("shape", "tokens", "layers", "model", "r"),
            of_step,
            [*measured_steps(benches), *scaled_steps(benches)],
        ),
        Table(
            "Generation by the whole model",
            ("", "tokens", "sequences", "model"),
            of_step,
            [*generation(benches, shapes)],
        ),
    ]
    return [table for table in found if table.cases]


def write_efficiency_values(tables: Sequence[Table], benches: Mapping[str, Bench], out: Path) -> list[Path]:
    """Write the CSV of all numbers, with the columns of a study's CSV. Returns the written files, none without
    benches."""
    rows: list[Sequence[object]] = []
    for case in (case for table in tables for case in table.cases):
        bench = benches[case.bench]
        where = (bench.path.as_posix(), "", case.commit or bench.commit)
        rows += [
            (case.name, 1, KEYS[key], key, f"by {case.bench}", repr(value), *where)
            for key, value in case.values.items()
            if value is not None
        ]
    if not rows:
        return []
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path := out / f"{NAME}.csv", csv_text([VALUES_HEAD, *rows]))
    return [path]


def write_efficiency(
    tables: Sequence[Table], benches: Mapping[str, Bench], out: Path
) -> tuple[Standing, Path]:
    path = out / f"{NAME}.md"
    parts = [f"# {TITLE}", QUESTION]
    if not benches:
        parts.append("Not run yet: `make bench` and `make bench-models`.")
    for table in tables:
        parts += [f"## {table.title}", markdown_table(table.rows())]
    if benches:
        about = bullets(bench.about for bench in benches.values())
        parts += ["## Source", about, f"Steps of models with fewer layers are in [{NAME}.csv]({NAME}.csv)."]
    parts.append("`python launch/results.py` writes the page except the verdict from the benches' files.")
    said = write_with_verdict(path, parts)
    runs = f"{len(benches)} of {len(BENCHES)} benches"
    return Standing(path.name, TITLE, runs, said if benches else "not run yet"), path

"""Write the pages of results: launch/results.py of a checkout.

    python launch/results.py [--studies DIR] [--out DIR] [--benches DIR]

A page for each study file in `--studies` that has a `question`, made of its run folders; one of time and memory, made
of what the benches wrote; seeds.csv, what another seed does in all studies; main.png, the losses of the arms that
headline.yaml of `--studies` lists; and README.md over all. A page with more finished runs than are here stays as it is,
and main.png where not all of its runs are here. Exit code 2: wrong use, a mistake in a study file, headline.yaml or a
verdict, a damaged file of a bench, or no room.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gsa_train.commands.as_command import as_command
from gsa_train.config import ConfigError, load_config
from gsa_train.config.load import read_yaml
from gsa_train.study.efficiency import (
    efficiency_tables,
    read_benches,
    write_efficiency,
    write_efficiency_values,
)
from gsa_train.study.headline import FIGURE, FILE, load_headline, write_headline
from gsa_train.study.results import write_overview, write_page, write_values
from gsa_train.study.seeds import write_seeds
from gsa_train.study.study_file import load_study

SHAPES = {"1.7B": "gsa_1.7b", "7B": "gsa_7b"}
"""What the benches call them; a shipped config of each."""


@as_command()
def main() -> int:
    arguments = parse()
    standings, written = [], []
    try:
        files = [path for path in sorted(arguments.studies.glob("*.yaml")) if "question" in read_yaml(path)]
        studies = [load_study(path, need_data=False) for path in files]
        headline_file = arguments.studies / FILE
        headline = load_headline(headline_file, studies) if headline_file.is_file() else None
        shapes = {name: load_config(config, need_data=False) for name, config in SHAPES.items()}
        benches = read_benches(arguments.benches)
        tables = efficiency_tables(benches, shapes)
        values = [write_values(study, arguments.out) for study in studies]
        written += write_seeds([study.config.name for study in studies], arguments.out)
        written += write_efficiency_values(tables, benches, arguments.out)
        for results, files_of_values in values:
            standing, pages = write_page(results, arguments.out)
            standings.append(standing)
            written += pages + files_of_values
            if not pages:
                print(
                    f"kept {arguments.out / standing.page}: it has {standing.runs} runs, and fewer are here"
                )
        standing, page = write_efficiency(tables, benches, arguments.out)
        written.append(page)
        if headline is not None:
            figure, lacking = write_headline(headline, arguments.out)
            if figure is None:
                lines = ", ".join(lacking)
                print(f"did not draw {arguments.out / FIGURE}: no finished run is here of {lines}")
            else:
                written.append(figure)
        written.append(write_overview([*standings, standing], arguments.out))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the lines has left
        raise
    except OSError as error:
        print(f"not all was written: {error}; make room, or give another --out", file=sys.stderr)
        return 2
    for each in written:
        print(f"wrote {each}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the pages of results.", allow_abbrev=False)
    for name, default, meaning in (
        ("studies", "studies", "folder of study files"),
        ("out", "docs/results", "folder of the pages"),
        ("benches", "benchmarks/results", "folder of what the benches wrote with --out"),
    ):
        parser.add_argument(
            f"--{name}", type=Path, default=Path(default), metavar="DIR", help=f"{meaning} ({default})"
        )
    arguments = parser.parse_args()
    for name in ("studies", "benches"):  # without it the pages would say that nothing has run
        folder = getattr(arguments, name)
        if not folder.is_dir():
            parser.error(
                f"--{name} {folder}: no such folder; start in the checkout, or give the one of the {name}"
            )
    return arguments

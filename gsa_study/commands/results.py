"""Write the pages of results: launch/results.py of a checkout.

    python launch/results.py [--studies DIR] [--out DIR] [key=value ...]

The command first looks for finished runs in local folders, and adds them to the records (`<study>.csv` and `records/`).
Then it writes a page for each study file in `--studies` that has a `question` and at least one finished run. README.md
receives a table of all pages. The verdicts, which a person writes in the pages, are kept. If no losses of a study are
recorded, its figure is kept, too.

Exit code 2 means incorrect usage, a mistake in a study file, a damaged record file, a page without the heading `##
Verdict`, or a full disk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gsa_study.record import recorded_results, update_record
from gsa_study.results import read_verdict, write_figure, write_overview, write_page
from gsa_study.study_file import Study, load_study
from gsa_train.config import ConfigError
from gsa_train.config.load import problem_line, read_yaml
from gsa_train.process.as_command import as_command


@as_command()
def main() -> int:
    arguments = parse()
    rows, written = [], []
    try:
        files = [path for path in sorted(arguments.studies.glob("*.yaml")) if "question" in read_yaml(path)]
        if not files:  # README.md would lose its table of studies
            print(f"--studies {arguments.studies}: no study has a question; give others", file=sys.stderr)
            return 2
        studies = [load_study(path, arguments.overrides, need_data=False) for path in files]
        check_names(studies)
        for study in studies:  # before anything is written
            read_verdict(arguments.out / f"{study.config.name}.md")
        for study in studies:
            files_of_record, left_out = update_record(study, arguments.out)
            print("".join(f"{line}\n" for line in left_out), end="")
            written += files_of_record
            results = recorded_results(study, arguments.out)
            if not results.finished:
                continue
            figure = write_figure(results, arguments.out)
            row, page = write_page(results, arguments.out)
            rows.append(row)
            written += [page, *filter(None, [figure])]
            if figure is None:
                print(
                    f"kept {arguments.out / study.config.name}.png: the losses of its runs are not recorded"
                )
        written.append(write_overview(rows, arguments.out))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the lines has ended
        raise
    except OSError as error:
        print(f"not all was written: {error}; make room, or give another --out", file=sys.stderr)
        return 2
    for path in written:
        print(f"wrote {path}")
    return 0


def check_names(studies: Sequence[Study]) -> None:
    """Refuse two studies of one name, which would share a page and a record and drop each other's arms.

    Raises:
        ConfigError: there are two.
    """
    of_name: dict[str, Path] = {}
    for study in studies:
        name, first = study.config.name, of_name.setdefault(study.config.name, study.path)
        if first != study.path:
            raise ConfigError(
                study.path, [problem_line("name", name, f"also the name of {first}", "give it its own")]
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the pages of results.", allow_abbrev=False)
    for name, default, meaning in (
        ("studies", "studies", "folder of study files"),
        ("out", "docs/results", "folder of the pages"),
    ):
        parser.add_argument(
            f"--{name}", type=Path, default=Path(default), metavar="DIR", help=f"{meaning} ({default})"
        )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="as launch/study.py had them: fields of the configs of all runs that are here",
    )
    arguments = parser.parse_intermixed_args()
    if not arguments.studies.is_dir():  # Without the folder the pages would say that nothing has run.
        parser.error(
            f"--studies {arguments.studies}: no such folder; start in the checkout, or give the one of the studies"
        )
    return arguments

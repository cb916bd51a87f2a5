"""Write the caveats below the tables of a study. The caveats name missing runs and metrics, arms (compared configs)
without a clear difference, and runs whose commits, devices or texts differ.
"""

from __future__ import annotations

from difflib import get_close_matches

from gsa_study.columns import Column
from gsa_study.spread import close_pairs, written
from gsa_study.tables import Results, short


def notes(results: Results) -> list[str]:
    """Returns lines about arms with one seed, metrics that no run has, and runs that are not in the means."""
    lines = []
    single = [arm for arm in results.arms if len(results.runs_of(arm)) == 1]
    if single:
        lines.append(f"One seed, so nothing is known of the spread: {', '.join(single)}.")
    missing = [each for each in results.runs if not each.finished]
    if missing:
        states: dict[tuple[str, str], list[str]] = {}
        for each in missing:
            states.setdefault((each.run.arm, each.state), []).append(str(each.run.seed))
        said = (
            (f"{arm}-seed{seeds[0]}" if len(seeds) == 1 else f"{arm}, seeds {', '.join(seeds)}")
            + (f" ({state})" if state else "")
            for (arm, state), seeds in states.items()
        )
        lines.append(
            f"{len(missing)} of {len(results.runs)} runs are not finished and in no mean: {'; '.join(said)}."
        )
    lines += [
        f"The records of {each.run.name} end at step {each.records_end_at} of {each.run.steps}, though it is finished: "
        "its values are of that step, and no run is compared at later tokens. Copy its whole metrics.jsonl, or train "
        "it again."
        for each in results.values
        if each.records_end_at is not None
    ]
    lines += origins(results)
    other = [f"{job}: {reason}" for job, reason in results.failures.items() if not job.endswith(" train")]
    lines += [f"Failed: {line}" for line in other]
    for column in results.columns:
        if results.finished and all(value is None for value in column.values.values()):
            lines.append(f"No run has {column.key} ({column.at}){_meant(results, column)}.")
    return lines


def origins(results: Results) -> list[str]:
    """Returns lines about commits, devices and training texts that differ between the finished runs."""
    lines = []
    for what, found in (
        ("commits", {short(commit) for each in results.finished for commit in each.commits}),
        ("devices", {device for each in results.finished for device in each.devices}),
        ("training texts", {each.text for each in results.finished if each.text}),
    ):
        if len(found) > 1:
            lines.append(f"The finished runs have several {what}: {', '.join(sorted(found))}.")
    unknown = sum(not each.text for each in results.finished)
    if 0 < unknown < len(results.finished):
        lines.append(
            f"The training text of {unknown} of the {len(results.finished)} finished runs was not recorded."
        )
    return lines


def _meant(results: Results, column: Column) -> str:
    keys = {key for each in results.values for record in each.records for key in record}
    keys |= {key for each in results.values for key in each.summary}
    if column.at.startswith("evaluation "):  # its keys are in other files
        return ""
    close = get_close_matches(column.key, sorted(keys - {column.key}), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def close_lines(results: Results) -> list[str]:
    """Returns a line about pairs of arms without a clear difference in the first metric."""
    if not results.columns:
        return []
    column = results.columns[0]
    pairs = close_pairs({arm: results.by_seed(arm, column) for arm in results.arms})
    said = "; ".join(
        f"{one} and {other} ({written(apart)} over {apart.n} seeds)" for one, other, apart in pairs
    )
    return [f"No clear difference in {column.title}, seed by seed: {said}."] if pairs else []

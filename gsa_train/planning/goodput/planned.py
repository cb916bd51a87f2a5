"""Format a simulated run: ETTR, the best interval between checkpoints, and categories of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from gsa_train.metrics.goodput.words import short, table
from gsa_train.planning.goodput.simulate import Parts, Tried, daly_seconds, first_order_ettr, young_seconds

AS_GOOD = 0.001
"""Intervals count as equally good if their ETTR is at most this much below the best."""
SHARES = {
    "productive": "productive",
    "repeated": "steps done again",
    "stalls": "stalls of saves",
    "start_up": "start-up",
    "detection": "faults until exit",
    "down": "down",
    "extra": "validation and the like",
}
"""Maps fields of Outcome to their names in texts."""
ASSUMED = (
    "  assumed: faults come one by one, by chance, and each ends the whole run; a new node is there at once;\n"
    "    no part takes longer on more GPUs (docs/reference/goodput.md)"
)
EVERY = 4
"""The table shows every fourth of the tried intervals."""


@dataclass(frozen=True)
class Planned:
    gpus: int
    mtbf_hours: float
    """Mean time between faults of one GPU."""
    days: float
    trials: int
    parts: Parts
    tried: list[Tried]
    """Sorted by interval, ascending."""
    asked: Tried | None
    """Result for the interval of the user, or of the measured run."""

    @property
    def mean_seconds(self) -> float:
        return 3600 * self.mtbf_hours / self.gpus

    @property
    def best(self) -> Tried:
        return max(self.tried, key=lambda each: each.ettr)


def about_plan(planned: Planned, sources: Mapping[str, str]) -> str:
    """
    Args:
        sources: field of Parts -> where its value comes from.
    """
    parts, best, mean = planned.parts, planned.best, planned.mean_seconds
    good = [each.interval_steps for each in planned.tried if each.ettr >= best.ettr - AS_GOOD]
    young, daly = young_seconds(parts.stall_seconds, mean), daly_seconds(parts.stall_seconds, mean)
    formula = first_order_ettr(parts, young, mean)
    asked = (
        []
        if planned.asked is None
        else [f"  with one {_interval(planned.asked, parts)}: {_ettr(planned.asked)}"]
    )
    rows = [each for number, each in enumerate(planned.tried) if number % EVERY == 0 or each is best]
    lines = [
        f"{planned.gpus:,} GPU{'s' * (planned.gpus > 1)}, a fault of each every {planned.mtbf_hours:,g} h: of the run "
        f"every {short(mean)}",
        f"{planned.trials} runs of {planned.days:g} days simulated, with {best.faults:,.1f} faults each",
        *table(("part", "value", ""), [_part(each.name, parts, sources) for each in fields(Parts)]),
        "",
        f"best: a checkpoint {_interval(best, parts)}: {_ettr(best)}",
        f"  within {AS_GOOD:.1%} of it: every {min(good):,} to {max(good):,} steps",
        *asked,
        f"  Young, sqrt(2 C M): {short(young)} of work; Daly: {short(daly)}; 1 - C/T - (T/2 + restart)/M at Young's T: "
        + (f"{formula:.2%}" if formula > 0 else "nothing, for faults are too frequent for it"),
        ASSUMED,
        "",
        *table(
            ("where the time goes", "share"),
            [(name, f"{best.share(part):.2%}") for part, name in SHARES.items()],
        ),
        "",
        *table(
            ("checkpoint every", "ETTR", "stalls", "steps done again"),
            [
                (
                    _steps(each),
                    f"{each.ettr:.2%}",
                    f"{each.share('stalls'):.2%}",
                    f"{each.share('repeated'):.2%}",
                )
                for each in rows
            ],
        ),
    ]
    return "\n".join(lines)


def _part(name: str, parts: Parts, sources: Mapping[str, str]) -> tuple[str, str, str]:
    value = getattr(parts, name)
    words = name.removesuffix("_seconds").replace("_", " ")
    return words, f"{value:.2%}" if name == "extra_share" else f"{value:.4g} s", sources[name]


def _interval(tried: Tried, parts: Parts) -> str:
    return f"every {_steps(tried)} ({short(tried.interval_steps * parts.whole_step_seconds)})"


def _steps(tried: Tried) -> str:
    return f"{tried.interval_steps:,} step{'s' * (tried.interval_steps > 1)}"


def _ettr(tried: Tried) -> str:
    return f"ETTR {tried.ettr:.2%} +- {tried.error:.2%}"

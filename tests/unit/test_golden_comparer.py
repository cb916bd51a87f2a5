"""Tests that the golden comparison finds and locates one changed bit; otherwise "equal" would mean nothing."""

import json
import math
from pathlib import Path

import pytest

from golden.__main__ import write
from golden.compare import compare, compare_one, fingerprint_differences, same_bits, table
from golden.training_runs import numbers_of

GOLDEN = {
    "one rank": {"step 1": {"loss": 8.25, "layer_kl[0]": 0.1}, "step 2": {"loss": 8.0, "layer_kl[0]": 0.2}},
    "two ranks": {"step 1": {"loss": 8.5}},
}


def changed(name: str, place: str, key: str, value: object) -> dict[str, dict[str, dict[str, object]]]:
    copy: dict[str, dict[str, dict[str, object]]] = {
        run: {step: dict(keys) for step, keys in steps.items()} for run, steps in GOLDEN.items()
    }
    copy[name][place][key] = value
    return copy


def test_equal_results_are_equal() -> None:
    found = compare(GOLDEN, changed("one rank", "step 1", "loss", 8.25))
    assert [one.equal for one in found] == [True, True]
    assert [one.values for one in found] == [4, 1]
    assert table(found).endswith("2 of 2 equal to the last bit")


def test_one_moved_bit_is_found_and_named() -> None:
    moved = math.nextafter(0.2, 1)
    found = compare(GOLDEN, changed("one rank", "step 2", "layer_kl[0]", moved))
    assert [one.different for one in found] == [1, 0]
    text = table(found)
    for part in ("one rank", "step 2", "layer_kl[0]", "golden 0.2,", f"today {moved!r}", "1.39e-16"):
        assert part in text
    assert text.endswith("1 of 2 equal to the last bit")


@pytest.mark.parametrize(
    ("golden", "today", "same"),
    [
        (0.0, -0.0, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (1, 1.0, False),
        (1, 2, False),
        ("a1", "a1", True),
        ("a1", "a2", False),
    ],
)
def test_what_counts_as_the_same(golden: object, today: object, same: bool) -> None:
    assert same_bits(golden, today) is same


def test_what_is_missing_or_failed_is_a_difference() -> None:
    assert not compare_one("run", GOLDEN["one rank"], None).equal
    assert not compare_one("run", GOLDEN["one rank"], "RuntimeError: no").equal
    assert not compare_one("run", "RuntimeError: no", GOLDEN["one rank"]).equal
    assert not compare_one("run", {}, {}).equal
    assert (
        "step 2: missing"
        in compare_one("run", GOLDEN["one rank"], {"step 1": GOLDEN["one rank"]["step 1"]}).first
    )
    without = {**GOLDEN["one rank"], "step 1": {"loss": 8.25}}
    assert "layer_kl[0]: golden 0.1, missing" in compare_one("run", GOLDEN["one rank"], without).first
    assert not compare_one("run", GOLDEN["two ranks"], GOLDEN["one rank"]).equal  # one step too many
    assert [one.equal for one in compare(GOLDEN, {**GOLDEN, "three": {"step 1": {"loss": 1.0}}})] == [
        True,
        True,
        False,
    ]


def test_a_new_key_is_told_and_no_difference() -> None:
    found = compare(GOLDEN, changed("one rank", "step 1", "wall_clock", 5.0))
    assert all(one.equal for one in found)
    assert "not compared: wall_clock" in table(found)


def test_floats_survive_the_file_to_the_last_bit(tmp_path: Path) -> None:
    values = {
        "run": {"step 1": {"a": 0.1 + 0.2, "b": 5e-324, "c": math.inf, "d": math.nan, "e": -0.0, "f": 3}}
    }
    write(tmp_path / "golden.json", {"commit": "c0ffee"}, {**values, "broken": "ValueError: no"})
    read = json.loads((tmp_path / "golden.json").read_text())
    assert read["made_at"] == {"commit": "c0ffee"}
    assert read["results"]["broken"] == "ValueError: no"
    assert compare_one("run", values["run"], read["results"]["run"]).equal


def test_times_rates_and_memory_are_left_out() -> None:
    record = {"step": 3, "phase": "sparse", "loss": 1.5, "lrs": {"base": 0.1}, "layer_kl": [1.0, None]}
    record |= {
        "step_seconds": 2.0,
        "tokens_per_second": 3.0,
        "mfu": 0.4,
        "memory_peak_bytes": 7,
        "data_wait": 0.5,
    }
    found = dict(numbers_of(iter([record, {"event": "checkpoint", "step": 3}])))
    assert found == {"step 3": {"step": 3, "loss": 1.5, "lrs.base": 0.1, "layer_kl[0]": 1.0}}


def test_another_processor_is_named() -> None:
    found = fingerprint_differences(
        {"torch": "2.13", "vectors": "AVX512"}, {"torch": "2.13", "vectors": "AVX2"}
    )
    assert found == ["vectors AVX512 there, AVX2 here"]

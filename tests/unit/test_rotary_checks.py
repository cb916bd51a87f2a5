"""Fields of the rotary embedding that must fit each other, on a config that is right until one thing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gsa_train.config import ConfigError, load_config

YARN = [
    "model.rope_scaling.rope_type=yarn",
    "model.rope_scaling.factor=4",
    "model.rope_scaling.original_max_position_embeddings=64",
]
CASES: list[tuple[list[str], list[str]]] = [
    (
        ["model.rope_scaling.factor=4"],
        ["model.rope_scaling.factor = 4.0", "without effect with model.rope_scaling.rope_type = default"],
    ),
    (
        YARN[:2],
        ["model.rope_scaling.original_max_position_embeddings = 0", "not the length that YaRN extends"],
    ),
    ([*YARN, "model.rope_scaling.factor=0.5"], ["model.rope_scaling.factor = 0.5", "below 1"]),
    ([*YARN, "model.rope_scaling.factor=0"], ["model.rope_scaling.factor = 0.0", "not positive"]),
    (
        [*YARN, "model.rope_scaling.beta_slow=32"],
        ["model.rope_scaling.beta_fast = 32.0", "not above model.rope_scaling.beta_slow = 32"],
    ),
    ([*YARN, "model.rope_scaling.attention_factor=-1"], ["attention_factor = -1.0", "negative"]),
    ([*YARN, "model.rope_base=1"], ["model.rope_base = 1.0", "not above 1 with YaRN"]),
    (
        ["model.rope_scaling.rope_type=linear"],
        ["model.rope_scaling.rope_type = linear", "one of default, yarn"],
    ),
    (["model.rope_scaling.scale=4"], ["model.rope_scaling.scale = 4", "unknown key"]),
    (["model.rope_scaling=yarn"], ["model.rope_scaling = yarn", "not a section"]),
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text("phases: [{name: sparse, steps: 10}]")
    return path


def test_yarn_is_right(base: Path) -> None:
    config = load_config(base, YARN, world_size=1, need_data=False)
    assert (config.model.rope_scaling.rope_type, config.model.rope_scaling.factor) == ("yarn", 4.0)


@pytest.mark.parametrize(("overrides", "fragments"), CASES, ids=[" ".join(case[0][-1:]) for case in CASES])
def test_a_broken_rule_is_one_line(base: Path, overrides: list[str], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, overrides, world_size=1, need_data=False)
    (line,) = caught.value.problems
    for fragment in fragments:
        assert fragment in line

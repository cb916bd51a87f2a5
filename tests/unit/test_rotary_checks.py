"""Fields of the rotary embedding that must fit each other, on a config that is right until one thing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gsa_train.config import ConfigError, ModelConfig, load_config
from gsa_train.config.model import check_rotary

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


@pytest.mark.parametrize(
    ("size", "share", "channels"),
    [(64, 0.35, 22), (100, 0.29, 28), (50, 0.29, 14), (10, 0.25, 2), (25, 0.25, 6), (64, 1.0, 64)],
)
def test_a_share_is_rounded_down_to_channels(base: Path, size: int, share: float, channels: int) -> None:
    """0.29 * 100 is 28.999999999999996 to megatron-core and transformers, too."""
    fields = [f"model.head_dim={size}", f"model.rotary_percent={share}"]
    assert load_config(base, fields, world_size=1, need_data=False).model.rotary_channels == channels


def test_the_remedy_for_a_share_is_right_for_each_size() -> None:
    for size in range(2, 258):
        for share in (0.001, 0.3, 0.58, 0.77, 0.999):
            model = ModelConfig(head_dim=size, rotary_percent=share)
            for line in check_rotary(model):
                remedy = float(line.partition("; give ")[2].partition(",")[0])
                assert check_rotary(ModelConfig(head_dim=size, rotary_percent=remedy)) == [], line

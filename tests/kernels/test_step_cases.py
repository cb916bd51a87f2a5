"""Tests which steps bench_step.py --lengths measures, and the meaning of its models' names."""

import pytest

from whole_steps.step_cases import StepCase, plan
from whole_steps.step_sweep import without_variant


def test_layers_that_share_a_selection_come_in_whole_groups() -> None:
    """From 128K on there is one group of layers, because two do not fit a device."""

    def depths(length: int, model: str) -> list[int]:
        return [group[0].layers for group in plan(["1.7b"], [length], ["standard", model], length)]

    assert depths(32768, "gsa") == [2, 4]
    assert depths(32768, "gsa_rope_reuse") == [4, 8]
    assert depths(131072, "gsa_rope_reuse") == [4]


def test_depths_that_are_asked_for() -> None:
    groups = plan(["1.7b"], [4096], ["standard", "shared_rope_reuse"], 4096, layers=[24])
    assert [[(case.model, case.layers) for case in group] for group in groups] == [
        [("standard", 24), ("shared_rope_reuse", 24)]
    ]
    with pytest.raises(
        ValueError, match=r"--layers 10: the shape 1\.7b has 24; give 1 to 24, in whole groups of 4"
    ):
        plan(["1.7b"], [4096], ["standard", "shared_rope_reuse"], 4096, layers=[10])
    with pytest.raises(ValueError, match=r"--layers 25: the shape 1\.7b has 24; give 1 to 24$"):
        plan(["1.7b"], [4096], ["standard"], 4096, layers=[25])


def test_a_name_says_how_many_keys_a_model_selects_and_which_aim_is_its() -> None:
    config = StepCase("1.7b", 8192, 4, "shared_rope_reuse_k512_graphs", 4, 4).config()
    assert (config.gsa.k_min, config.gsa.k_base, config.gsa.k_max) == (64, 512, 1024)
    assert (config.gsa.selection_block, config.gsa.selection_reuse, config.train.cuda_graphs) == (32, 4, True)
    assert without_variant("shared_rope_reuse_k512_graphs") == "shared_rope_reuse"
    assert without_variant("gsa_rope_reuse_k1024") == "gsa_rope_reuse"
    assert without_variant("shared") == "shared"

"""Any layout trains what one rank trains: the same losses, indexer losses and gradient norms, step by step.

Whole runs; more layouts, with a tiny model, are in test_many_layouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gsa_train.evaluate import scores_of
from helpers.runs import ALL_KEYS, QUICK, QUICK_STEPS, STEPS, Run, finished

TENSOR = ("parallel.tensor=2",)
PIPELINE = ("parallel.pipeline=2",)
CONTEXT = ("parallel.context=2",)
LAYOUTS = {
    "tensor and sequence": (2, TENSOR),
    "pipeline": (2, PIPELINE),
    "data": (2, ()),
    "tensor x pipeline": (4, TENSOR + PIPELINE),
    "context": (2, CONTEXT),
    "interleaved pipeline": (2, (*PIPELINE, "parallel.virtual_pipeline=2")),
}
FIRST_SPARSE_STEPS = 12  # 10 steps of warm-up and 2 sparse ones

DENSE_PHASE = "phases=[{name: dense, attention: dense, steps: 10, lr: 1.35e-3, warmup_steps: 9}]"
BASELINE = (*QUICK, "gsa.attention=dense", DENSE_PHASE)
OPTIONS = (
    *ALL_KEYS,
    "gsa.indexer_rope=true",
    "gsa.local_window=8",
    "gsa.selection_block=4",
    "gsa.selection_reuse=2",
    "gsa.indexer_temperature=learned",
    "model.qk_norm=true",
    "model.tie_embeddings=true",
)
OVERALL = ("loss", "indexer_kl", "grad_norm")
PER_LAYER = ("layer_indexer_kl", "layer_variance_ema")

pytestmark = pytest.mark.slow


def assert_same_training(
    run: Run,
    reference: Run,
    relative: float,
    steps: int = QUICK_STEPS,
    keys: Sequence[str] = (*OVERALL, *PER_LAYER),
    of: int = QUICK_STEPS,
) -> None:
    """In the first `steps` of the `of` steps that both took."""
    assert run.series("step") == reference.series("step") == list(range(1, of + 1))
    for key in keys:
        pairs = zip(run.series(key)[:steps], reference.series(key)[:steps], strict=True)
        for step, (value, expected) in enumerate(pairs, start=1):
            assert value == pytest.approx(expected, rel=relative, abs=0, nan_ok=True), (key, step)


def assert_same_validation(run: Run, reference: Run, relative: float) -> None:
    """Seven sequences, then those of each source: most layouts fill up the last round."""
    found, expected = (scores_of(each.records()[-1]) for each in (run, reference))
    assert len(expected["validation_loss_by_source"]) > 1
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if "perplexity" not in key:  # exp(loss), which multiplies the rounding
            assert found[key] == pytest.approx(value, rel=relative), key


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "interleaved pipeline"])
def test_sparse_training_is_that_of_one_rank(name):
    ranks, layout = LAYOUTS[name]
    one, many = finished(), finished(*layout, ranks=ranks)
    assert one.series("recall")[-1] < 0.99  # keys are left out
    assert_same_training(many, one, relative=1e-6, steps=1, of=STEPS)
    assert_same_training(many, one, relative=1e-5, steps=FIRST_SPARSE_STEPS, of=STEPS)
    # Then a score near the k_t-th has flipped on its last bit, here or there.
    assert_same_training(many, one, relative=1e-3, steps=STEPS, keys=OVERALL, of=STEPS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_where_no_selection_can_flip_all_steps_agree(name):
    ranks, layout = LAYOUTS[name]
    one, many = finished(*ALL_KEYS), finished(*ALL_KEYS, *layout, ranks=ranks)
    assert one.series("recall")[-1] == pytest.approx(1)  # none is left out
    assert_same_training(many, one, relative=1e-5)
    assert_same_validation(many, one, relative=1e-5)


def test_tensor_parallel_without_sequence_parallel():
    # torchrun's own ranks, each with its own order of sets; all other runs here are forked from one process.
    run = finished(*ALL_KEYS, *TENSOR, "parallel.sequence=false", ranks=2, real=True)
    assert_same_training(run, finished(*ALL_KEYS), relative=1e-5)


def test_the_dense_baseline_under_tensor_parallelism():
    one = finished(*BASELINE)
    assert one.series("indexer_kl") == [None] * QUICK_STEPS
    run = finished(*BASELINE, *TENSOR, ranks=2)
    assert_same_training(run, one, relative=1e-5, keys=("loss", "grad_norm"))


def test_all_options_under_tensor_and_pipeline_parallelism():
    run = finished(*OPTIONS, *TENSOR, *PIPELINE, ranks=4)
    assert_same_training(run, finished(*OPTIONS), relative=1e-5)


def test_overlapped_communication_changes_nothing():
    overlap = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
    without = finished(*ALL_KEYS, ranks=2)
    assert_same_training(finished(*ALL_KEYS, *overlap, ranks=2), without, relative=0)


def test_a_replicated_optimizer_trains_as_a_sharded_one():
    run = finished(*ALL_KEYS, "parallel.distributed_optimizer=false", ranks=2)
    assert_same_training(run, finished(*ALL_KEYS, ranks=2), relative=1e-5)


def test_recomputation_changes_nothing_under_pipeline_parallelism():
    run = finished(*ALL_KEYS, *PIPELINE, "train.recompute=full", ranks=2)
    assert_same_training(run, finished(*ALL_KEYS, *PIPELINE, ranks=2), relative=0)

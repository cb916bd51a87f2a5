"""Before any kernel is imported: without a CUDA device Triton's kernels run in its interpreter."""

import gc
import os
import shutil
import tempfile
from importlib.util import find_spec

import pytest
import torch

# Asked otherwise, CUDA does not work in forks of this process.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):  # else what needs it is skipped
        from helpers.interpreter import mend_interpreter

        mend_interpreter()
else:
    from gsa_kernels.hopper.miscompile_guard import refuse_wrong_sums

    refuse_wrong_sums()

# W&B's service lists the installed packages by `pip list` at the beginning of each run, two CPU seconds.
os.environ.setdefault("WANDB__SAVE_REQUIREMENTS", "false")

SHARED_RUNS = "GSA_TEST_SHARED_RUNS"


LONGEST_FILES = (
    "distributed/test_many_layouts.py",
    "resume/test_faults.py",
    "e2e/test_demo.py",
    "resume/test_runs_with_spikes.py",
    "resume/test_other_layouts.py",
    "distributed/test_expert_layouts.py",
    "distributed/test_three_way_layouts.py",
    "distributed/test_fused_tensor_parallel.py",
    "unit/model/test_triton_core.py",
    "distributed/test_layouts.py",
    "unit/test_memory_trace.py",
    "resume/test_wrong_bits.py",
    "unit/test_zero.py",
    "unit/data/test_data_memory.py",
    "distributed/test_layouts_on_gpu.py",
    "unit/data/test_data_stream.py",
    "resume/test_data_survives_kills.py",
    "unit/test_spikes.py",
    "kernels/test_nonfinite.py",
    "e2e/test_notebooks.py",
    "distributed/test_chat_layouts.py",
    "unit/hf/test_generation.py",
    "unit/data/test_source_weights.py",
    "unit/test_packaging.py",
    "e2e/test_ctrl_c.py",
    "resume/test_kills.py",
    "kernels/test_fused_indexer_loss.py",
    "unit/test_wandb_outage.py",
    "unit/test_checkpoint_optimizer.py",
    "unit/test_plots.py",
    "unit/hf/test_hf_generate.py",
    "unit/evaluation/test_needle.py",
    "unit/test_damage_walk.py",
    "kernels/test_indexer_loss.py",
    "resume/test_run_folders.py",
    "kernels/test_layer.py",
    "unit/data/test_data_tokens.py",
    "unit/model/test_triton_core_distillation.py",
    "unit/hf/test_hf_training.py",
    "unit/data/test_data_oracle.py",
    "e2e/test_wrong_configs.py",
    "unit/model/test_layer_oracle.py",
    "resume/test_stops.py",
    "unit/evaluation/test_beside_a_run.py",
    "unit/evaluation/test_ruler.py",
    "distributed/test_data_wait.py",
    "resume/test_study_kills.py",
    "kernels/test_triton_candidates.py",
    "unit/model/test_future_leak.py",
    "unit/test_optim.py",
    "unit/hf/test_hf_saving.py",
    "unit/evaluation/test_harness.py",
    "resume/test_deepspeed.py",
    "unit/model/test_fused_ops.py",
    "kernels/test_triton_attention.py",
    "kernels/test_triton_gathered_attention.py",
    "kernels/test_api.py",
)
"""By CPU time and, for the second, time spent waiting; what comes after them fills the gaps at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="processes that share out the files of tests")


def pytest_configure(config: pytest.Config) -> None:
    """A folder for the runs that tests share; workers inherit its name."""
    if SHARED_RUNS not in os.environ:
        folder = os.environ[SHARED_RUNS] = tempfile.mkdtemp(prefix="gsa_test_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the others stay in their order."""
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get("/".join(item.path.parts[-2:]), len(places)))


def pytest_collection_finish() -> None:
    """What was imported stays: no collection, of which some tests ask for many, has to search its million objects."""
    gc.collect()
    gc.freeze()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    workers, option = session.config.getoption("--workers"), session.config.option
    if workers == 1 or option.collectonly or session.testsfailed:
        return None  # as without this
    from helpers.workers import run_in_workers  # imports what starts ranks

    run_in_workers(session, workers)
    return True

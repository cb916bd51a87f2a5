"""Prepares the tests before any kernel is imported. Without a CUDA device Triton's kernels run in its interpreter."""

import gc
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils import collect_env

# Launchers, Slurm and W&B set these variables, on which no test may depend. Without a W&B key, here or in netrc, no
# test sends a run to the user's account.
OF_A_RANK = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
for name in [*os.environ]:
    if name in OF_A_RANK or name.startswith(("SLURM_", "TORCHELASTIC_", "WANDB_")):
        del os.environ[name]
os.environ["NETRC"] = os.devnull
# huggingface_hub reads this variable when it is imported. It then asks no server for missing names.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell's background job and nohup start with these signals ignored, and processes of the tests would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)

# With the default check, CUDA does not work in forks of this process.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # The ranks set this, too. Otherwise megatron-core's fusions are compiled, by a C++ compiler if not cached.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if find_spec("triton"):  # otherwise tests that need Triton are skipped
        from helpers.interpreter import mend_interpreter

        mend_interpreter()
else:
    from gsa_kernels.miscompile_guard import refuse_wrong_sums

    refuse_wrong_sums()

# W&B's service runs `pip list` at the start of each run, which takes two CPU seconds.
os.environ.setdefault("WANDB__SAVE_REQUIREMENTS", "false")
# W&B prints three lines of advertisement if an earlier test has imported transformers.
os.environ["WANDB_DISABLE_WEAVE"] = "true"
# lm-evaluation-harness stores a list of compilers and drivers with each result. We do not use it.
collect_env.get_pretty_env_info = lambda: ""

# Ranks of a layout exchange thousands of small messages per second. As batch processes the ranks do not preempt each
# other at each message.
if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

SHARED_RUNS = "GSA_TEST_SHARED_RUNS"
TESTS = Path(__file__).parent

LONGEST = """
distributed/test_many_layouts.py resume/test_cool_down.py resume/test_averaged_runs.py
resume/test_faults.py resume/test_runs_with_spikes.py resume/test_wrong_bits.py
e2e/test_demo.py resume/test_kills.py resume/test_not_finite.py distributed/test_fused_tensor_parallel.py
distributed/test_expert_layouts.py e2e/test_wrong_configs.py resume/test_other_layouts.py unit/test_memory_trace.py
unit/test_result_record.py resume/test_refused_starts.py
distributed/test_three_way_layouts.py unit/data/test_data_stream.py unit/model/test_fused_steps.py
unit/test_wandb_outage.py unit/test_zero.py kernels/test_nonfinite.py
e2e/test_notebooks.py unit/data/test_data_memory.py unit/hf/test_generation.py unit/test_spikes.py unit/hf/test_trl.py
unit/test_packaging.py e2e/test_chat_model.py resume/test_run_folders.py
unit/data/test_source_weights.py unit/test_checkpoint_optimizer.py resume/test_experts.py e2e/test_ctrl_c.py
unit/convert/test_export_hf.py distributed/test_chat_layouts.py unit/test_weights_of_another_run.py
kernels/test_indexer_loss.py unit/data/test_data_oracle.py unit/test_damage_walk.py
unit/model/test_layer_oracle.py resume/test_stops.py
unit/evaluation/test_beside_a_run.py unit/test_optim.py
unit/model/test_future_leak.py kernels/test_layer.py kernels/test_triton_gathered_attention.py
unit/evaluation/test_ruler.py unit/hf/test_hf_generate.py
unit/test_stopping.py kernels/test_triton_candidates.py unit/hf/test_hf_training.py resume/test_watching.py
kernels/test_triton_attention.py unit/evaluation/test_perplexity.py
unit/data/test_data_faults.py unit/evaluation/test_results.py
unit/model/test_row_fraction.py kernels/test_triton_decode.py kernels/test_api.py unit/test_job_script.py
unit/test_tasks.py unit/test_trainer.py unit/hf/test_hf_saving.py resume/test_failed_saves.py
"""
"""Test files of at least 5 s (CPU seconds plus waiting), the longest first."""
LONGEST_FILES = LONGEST.split()


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """Seed torch's generator, which torch 2.13 seeds differently in each process; tests run in any order."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # Otherwise torch records the stack for three absent kinds of devices, which takes a millisecond each time.
        torch.default_generator.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="processes that share out the files of tests")


def pytest_configure(config: pytest.Config) -> None:
    """Create a folder for the runs that tests share; workers inherit its name."""
    if SHARED_RUNS not in os.environ:
        folder = os.environ[SHARED_RUNS] = tempfile.mkdtemp(prefix="gsa_test_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the longest files to the front; the others keep their order."""
    if gone := [name for name in LONGEST_FILES if not (TESTS / name).is_file()]:
        raise pytest.UsageError(f"tests/conftest.py: LONGEST names no file of tests/: {', '.join(gone)}")
    if torch.cuda.is_available():
        for item in items:
            if (TESTS / "kernels") in item.path.parents:  # they run the kernels on the available device
                item.add_marker(pytest.mark.gpu)
    places = {TESTS / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, and collect after 10,000 new objects instead of 700."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    workers, option = session.config.getoption("--workers"), session.config.option
    if workers == 1 or option.collectonly or session.testsfailed:
        return None  # pytest's default
    from helpers.workers import run_in_workers  # this imports what starts ranks

    run_in_workers(session, workers)
    return True

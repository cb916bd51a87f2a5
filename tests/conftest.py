"""Before any kernel is imported: without a CUDA device Triton's kernels run in its interpreter."""

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

# By these variables a launcher, Slurm and W&B speak to a run. Without them tests are the same in a pod of several ranks
# and in an allocation; and with no key of W&B, in netrc neither, none sends a run to the user's account.
OF_A_RANK = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
for name in [*os.environ]:
    if name in OF_A_RANK or name.startswith(("SLURM_", "TORCHELASTIC_", "WANDB_")):
        del os.environ[name]
os.environ["NETRC"] = os.devnull
# Before huggingface_hub is imported, which reads it then: a name that is not there is asked for on no server.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell's background job and nohup start with these ignored, and so would the processes that tests press Ctrl-C on.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)

# Asked otherwise, CUDA does not work in forks of this process.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # As in the ranks: else what megatron-core fuses is compiled, and where nothing is cached yet by a compiler of C++.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if find_spec("triton"):  # else what needs it is skipped
        from helpers.interpreter import mend_interpreter

        mend_interpreter()
else:
    from gsa_kernels.hopper.miscompile_guard import refuse_wrong_sums

    refuse_wrong_sums()

# W&B's service lists the installed packages by `pip list` at the beginning of each run, two CPU seconds.
os.environ.setdefault("WANDB__SAVE_REQUIREMENTS", "false")
# It prints three lines about a product of its own where a test before has imported transformers.
os.environ["WANDB_DISABLE_WEAVE"] = "true"
# So does lm-evaluation-harness with each result, beside compilers and drivers; we keep nothing of it.
collect_env.get_pretty_env_info = lambda: ""

# Ranks of a layout send each other thousands of small messages a second. As batch processes they do not break in upon
# each other with every one of them: a quarter as many switches that nobody asked for.
if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

SHARED_RUNS = "GSA_TEST_SHARED_RUNS"
TESTS = Path(__file__).parent

LONGEST = """
distributed/test_many_layouts.py resume/test_faults.py resume/test_runs_with_spikes.py resume/test_wrong_bits.py
e2e/test_demo.py resume/test_kills.py resume/test_not_finite.py distributed/test_fused_tensor_parallel.py
distributed/test_expert_layouts.py e2e/test_wrong_configs.py resume/test_other_layouts.py unit/test_memory_trace.py
distributed/test_three_way_layouts.py unit/data/test_data_stream.py unit/model/test_fused_steps.py
unit/test_wandb_outage.py resume/test_data_survives_kills.py unit/test_zero.py kernels/test_nonfinite.py
e2e/test_notebooks.py unit/data/test_data_memory.py unit/hf/test_generation.py unit/test_spikes.py
unit/test_packaging.py e2e/test_chat_model.py resume/test_run_folders.py kernels/test_groups_of_keys.py
unit/data/test_source_weights.py unit/test_checkpoint_optimizer.py resume/test_experts.py e2e/test_ctrl_c.py
unit/convert/test_export_hf.py distributed/test_chat_layouts.py unit/test_weights_of_another_run.py
kernels/test_indexer_loss.py unit/test_plots.py unit/data/test_data_oracle.py unit/test_damage_walk.py
unit/model/test_layer_oracle.py resume/test_stops.py unit/model/test_fused_loss_in_steps.py
unit/evaluation/test_beside_a_run.py unit/test_optim.py kernels/test_fused_indexer_loss.py
unit/model/test_future_leak.py kernels/test_layer.py kernels/test_triton_gathered_attention.py
unit/evaluation/test_ruler.py unit/evaluation/test_needle.py resume/test_deepspeed.py unit/hf/test_hf_generate.py
unit/test_stopping.py kernels/test_triton_candidates.py unit/hf/test_hf_training.py resume/test_watching.py
kernels/test_triton_attention.py unit/evaluation/test_perplexity.py distributed/test_data_wait.py
unit/data/test_data_faults.py unit/evaluation/test_results.py unit/test_main_weights.py
unit/model/test_row_fraction.py kernels/test_triton_decode.py kernels/test_api.py unit/test_job_script.py
unit/test_tasks.py unit/test_trainer.py unit/hf/test_hf_saving.py resume/test_failed_saves.py
"""
"""By CPU seconds and seconds spent waiting, down to 5; what comes after them fills the gaps at the end."""
LONGEST_FILES = LONGEST.split()


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """From torch's own generator, which torch 2.13 seeds again in each process; and in whatever order tests run."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # Else torch notes the stack for three kinds of devices that it does not have, a millisecond each time.
        torch.default_generator.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="processes that share out the files of tests")


def pytest_configure(config: pytest.Config) -> None:
    """A folder for the runs that tests share; workers inherit its name."""
    if SHARED_RUNS not in os.environ:
        folder = os.environ[SHARED_RUNS] = tempfile.mkdtemp(prefix="gsa_test_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the others stay in their order."""
    if gone := [name for name in LONGEST_FILES if not (TESTS / name).is_file()]:
        raise pytest.UsageError(f"tests/conftest.py: LONGEST names no file of tests/: {', '.join(gone)}")
    if torch.cuda.is_available():
        for item in items:
            if (TESTS / "kernels") in item.path.parents:  # they run the kernels on the device that there is
                item.add_marker(pytest.mark.gpu)
    places = {TESTS / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Imported objects stay: no garbage collection has to search this million, and some tests collect often. By
    themselves they come after 10,000 new ones, not 700, which took a thirtieth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    workers, option = session.config.getoption("--workers"), session.config.option
    if workers == 1 or option.collectonly or session.testsfailed:
        return None  # as without this
    from helpers.workers import run_in_workers  # imports what starts ranks

    run_in_workers(session, workers)
    return True

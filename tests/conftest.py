"""Before any kernel is imported: without a CUDA device Triton's kernels run in its interpreter."""

import gc
import os
import shutil
import tempfile
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):  # else what needs it is skipped
        from helpers.interpreter import mend_interpreter

        mend_interpreter()
else:
    from gsa_kernels.hopper.miscompile_guard import refuse_wrong_sums

    refuse_wrong_sums()

SHARED_RUNS = "GSA_TEST_SHARED_RUNS"


LONGEST_FILES = (
    "distributed/test_many_layouts.py",
    "resume/test_faults.py",
    "resume/test_runs_with_spikes.py",
    "distributed/test_fused_tensor_parallel.py",
    "distributed/test_three_way_layouts.py",
    "unit/test_memory_trace.py",
    "kernels/test_indexer_loss.py",
    "kernels/test_fused_indexer_loss.py",
    "kernels/test_triton_selection.py",
    "kernels/test_triton_attention.py",
    "kernels/test_query_start.py",
    "resume/test_kills.py",
    "resume/test_study_kills.py",
    "unit/model/test_triton_core.py",
    "e2e/test_demo.py",
    "resume/test_other_layouts.py",
    "resume/test_wrong_bits.py",
    "kernels/test_api.py",
    "distributed/test_layouts.py",
    "distributed/test_layouts_on_gpu.py",
    "resume/test_stops.py",
    "e2e/test_notebooks.py",
    "kernels/test_triton_gathered_attention.py",
    "kernels/test_triton_candidates.py",
    "unit/test_zero.py",
)
"""By CPU time and, for the second, time spent waiting; what comes after them fills the gaps at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """A folder for the runs that tests share; pytest-xdist's workers inherit its name."""
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

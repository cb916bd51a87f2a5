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
        from helpers.interpreter import shorten_interpreter

        shorten_interpreter()

SHARED_RUNS = "GSA_TEST_SHARED_RUNS"


def pytest_configure(config: pytest.Config) -> None:
    """A folder for the runs that tests share; pytest-xdist's workers inherit its name."""
    if SHARED_RUNS not in os.environ:
        folder = os.environ[SHARED_RUNS] = tempfile.mkdtemp(prefix="gsa_test_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    """What was imported stays: no collection, of which some tests ask for many, has to search its million objects."""
    gc.collect()
    gc.freeze()

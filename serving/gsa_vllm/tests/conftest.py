"""Set environment variables of vLLM and Triton before a test imports these packages."""

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine runs in the test's process, where faults can be planted
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # otherwise all workers of a shared machine are bound to one core
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

# Triton interprets only functions that are defined while TRITON_INTERPRET is set. The import below defines Triton's own
# functions. test_kernels.py sets the variable again for our kernels.
os.environ["TRITON_INTERPRET"] = "1"
import triton  # noqa: F401

del os.environ["TRITON_INTERPRET"]

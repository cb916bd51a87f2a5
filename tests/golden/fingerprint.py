"""Records the processor or GPU, torch and Triton, on which the bits of results depend."""

import platform
from importlib.metadata import version
from pathlib import Path

import torch


def cpu_fingerprint() -> dict[str, str]:
    """Describe the processor's model and vector instructions, by which math libraries choose their kernels."""
    return {
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
    }


def gpu_fingerprint() -> dict[str, str]:
    """Describe the GPU's architecture and number of multiprocessors, which determine kernels and tiles. The GPU's name
    is left out, because an H100 gave the same bits as an H200."""
    import triton  # the results of CPUs need none

    device = torch.cuda.get_device_properties()
    return {
        "gpu": f"sm_{device.major}{device.minor}, {device.multi_processor_count} multiprocessors",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


def _processor() -> str:
    """Return vendor, family, model and name from Linux, or else Python's description."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    parts = [fields.get("vendor_id", "--"), "family", fields.get("cpu family", "--")]
    return " ".join([*parts, "model", fields.get("model", "--"), f"({fields.get('model name', '--')})"])

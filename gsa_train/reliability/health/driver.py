"""Ask NVIDIA's driver about a device (NVML, package nvidia-ml-py): ECC errors, rows to be remapped, critical XIDs."""

from __future__ import annotations

from typing import Any

import torch

MISSING = (
    "ECC errors, remapped rows and XIDs are not asked for: the package nvidia-ml-py is not installed "
    "(pip install nvidia-ml-py), or the driver does not tell"
)

LOST = "the driver has lost it"
XIDS_OF_PROGRAMS = (13, 31, 43, 45, 68, 109)
"""XIDs that programs cause on healthy devices, as NVIDIA's device plugin for Kubernetes lists them (`health.go`)."""


def open_driver() -> Any:
    """Returns the initialized package, or None if the package or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class XidWatch:
    """Collects critical XIDs of one device from now on. NVML does not report earlier ones."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        self._events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def faults(self) -> list[str]:
        """Returns the XIDs since the construction, without XIDS_OF_PROGRAMS."""
        found = []
        try:
            while True:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 1)
                if event.eventData not in XIDS_OF_PROGRAMS:
                    found.append(f"XID {event.eventData}")
        except self._nvml.NVMLError_GpuIsLost:
            found.append(LOST)
        except self._nvml.NVMLError:  # usually a timeout: no further event
            pass
        self._nvml.nvmlEventSetFree(self._events)
        return found


def faults_by_driver(nvml: Any, uuid: str) -> list[str]:
    """Returns uncorrected ECC errors since the driver was loaded, and remapped rows that failed or wait for a reset."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except nvml.NVMLError_GpuIsLost:
        return [LOST]
    found = []

    def ecc() -> None:
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if errors:
            found.append(f"{errors} uncorrected ECC errors since the driver was loaded")

    def rows() -> None:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if pending:
            found.append("rows of its memory wait to be remapped: it needs a reset")
        if failed:
            found.append("rows of its memory could not be remapped")

    for ask in (ecc, rows):
        try:
            ask()
        except nvml.NVMLError_GpuIsLost:
            found.append(LOST)
        except nvml.NVMLError:  # ECC is off, the device has no row remapping, or there is no permission.
            continue
    return found


def uuid_of(device: torch.device) -> str:
    """Returns the UUID as nvidia-smi prints it; empty for a CPU."""
    if device.type != "cuda":
        return ""
    try:
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    except RuntimeError:  # the check reports the fault
        return "GPU that does not answer"

"""Who may have a context on a GPU: everyone, or one process, which is then the MPS server."""

import logging
from dataclasses import dataclass

import pynvml

from gpunode.hardware.nvml import Nvml, words
from gpunode.model.errors import HardwareError, NotOfferedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComputeModes:
    """Sets compute modes of whole GPUs. Root only; a reboot or a reset of the GPU undoes it."""

    nvml: Nvml

    def exclusive(self, uuid: str) -> None:
        """One process at a time. Raises HardwareError, NotOfferedError where the GPU has no such mode."""
        try:
            self._set(uuid, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission) as error:
            raise NotOfferedError(f"{uuid} cannot be kept to one process at a time: {words(error)}") from error
        except pynvml.NVMLError as error:
            raise HardwareError(f"compute mode of {uuid} cannot be set to EXCLUSIVE_PROCESS: {words(error)}") from error

    def default(self, uuid: str) -> None:
        """Any number of processes. A GPU that is gone needs nothing. Raises HardwareError."""
        try:
            self._set(uuid, pynvml.NVML_COMPUTEMODE_DEFAULT)
        except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_NotFound):
            return  # a reset, which a lost GPU needs, sets it back
        except pynvml.NVMLError as error:
            raise HardwareError(f"compute mode of {uuid} cannot be set back to DEFAULT: {words(error)}") from error

    def _set(self, uuid: str, mode: int) -> None:
        handle = self.nvml.nvmlDeviceGetHandleByUUID(uuid)
        if self.nvml.nvmlDeviceGetComputeMode(handle) != mode:
            self.nvml.nvmlDeviceSetComputeMode(handle, mode)
            logger.info("compute mode of %s is now %d", uuid, mode)

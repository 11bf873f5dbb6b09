"""Handles of the fake NVML: pointers of pynvml's own types whose value says what they are of."""

from ctypes import c_void_p, cast
from enum import IntEnum
from typing import NoReturn

import pynvml

from gpunode.hardware.fake.state import FakeGpu, FakeState, MigInstance
from gpunode.hardware.nvml import Handle


class Kind(IntEnum):
    """What a handle is of."""

    GPU = 1
    MIG = 2
    INSTANCE = 3
    COMPUTE = 4
    EVENTS = 5


_TYPES = {
    Kind.GPU: pynvml.c_nvmlDevice_t,
    Kind.MIG: pynvml.c_nvmlDevice_t,
    Kind.INSTANCE: pynvml.c_nvmlGpuInstance_t,
    Kind.COMPUTE: pynvml.c_nvmlComputeInstance_t,
    Kind.EVENTS: pynvml.c_nvmlEventSet_t,
}


def fail(code: int) -> NoReturn:
    """Raise pynvml's error of this code, of its own class."""
    raise pynvml.NVMLError(code)


def make(state: FakeState, kind: Kind, index: int, gi: int = 0) -> Handle:
    """A handle of this driver load: equal arguments give equal pointers, as with NVML."""
    return cast(c_void_p(state.epoch << 32 | kind << 24 | index << 12 | gi + 1), _TYPES[kind])


def device_handle(state: FakeState, gpu: FakeGpu) -> Handle:
    """The handle NVML would give for a whole GPU."""
    return make(state, Kind.GPU, gpu.index)


def lookup(state: FakeState, handle: Handle, kinds: tuple[Kind, ...]) -> tuple[FakeGpu, MigInstance | None]:
    """GPU and, for handles of MIG, instance. Raises NVML's errors for a void handle, a lost GPU, a gone instance."""
    epoch, kind, index, gi = _parts(handle)
    if epoch != state.epoch or kind not in kinds or index >= len(state.gpus):
        fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    gpu = state.gpus[index]
    if gpu.saved.lost:
        fail(pynvml.NVML_ERROR_GPU_IS_LOST)
    if kind == Kind.GPU:
        return gpu, None
    instance = next((i for i in gpu.saved.instances if i.gi == gi), None)
    return (gpu, instance) if instance else fail(pynvml.NVML_ERROR_NOT_FOUND)


def event_number(state: FakeState, handle: Handle) -> int:
    """Number of an event set. Raises NVML's InvalidArgument for a void handle."""
    epoch, kind, number, _ = _parts(handle)
    return number if (epoch, kind) == (state.epoch, Kind.EVENTS) else fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _parts(handle: Handle) -> tuple[int, int, int, int]:
    number = cast(handle, c_void_p).value or 0
    return number >> 32, number >> 24 & 0xFF, number >> 12 & 0xFFF, (number & 0xFFF) - 1

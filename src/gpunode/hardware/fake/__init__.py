"""A machine that is not there: an NVML, a sysfs and /proc tree, device nodes and a kernel log, all in step."""

from gpunode.hardware.fake.faults import Fault, Recover, Xid
from gpunode.hardware.fake.machine import FakeMachine
from gpunode.hardware.fake.nvml import FakeNvml

__all__ = ["FakeMachine", "FakeNvml", "Fault", "Recover", "Xid"]

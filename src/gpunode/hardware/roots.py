"""Where a machine's kernel interfaces are: the real ones, or a fake machine's tree."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Roots:
    """sys and proc: mount points of sysfs and procfs. dev: directory of device nodes. kmsg: kernel log."""

    sys: Path
    proc: Path
    dev: Path
    kmsg: Path

    @classmethod
    def real(cls) -> "Roots":
        return cls(Path("/sys"), Path("/proc"), Path("/dev"), Path("/dev/kmsg"))

"""Kernel settings of the host that clusters need; kept as they were, to be put back after the last cluster."""

import json
from pathlib import Path
from typing import Final

from gpunode.cluster.processes import replace_text

# Path under /proc/sys -> least value. Pods route through the host; every kubelet takes about seven inotify instances,
# and the default of 128 a user is gone with 18 of them.
_LEAST: Final = {"net/ipv4/ip_forward": 1, "fs/inotify/max_user_instances": 8192}


def raise_settings(saved: Path) -> None:
    """Raises the settings that are too low and notes in `saved` what they were."""
    before = _read(saved)
    for name, least in _LEAST.items():
        setting = Path("/proc/sys", name)
        value = int(setting.read_text())
        if value < least:
            before.setdefault(name, value)
            replace_text(saved, json.dumps(before))
            setting.write_text(f"{least}\n")


def restore_settings(saved: Path) -> None:
    """Puts back what `raise_settings` noted."""
    for name, value in _read(saved).items():
        if name in _LEAST:
            Path("/proc/sys", name).write_text(f"{value}\n")
    saved.unlink(missing_ok=True)


def _read(saved: Path) -> dict[str, int]:
    try:
        return {str(name): int(value) for name, value in json.loads(saved.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}

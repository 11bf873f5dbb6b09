"""The driver's programs on a fake machine."""

import sys
from pathlib import Path

from gpunode.hardware.fake import mps_tool


def write_tools(directory: Path) -> Path:
    """Puts the MPS control program into `directory`, unless it is there already; returns its path."""
    tool = directory / "nvidia-cuda-mps-control"
    # Isolated, without site packages: it starts in a third of the time.
    text = f"#!{sys.executable} -IS\n{Path(mps_tool.__file__).read_text()}"
    if not tool.exists() or tool.read_text() != text:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = tool.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.chmod(0o755)
        temporary.replace(tool)
    return tool

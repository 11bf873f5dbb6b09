"""The keeper's process: `python -m gpunode.kubelet.mps DIRECTORY DRIVER_ROOT TOOL [-v]`, for `gpunode mps-keeper`.

Apart from the command line, whose libraries would be most of its memory.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from gpunode.kubelet.mps.daemon import Driver
from gpunode.kubelet.mps.files import MpsFiles
from gpunode.kubelet.mps.keeper import Keeper, KeeperError


def main(arguments: list[str]) -> None:
    """Runs until SIGTERM or SIGINT. What a person can mend is one line on stderr, and exit status 1."""
    directory, root, tool, *rest = arguments
    logging.basicConfig(
        level=logging.DEBUG if "-v" in rest else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if os.geteuid() != 0:
        sys.exit("gpunode: the keeper mounts directories and starts daemons of the driver: run it as root")
    keeper = Keeper(MpsFiles(Path(directory)), Driver(Path(root), tool))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop.set())
    try:
        keeper.run()
    except (KeeperError, OSError) as error:
        sys.exit(f"gpunode: {error}")


main(sys.argv[1:])

"""A `nvidia-cuda-mps-control` without a GPU: the daemon (`-f`) and the control program, as NVIDIA documents them.

Copied into the fake machine's bin directory as a script of its own, so it uses the standard library only. Beside it may
lie `mps-faults.json`, {"<UUID>": "refuse" | "mute" | "die"}: the daemon of that device does not start, does not answer,
or ends after its first answer.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

_NAME = "nvidia-cuda-mps-control"
_MAX = 4096


def main(arguments: list[str]) -> int:
    """Exit status."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108
    if arguments == ["-f"]:
        return _Daemon(pipes, Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"))).run()
    if arguments:
        sys.stderr.write(f"{_NAME}: unknown option {arguments[0]}\n")
        return 1
    for line in sys.stdin:
        if line.strip() and not _ask(pipes / "control", line.strip()):
            return 1
    return 0


def _ask(control: Path, command: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(control))
            link.sendall(command.encode() + b"\n")
            answer = link.makefile().read(_MAX)
    except OSError:
        sys.stderr.write("Cannot find MPS control daemon process\n")
        return False
    sys.stdout.write(answer)
    sys.stdout.flush()
    return True


class _Daemon:
    def __init__(self, pipes: Path, logs: Path) -> None:
        self._pipes, self._logs = pipes, logs
        self._devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        self._threads = 100.0
        self._limits: dict[int, str] = {}
        try:
            faults = json.loads(Path(sys.argv[0]).with_name("mps-faults.json").read_text())
        except (OSError, ValueError):
            faults = {}
        self._faults = {faults[uuid] for uuid in self._devices if uuid in faults}

    def run(self) -> int:
        if "refuse" in self._faults:
            sys.stderr.write("CUDA error: the device is in use by another client\n")
            return 1
        self._pipes.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        control = self._pipes / "control"
        with socket.socket(socket.AF_UNIX) as server:
            try:
                server.bind(str(control))
            except OSError:
                sys.stderr.write("An instance of this daemon is already running\n")
                return 1
            server.listen(16)
            control.chmod(0o666)
            (self._pipes / f"{_NAME}.pid").write_text(f"{os.getpid()}\n")
            self._log(f"Starting control daemon using socket {control}")
            while "mute" in self._faults:
                signal.pause()
            while True:
                link, _ = server.accept()
                with link:
                    command = link.makefile().readline(_MAX).strip()
                    self._log(f"Cmd:{command}")
                    if command.split()[:1] == ["quit"]:
                        control.unlink()
                        return 0
                    link.sendall(self._answer(command.split()).encode())
                if "die" in self._faults:
                    sys.stderr.write("Server died: uncorrectable ECC error encountered\n")
                    return 3

    def _answer(self, words: list[str]) -> str:
        match words:
            case ["get_default_active_thread_percentage"]:
                return f"{self._threads:.1f}\n"
            case ["set_default_active_thread_percentage", value] if value.isdigit() and 0 < int(value) <= 100:
                self._threads = float(value)
                return f"{self._threads:.1f}\n"
            case ["set_default_device_pinned_mem_limit", device, value] if self._limit(device, value):
                return ""
            case ["get_default_device_pinned_mem_limit", device] if device.isdigit():
                return f"{self._limits.get(int(device), 'No limit is set')}\n"
            case ["get_server_list"]:
                return ""
        return f"Unrecognized command: {' '.join(words)}\n"

    def _limit(self, device: str, value: str) -> bool:
        if not device.isdigit() or int(device) >= len(self._devices) or value[-1] not in "GM":
            return False
        if value[:-1].isdigit():
            mib = int(value[:-1]) * (1024 if value[-1] == "G" else 1)
            self._limits[int(device)] = f"{mib // 1024}G" if mib >= 1024 else f"{mib}M"
        return value[:-1].isdigit()

    def _log(self, text: str) -> None:
        with (self._logs / "control.log").open("a") as file:
            file.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')} Control {os.getpid():5}] {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

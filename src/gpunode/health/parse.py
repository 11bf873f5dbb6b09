"""Kernel log text to typed signals.

Line forms: NVIDIA open kernel modules 595, kernel_rc.c (XID, with the MIG parts inside the parentheses) and nv.c
(fallen off the bus); NVSwitch driver (SXid). Records: Documentation/ABI/testing/dev-kmsg of the Linux kernel.
Every pattern is anchored and free of nested repetition, and text is cut first, so a line costs linear time.
"""

import re
from dataclasses import dataclass
from datetime import datetime

from gpunode.health.signals import (
    DriverReloaded,
    FallenOffBus,
    GpuReset,
    RecoveryActionChanged,
    Signal,
    SxidSignal,
    XidSignal,
)
from gpunode.model import kmsg
from gpunode.model.hardware import PciAddress
from gpunode.model.health import RecoveryAction

MAX_LINE = kmsg.MAX_TEXT
# Lines that may stand between "The NVIDIA GPU ..." and "fallen off the bus" before the first is forgotten.
_MAX_GAP = 8
# Of a line that says no more than its code: no text at all is NVML's, and one event would count as two.
_NO_TEXT = "-"

_HEX = "[0-9a-fA-F]"
_PCI = rf"({_HEX}{{4,8}}):({_HEX}{{2}}):({_HEX}{{2}})(?:\.([0-7]))?"
# What dmesg, syslog and journald put before the kernel's own text.
_DMESG = re.compile(r"(?a)(?:<\d{1,4}>)?\[ {0,12}(\d{1,12})\.(\d{6})\](?:\[ {0,5}[CT]\d{1,6}\])? ")
_SYSLOG = re.compile(
    r"(?a)(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|(\d{4}-\d\d-\d\dT[0-9:.+Z-]{8,24})) [\w.-]{1,253} kernel: "
)
_XID = re.compile(
    rf"(?a)NVRM: Xid \((?:PCI:)?{_PCI}(?: GPU-I:(\d{{1,5}}))?(?: GPU-CI:(\d{{1,5}}))?\): "
    r"(\d{1,5})(?![0-9A-Za-z_])[,:]? ?"
)
_PROCESS = re.compile(
    r"(?a)pid='?(?P<pid>\d{1,10}|<unknown>)'?(?:, name='?(?P<name><unknown>|[^,\n]{0,64}?)'?)?(?:, |$)"
)
_PREVIOUS = re.compile(r"(?a) ?caused by previous Xid (\d{1,5})$")
_RECOVERY = re.compile(
    r"(?a)GPU recovery action changed from 0x([0-9a-fA-F]{1,8}) \(([\w &]{1,40})\) "
    r"to 0x([0-9a-fA-F]{1,8}) \(([\w &]{1,40})\)"
)
_OFF_BUS = re.compile(rf"(?a)NVRM: (?:Xid \(PCI:[^)]{{1,40}}\): )?GPU (?:at PCI:)?{_PCI}: GPU has fallen off the bus")
_OFF_BUS_HEAD = re.compile(rf"(?a)NVRM: The NVIDIA GPU {_PCI}")
_OFF_BUS_TAIL = "fallen off the bus and is not responding to commands"
_SXID = re.compile(
    rf"(?a)nvidia-nvswitch(\d{{1,4}}): SXid \(PCI:{_PCI}\): (\d{{5}}), (Fatal|Non-fatal), (?:Link (\d{{1,3}})(?: |$))?"
)
_RESET = re.compile(
    rf"(?a)GPU reset executed: (GPU-{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}), success: (true|false)"
)
_LOADED = re.compile(
    r"(?a)NVRM: loading NVIDIA UNIX (?:Open Kernel Module for )?[\w ]{1,40}? {1,4}(\d{3}(?:\.\d{1,3}){1,3})"
)

_RECOVERY_NAMES = {
    "none": RecoveryAction.NONE,
    "gpu reset required": RecoveryAction.GPU_RESET,
    "node reboot required": RecoveryAction.NODE_REBOOT,
    "drain p2p": RecoveryAction.DRAIN_P2P,
    "drain and reset": RecoveryAction.DRAIN_AND_RESET,
    "recover imex domain": RecoveryAction.RECOVER_IMEX,
    "bus reset": RecoveryAction.BUS_RESET,
    "bus reset required": RecoveryAction.BUS_RESET,
    "system reboot": RecoveryAction.SYSTEM_REBOOT,
    "system reboot required": RecoveryAction.SYSTEM_REBOOT,
}


# Source: nvml.h, nvmlDeviceGpuRecoveryAction_t, from 0 on.
_RECOVERY_NUMBERS = tuple(action for action in RecoveryAction if action is not RecoveryAction.UNKNOWN)


@dataclass(frozen=True)
class Record:
    """One kernel log record. `uptime` in seconds since boot and `wall` in Unix seconds, where the form has them."""

    text: str
    uptime: float | None = None
    sequence: int | None = None
    priority: int = 6
    wall: float | None = None


@dataclass(frozen=True)
class Pending:
    """A message of several lines that is half read: the GPU it began with and how many more lines may pass."""

    pci: PciAddress | None = None
    lines_left: int = 0


def parse_record(line: str) -> Record:
    """A raw /dev/kmsg record, or a line of dmesg, syslog or `journalctl -k`, without what stands before its text."""
    if (raw := kmsg.parse_record(line)) is not None:
        return Record(raw.text, raw.usec / 1e6, raw.seq, raw.level)
    # Some tools print the escapes of /dev/kmsg as they are.
    text, wall = line[:MAX_LINE].rstrip("\r\n").replace("\\x0a", "\n"), None
    if match := _SYSLOG.match(text):
        text, wall = text[match.end() :], _wall(match[1])
    if match := _DMESG.match(text):
        return Record(text[match.end() :], int(match[1]) + int(match[2]) / 1e6, wall=wall)
    return Record(text, wall=wall)


def _wall(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def parse(text: str, pending: Pending = Pending()) -> tuple[tuple[Signal, ...], Pending]:
    """Signals of one record's text, and what is left half read for the next call.

    Never raises; text that is no GPU message gives no signal. Only the driver's own records are read past their first
    line, and they only up to an XID: others, and XIDs, quote names that a user chose, newlines included.
    """
    lines = text[:MAX_LINE].split("\n")
    signals = []
    for line in lines if lines[0].startswith("NVRM: ") else lines[:1]:
        signal, pending = _parse_line(line, pending)
        if signal:
            signals.append(signal)
        if isinstance(signal, XidSignal | RecoveryActionChanged):
            break
    return tuple(signals), pending


def _parse_line(line: str, pending: Pending) -> tuple[Signal | None, Pending]:
    if line.startswith("NVRM: "):
        return _parse_nvrm(line, pending)
    if pending.pci is not None:
        if line.startswith(_OFF_BUS_TAIL):
            return FallenOffBus(pending.pci), Pending()
        pending = Pending(pending.pci, pending.lines_left - 1) if pending.lines_left > 1 else Pending()
    if line.startswith("nvidia-nvswitch"):
        return _parse_sxid(line), pending
    if line.startswith("GPU reset executed: ") and (match := _RESET.match(line)):
        return GpuReset(match[1], match[2] == "true"), pending
    return None, pending


def _parse_nvrm(line: str, pending: Pending) -> tuple[Signal | None, Pending]:
    if match := _XID.match(line):
        return _xid(match, line[match.end() :]), pending
    if match := _OFF_BUS_HEAD.match(line):
        return None, Pending(_pci(*match.groups()), _MAX_GAP)
    if pending.pci is not None and line.startswith(_OFF_BUS_TAIL, len("NVRM: ")):
        return FallenOffBus(pending.pci), Pending()
    if match := _OFF_BUS.match(line):
        return FallenOffBus(_pci(*match.groups())), pending
    if match := _LOADED.match(line):
        return DriverReloaded(match[1]), Pending()
    return None, pending


def _xid(match: re.Match[str], rest: str) -> Signal:
    pci, (gi, ci, code) = _pci(*match.groups()[:4]), match.groups()[4:]
    pid, process = None, ""
    if head := _PROCESS.match(rest):
        rest = rest[head.end() :]
        pid = int(head["pid"]) if head["pid"].isdecimal() else None
        process = "" if head["name"] in (None, "<unknown>") else head["name"]
    previous = None
    if tail := _PREVIOUS.search(rest):
        previous, rest = int(tail[1]), rest[: tail.start()]
    if int(code) == 154 and (change := _RECOVERY.search(rest)):
        old, new = _recovery(change[1], change[2]), _recovery(change[3], change[4])
        if new is not RecoveryAction.UNKNOWN:
            return RecoveryActionChanged(pci, old, new)
    return XidSignal(
        pci,
        int(code),
        gi=int(gi) if gi else None,
        ci=int(ci) if ci else None,
        pid=pid,
        process=process,
        text=rest.strip() or _NO_TEXT,
        previous=previous,
    )


def _recovery(number: str, name: str) -> RecoveryAction:
    """By the name, whose words differ from driver to driver, or else by the number, which is NVML's."""
    if known := _RECOVERY_NAMES.get(name.strip().lower()):
        return known
    value = int(number, 16)
    return _RECOVERY_NUMBERS[value] if value < len(_RECOVERY_NUMBERS) else RecoveryAction.UNKNOWN


def _parse_sxid(line: str) -> SxidSignal | None:
    match = _SXID.match(line)
    if match is None:
        return None
    switch, *pci, code, severity, link = match.groups()
    return SxidSignal(
        _pci(*pci),
        int(switch),
        int(code),
        fatal=severity == "Fatal",
        link=int(link) if link else None,
        text=line[match.end() :].strip(),
    )


def _pci(domain: str, bus: str, device: str, function: str | None) -> PciAddress:
    return PciAddress(int(domain, 16), int(bus, 16), int(device, 16), int(function or "0", 16))

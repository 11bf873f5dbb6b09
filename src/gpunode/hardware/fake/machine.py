"""A fake machine as a whole: what an agent on fake hardware is given, and how faults reach it."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pynvml

from gpunode.hardware.board import Board
from gpunode.hardware.fake import faults, kernel_log, tree
from gpunode.hardware.fake.faults import Fault
from gpunode.hardware.fake.handles import device_handle
from gpunode.hardware.fake.nvml import FakeNvml
from gpunode.hardware.fake.state import NO_INSTANCE, FakeGpu, FakeState, Play, fresh_gpu, load_state
from gpunode.hardware.fake.tools import write_tools
from gpunode.hardware.roots import Roots


@dataclass(frozen=True)
class FakeMachine:
    """nvml and roots go wherever the real ones would. Every fault is told on all channels the real driver uses."""

    state: FakeState
    nvml: FakeNvml
    roots: Roots

    @classmethod
    def create(
        cls, board: Board, node: str, base: Path, kmsg: Path | None = None, boot_id: str | None = None
    ) -> "FakeMachine":
        """Builds (or, after a restart of the agent, finds) the machine under `base`.

        kmsg: where the kernel log is written, by default base/kmsg. boot_id: "" or None keeps the boot of before;
        another one than before is a reboot, which undoes all faults and empties the log.
        """
        base.mkdir(parents=True, exist_ok=True)
        roots = Roots(base / "sys", base / "proc", base / "dev", kmsg or base / "kmsg")
        state, booted = load_state(board, node, base / "machine.json", boot_id or None)
        if booted and kmsg is None:
            roots.kmsg.unlink(missing_ok=True)
        if booted or not roots.dev.is_dir():  # otherwise containers may be using the device nodes
            tree.build(state, roots)
        write_tools(base / "bin")
        state.capabilities = partial(tree.write_capabilities, state, roots)
        if booted:
            version = state.saved.driver_version
            kernel_log.append(roots.kmsg, f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {version}")
        return cls(state, FakeNvml(state), roots)

    def begin(self, order: str, scenario: str) -> Play:
        """Remembers a scenario that begins now, so that it outlives this process. A reboot ends it."""
        with self.state.changed:
            play = Play(order=order, scenario=scenario, began=time.clock_gettime(time.CLOCK_BOOTTIME))
            self.state.saved.playing.append(play)
            try:
                self.state.save()
            except OSError:  # the order is refused, so it must not begin with the next agent
                self.state.saved.playing.remove(play)
                raise
            return play

    def end(self, play: Play) -> None:
        """Nothing of the scenario is to come any more."""
        with self.state.changed:
            self.state.saved.playing = [one for one in self.state.saved.playing if one is not play]
            self.state.save()

    def inject(self, *given: Fault, of: Play | None = None) -> None:
        """Makes the faults happen now, in this order. of: the scenario that they are the next ones of. Raises
        LookupError at the first one with a device that this machine does not have."""
        with self.state.changed:
            try:
                for fault in given:
                    self._apply(fault)
                    if of is not None:
                        of.done += 1
            finally:
                self.state.save()
                self.state.changed.notify_all()

    def _apply(self, fault: Fault) -> None:
        match fault:
            case faults.DriverReload() | faults.DriverGone():
                self._driver(fault)
                return
            case faults.SwitchError():
                self._switch(fault)
                return
            case _:
                gpu = self.state.find(fault.device)
        saved = gpu.saved
        match fault:
            case faults.Xid():
                self._xid(gpu, fault)
            case faults.Recover():
                self._recover(gpu)
            case faults.Lost():
                saved.lost = True
            case faults.LinkDown(link=link):
                saved.dead_links = sorted({*saved.dead_links, link})
            case faults.FabricChange(state=state, summary=summary, mask=mask):
                saved.fabric_state, saved.fabric_summary, saved.fabric_mask = state, summary, mask
            case faults.RecoveryChange(action=action):
                self._verdict(gpu, action)
            case faults.RemapPending():
                self._xid(gpu, faults.Xid(device=gpu.name, code=63))

    def _xid(self, gpu: FakeGpu, fault: faults.Xid) -> None:
        """Counters change first, then the log, then the event, so that whoever hears of it finds it true."""
        if fault.code in (48, 95):
            gpu.saved.ecc_volatile += 1
            gpu.saved.ecc_aggregate += 1
        gpu.saved.remap_pending |= fault.code == 63
        gpu.saved.remap_failed |= fault.code == 64
        self._log(gpu, fault)
        self._event(gpu, fault)
        if fault.code == faults.OFF_BUS_XID:
            kernel_log.append(self.roots.kmsg, f"NVRM: GPU {gpu.pci}: GPU has fallen off the bus.")
            gpu.saved.lost = True
        elif fault.code in faults.RESET_XIDS:
            self._verdict(gpu, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)

    def _switch(self, fault: faults.SwitchError) -> None:
        """Links go down first, then the switch tells of its error, then each GPU of the link that it misses."""
        number = self.state.find_switch(fault.switch)
        hit = [
            (gpu, link)
            for gpu in self.state.gpus
            for link in range(self.state.board.nvlink.links)
            if (end := self.state.switch_end(gpu, link)) is not None
            and (end.switch, end.port if fault.port is not None else None) == (number, fault.port)
        ]
        for gpu, link in hit if fault.fatal else ():
            gpu.saved.dead_links = sorted({*gpu.saved.dead_links, link})
        address = self.state.board.switches[number].pci
        severity = "Fatal" if fault.fatal else "Non-fatal"
        text = fault.text or faults.SXID_TEXT.get(fault.code, "error")
        where = "" if fault.port is None else f"Link {fault.port:02d} "
        line = f"nvidia-nvswitch{number}: SXid (PCI:{address}): {fault.code:05d}, {severity}, {where}{text}"
        kernel_log.append(self.roots.kmsg, line)
        for gpu, link in hit if fault.fatal else ():
            self._xid(gpu, faults.Xid(device=gpu.name, code=faults.LINK_XID, text=faults.LINK_TEXT.format(link)))

    def _verdict(self, gpu: FakeGpu, action: int) -> None:
        before, gpu.saved.recovery = gpu.saved.recovery, action
        if before == action:
            return
        old, new = faults.RECOVERY_NAMES[before], faults.RECOVERY_NAMES[action]
        text = f"GPU recovery action changed from 0x{before:x} ({old}) to 0x{action:x} ({new})"
        verdict = faults.Xid(device=gpu.name, code=faults.RECOVERY_XID, text=text)
        self._log(gpu, verdict)
        self._event(gpu, verdict)

    def _recover(self, gpu: FakeGpu) -> None:
        before = gpu.saved.recovery
        gpu.saved = fresh_gpu(self.state.board, gpu.index, gpu.saved)
        self.state.saved.gpus[gpu.index] = gpu.saved
        if before != pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
            gpu.saved.recovery = before
            self._verdict(gpu, pynvml.NVML_GPU_RECOVERY_ACTION_NONE)
        self.state.layout_changed()
        kernel_log.append(self.roots.kmsg, f"GPU reset executed: {gpu.uuid}, success: true")

    def _driver(self, fault: faults.DriverReload | faults.DriverGone) -> None:
        saved = self.state.saved
        self.state.epoch += 1
        self.state.initialized = 0
        self.state.event_sets.clear()
        saved.driver_loaded = isinstance(fault, faults.DriverReload)
        if isinstance(fault, faults.DriverReload):
            saved.driver_version = fault.version or saved.driver_version
            text = f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {saved.driver_version}"
            kernel_log.append(self.roots.kmsg, text)

    def _log(self, gpu: FakeGpu, fault: faults.Xid) -> None:
        """`NVRM: Xid (PCI:dddd:bb:dd GPU-I:ii GPU-CI:cc): N, pid=P, name=NAME, text`; no function digit."""
        instance = f" GPU-I:{fault.gi:02d}" if fault.gi is not None else ""
        instance += f" GPU-CI:{fault.ci:02d}" if fault.gi is not None and fault.ci is not None else ""
        process = f"pid={fault.pid}, name=python3, " if fault.pid is not None else ""
        text = fault.text or faults.XID_TEXT.get(fault.code, "")
        where = str(gpu.pci).rpartition(".")[0]
        line = f"NVRM: Xid (PCI:{where}{instance}): {fault.code}, {process}{text}"
        kernel_log.append(self.roots.kmsg, line.rstrip(", "))

    def _event(self, gpu: FakeGpu, fault: faults.Xid) -> None:
        if gpu.saved.lost:
            return
        event = pynvml.c_nvmlEventData_t()
        event.device = device_handle(self.state, gpu)
        event.eventType = pynvml.nvmlEventTypeXidCriticalError
        event.eventData = fault.code
        event.gpuInstanceId = NO_INSTANCE if fault.gi is None else fault.gi
        event.computeInstanceId = NO_INSTANCE if fault.ci is None else fault.ci
        for one in self.state.event_sets.values():
            if one.masks.get(gpu.index, 0) & pynvml.nvmlEventTypeXidCriticalError:
                one.waiting.append(event)


def snapshot(machine: FakeMachine) -> dict[str, object]:
    """The changing state as plain values, for people and tests."""
    return msgspec.to_builtins(machine.state.saved)  # type: ignore[no-any-return]

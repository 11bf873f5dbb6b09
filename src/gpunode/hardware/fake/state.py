"""All that changes on a fake machine, in one explicit object, with the part that outlives the process."""

import hashlib
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pynvml

from gpunode.files import write_atomic
from gpunode.hardware.board import Board, BoardMigProfile
from gpunode.hardware.sysfs import parse_pci, read_small
from gpunode.model.hardware import PciAddress, device_name

_NAMESPACE = uuid.UUID("6b1f7f4e-0c9c-5d0e-9d43-0d8f6c5f9a11")
NO_INSTANCE = 0xFFFFFFFF
_STATES = {"unsupported": 0, "notStarted": 1, "inProgress": 2, "completed": 3}


class MigInstance(msgspec.Struct, kw_only=True):
    """A GPU instance. profile: name in the board's table. compute: whether its compute instance (id 0) exists."""

    gi: int
    profile: str
    start: int
    compute: bool = True


class GpuSaved(msgspec.Struct, kw_only=True):
    """What a GPU remembers over restarts of the agent; a reboot of the node starts it anew.

    ecc_aggregate: in the board's life, which a reset does not end.
    """

    lost: bool = False
    recovery: int = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    dead_links: list[int] = []
    ecc_volatile: int = 0
    ecc_aggregate: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    fabric_state: int = 0
    fabric_summary: int = pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED
    fabric_mask: int = 0
    compute_mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    mig_enabled: bool = False
    mig_pending: bool = False
    instances: list[MigInstance] = []


class Play(msgspec.Struct, kw_only=True):
    """A fault scenario that is under way. began: seconds since the host booted (CLOCK_BOOTTIME). done: how many of its
    faults have happened; they are counted in the same file in which they take effect."""

    order: str
    scenario: str
    began: float
    done: int = 0


class MachineSaved(msgspec.Struct, kw_only=True):
    """Content of machine.json beside the fake's trees. board: digest of the profile. host_boot: the real boot id."""

    board: str
    node: str
    boot_id: str
    host_boot: str
    driver_version: str
    driver_loaded: bool = True
    gpus: list[GpuSaved] = []
    playing: list[Play] = []


@dataclass
class FakeGpu:
    """One GPU: what the board fixes, and what changes."""

    index: int
    uuid: str
    pci: PciAddress
    peers: tuple[int, ...]
    saved: GpuSaved

    @property
    def name(self) -> str:
        return device_name(self.pci)

    def mig_uuid(self, instance: MigInstance) -> str:
        return "MIG-" + str(uuid.uuid5(_NAMESPACE, f"{self.uuid}/{instance.gi}/{instance.profile}/{instance.start}"))


@dataclass(frozen=True)
class SwitchEnd:
    """Where a link goes: the switch's number and address, and the number of its port."""

    switch: int
    pci: PciAddress
    port: int


@dataclass
class EventSet:
    """A registration for events and the events that wait to be collected; masks by GPU index."""

    masks: dict[int, int] = field(default_factory=dict)
    waiting: deque[pynvml.c_nvmlEventData_t] = field(default_factory=lambda: deque(maxlen=256))


@dataclass
class FakeState:
    """The machine. `changed` guards everything and wakes those who wait for events.

    epoch: rises with each driver load; handles carry it. missing, missing_fields: NVML functions and fields an older
    driver lacks. busy: UUIDs of MIG devices that a process uses. capabilities: told after each change of the MIG
    layout. switch_ends: of every link of the first GPU, then of the second, and so on.
    """

    board: Board
    node: str
    saved: MachineSaved
    file: Path
    gpus: list[FakeGpu]
    epoch: int = 1
    initialized: int = 0
    missing: set[str] = field(default_factory=set)
    missing_fields: set[int] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)
    capabilities: Callable[[], None] | None = None
    event_sets: dict[int, EventSet] = field(default_factory=dict)
    switch_ends: tuple[SwitchEnd, ...] = ()
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def tray(self) -> int:
        """Position in the NVLink domain: the number at the end of the node's name, counted around."""
        digits = self.node[len(self.node.rstrip("0123456789")) :]
        return int(digits[-9:] or 0) % self.board.fabric.trays

    @property
    def clique(self) -> int:
        cliques = self.board.fabric.cliques
        return cliques[self.tray * len(cliques) // self.board.fabric.trays]

    def find(self, device: str) -> FakeGpu:
        """By DRA device name, UUID, PCI address or index. Raises LookupError."""
        for gpu in self.gpus:
            if device in (gpu.name, gpu.uuid, str(gpu.pci), f"{gpu.pci.domain:08x}{str(gpu.pci)[4:]}", str(gpu.index)):
                return gpu
        known = ", ".join(g.name for g in self.gpus) or "none"
        raise LookupError(f"no GPU {device[:128]!r} on {self.node}; there are: {known}")

    def find_switch(self, switch: str) -> int:
        """Number of a switch, by number or PCI address. Raises LookupError."""
        for number, one in enumerate(self.board.switches):
            if switch in (one.pci, str(number)):
                return number
        known = ", ".join(one.pci for one in self.board.switches) or "none"
        raise LookupError(f"no NVSwitch {switch[:128]!r} on {self.node}; there are: {known}")

    def switch_end(self, gpu: FakeGpu, link: int) -> SwitchEnd | None:
        """What a link ends at, up or down; None where that is no switch with an address."""
        return self.switch_ends[gpu.index * self.board.nvlink.links + link] if self.switch_ends else None

    def profile(self, name: str) -> BoardMigProfile:
        return next(p for p in self.board.mig_profiles if p.name == name)

    def fits(self, gpu: FakeGpu, profile: BoardMigProfile, start: int) -> bool:
        """Memory slices are free and, with the new one, the engines suffice; the largest profile has all of them."""
        there = [(self.profile(i.profile), i.start) for i in gpu.saved.instances]
        slices = [s for p, first in [*there, (profile, start)] for s in range(first, first + p.size)]
        whole = max(self.board.mig_profiles, key=lambda p: p.slices)
        kinds = [p for p, _ in there] + [profile]
        return len(set(slices)) == len(slices) and all(
            sum(getattr(p, engine) for p in kinds) <= getattr(whole, engine)
            for engine in ("copy_engines", "decoders", "encoders", "jpeg_engines", "ofa_engines")
        )

    def layout_changed(self) -> None:
        """MIG instances came or went: remember it and bring /proc up to date."""
        self.save()
        if self.capabilities is not None:
            self.capabilities()

    def save(self) -> None:
        """Atomically, so that a killed agent finds the old or the new state."""
        write_atomic(self.file, msgspec.json.encode(self.saved), durable=False)


def load_state(board: Board, node: str, file: Path, boot_id: str | None) -> tuple[FakeState, bool]:
    """The state in `file` when it is of this board, node and boot, else a fresh one (then True: the node booted).

    The fake boots when it is told another boot id than before, and with the machine that it runs on.
    """
    digest = hashlib.sha256(msgspec.json.encode(board)).hexdigest()[:16]
    host = read_small(Path("/proc/sys/kernel/random/boot_id"))
    saved = _read(file)
    same = saved is not None and (saved.board, saved.node, saved.host_boot) == (digest, node, host)
    booted = saved is None or not same or boot_id not in (None, saved.boot_id)
    if saved is None or booted:
        saved = MachineSaved(
            board=digest,
            node=node,
            boot_id=boot_id or str(uuid.uuid4()),
            host_boot=host,
            driver_version=board.driver_version,
            gpus=[_fresh(board, i) for i in range(len(board.gpus))],
        )
    state = _state(board, node, saved, file)
    state.save()
    return state, booted


def fresh_gpu(board: Board, index: int, before: GpuSaved) -> GpuSaved:
    """A GPU after a reset: as new, except that MIG mode survives (its instances do not), a pending one begins, and
    what the InfoROM holds stays."""
    mode = before.mig_pending
    fresh = _fresh(board, index)
    return msgspec.structs.replace(fresh, mig_enabled=mode, mig_pending=mode, ecc_aggregate=before.ecc_aggregate)


def _fresh(board: Board, index: int) -> GpuSaved:
    done = board.fabric.state == "completed"
    return GpuSaved(
        dead_links=list(board.gpus[index].dead_links),
        fabric_state=_STATES[board.fabric.state],
        fabric_summary=pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY if done else 0,
    )


def _state(board: Board, node: str, saved: MachineSaved, file: Path) -> FakeState:
    gpus = [
        FakeGpu(
            index=i,
            uuid="GPU-" + str(uuid.uuid5(_NAMESPACE, f"{board.name}/{node}/{i}")),
            pci=parse_pci(gpu.pci),
            peers=gpu.peers,
            saved=saved.gpus[i],
        )
        for i, gpu in enumerate(board.gpus)
    ]
    return FakeState(board=board, node=node, saved=saved, file=file, gpus=gpus, switch_ends=tuple(_switch_ends(board)))


def _switch_ends(board: Board) -> Iterator[SwitchEnd]:
    for gpu in range(len(board.gpus)):
        for number, one in enumerate(board.switches):
            yield from (SwitchEnd(number, parse_pci(one.pci), gpu * one.links + link) for link in range(one.links))


def _read(file: Path) -> MachineSaved | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=MachineSaved)
    except (OSError, msgspec.MsgspecError):
        return None

"""What preparing a claim changes in hardware, and how it is undone.

Whole GPUs used as they are need nothing here. Partitions are made and removed, sharing is set and reset; both seams can
be called again after a kill, so an interrupted preparation is finished by doing it again and rolled back by undoing it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from gpunode.kubelet.checkpoint import Entry, HeldDevice, State
from gpunode.kubelet.config import Sharing
from gpunode.kubelet.errors import ClaimError, ErrorKind
from gpunode.kubelet.seams import Partitioner, SharingControl, Steps, no_step
from gpunode.model.errors import HardwareError, NotOfferedError
from gpunode.model.injection import DeviceNodes

logger = logging.getLogger(__name__)


def needed(entry: Entry) -> bool:
    """Whether the claim needs anything from hardware beyond what is there already."""
    return any(_partition(d) or d.sharing is not None for d in entry.devices)


def _partition(held: HeldDevice) -> bool:
    return held.nodes.dynamic and not held.admin


@dataclass(frozen=True)
class Effects:
    """Hardware seams; None where the machine or the administrator does not offer them."""

    partitioner: Partitioner | None = None
    sharing: SharingControl | None = None
    step: Steps = no_step

    def supported(self, entry: Entry) -> None:
        """Raises ClaimError(CONFIG) when the claim needs what this node does not offer."""
        for held in entry.devices:
            if _partition(held) and self.partitioner is None:
                raise ClaimError(
                    ErrorKind.CONFIG,
                    f"claim {entry.key}: this node makes no partitions, so {held.device} cannot be had",
                )
        if wanted := _by_sharing(entry, {d.device: d.nodes for d in entry.devices}):
            why = "this node offers none" if self.sharing is None else self.sharing.refuses(wanted)
            if why:
                names = ", ".join(sorted(d.device for d in entry.devices if d.sharing is not None))
                raise ClaimError(ErrorKind.CONFIG, f"claim {entry.key}: sharing of {names}: {why}")

    def confirm(self, entry: Entry) -> None:
        """Before an entry that is completed is handed out again. Raises ClaimError."""
        shared = tuple(sorted(d.device for d in entry.devices if d.sharing is not None))
        if shared and self.sharing is not None:
            with _told(entry, shared, "sharing"):
                self.sharing.confirm(shared)

    def troubles(self, entries: Iterable[Entry]) -> dict[str, str]:
        """Completed entries, by UID, whose sharing does not work now, with the reason. Raises HardwareError."""
        why = self.sharing.troubles() if self.sharing is not None else {}
        return {
            entry.uid: f"{d.device}: {why[d.device]}"
            for entry in entries
            for d in entry.devices
            if entry.state is State.COMPLETED and d.sharing is not None and d.device in why
        }

    def intact(self, entry: Entry) -> bool:
        """Whether the partitions that the entry needs exist (whole GPUs do). Raises ClaimError(HARDWARE)."""
        wanted = {d.device for d in entry.devices if _partition(d) and d.nodes.parent}
        if not wanted or self.partitioner is None:
            return not wanted
        with _told(entry, tuple(sorted(wanted)), "listing partitions"):
            return wanted <= self.partitioner.existing()

    def apply(self, entry: Entry) -> Entry:
        """Do what the entry needs; returns it completed, with what its containers get.

        Raises ClaimError(HARDWARE) naming the device at fault; some of it may then be done.
        """
        nodes = {d.device: d.nodes for d in entry.devices}
        for held in entry.devices:
            if _partition(held) and self.partitioner is not None:
                self.step(f"create {held.device}")
                with _told(entry, (held.device,), f"making partition {held.device}"):
                    made = self.partitioner.create(held.device)
                nodes[held.device] = replace(made, parent=held.nodes.parent, dynamic=True)
        for sharing, group in _by_sharing(entry, nodes).items():
            if self.sharing is not None:
                self.step(f"share {','.join(group)}")
                with _told(entry, tuple(group), "setting up sharing"):
                    nodes |= self.sharing.apply(entry.uid, sharing, group)
        devices = tuple(replace(d, nodes=nodes[d.device]) for d in entry.devices)
        return replace(entry, state=State.COMPLETED, devices=devices)

    def undo(self, entry: Entry, others: Iterable[Entry]) -> None:
        """Undo what the entry's preparation did, as far as no other entry needs it. Raises ClaimError(HARDWARE)."""
        kept = {d.device for other in others if other.uid != entry.uid for d in other.devices if not d.admin}
        nodes = {d.device: d.nodes for d in entry.devices if d.device not in kept}
        for sharing, group in _by_sharing(entry, nodes).items():
            if self.sharing is not None:
                self.step(f"unshare {','.join(group)}")
                with _told(entry, tuple(group), "resetting sharing"):
                    self.sharing.reset(entry.uid, sharing, group)
        for held in entry.devices:
            if _partition(held) and held.device in nodes and self.partitioner is not None:
                self.step(f"remove {held.device}")
                with _told(entry, (held.device,), f"removing partition {held.device}"):
                    self.partitioner.remove(held.device)

    def remove_strays(self, entries: Iterable[Entry]) -> Iterator[str]:
        """Undo, one by one, what no entry owns: half-made partitions, or what a lost entry left; yields device names.

        Raises HardwareError: the first that happened, when everything else is done.
        """
        failures: list[HardwareError] = []
        owned = [d for entry in entries for d in entry.devices if not d.admin]
        if self.sharing is not None:
            for device in sorted(self.sharing.active() - {d.device for d in owned if d.sharing is not None}):
                self.step(f"clear sharing of {device}")
                try:
                    self.sharing.clear(device)
                except HardwareError as error:
                    failures.append(error)
                    continue
                yield device
        if self.partitioner is not None:
            for device in sorted(self.partitioner.existing() - {d.device for d in owned}):
                self.step(f"remove stray {device}")
                try:
                    self.partitioner.remove(device)
                except HardwareError as error:
                    failures.append(error)
                    continue
                yield device
        if failures:
            raise failures[0]


def _by_sharing(entry: Entry, nodes: Mapping[str, DeviceNodes]) -> dict[Sharing, dict[str, DeviceNodes]]:
    groups: dict[Sharing, dict[str, DeviceNodes]] = {}
    for held in entry.devices:
        if held.sharing is not None and held.device in nodes:
            groups.setdefault(held.sharing, {})[held.device] = nodes[held.device]
    return groups


@contextmanager
def _told(entry: Entry, devices: tuple[str, ...], doing: str) -> Iterator[None]:
    """Whatever a hardware seam raises, as this claim's error: a driver's surprise must not fail other claims."""
    try:
        yield
    except NotOfferedError as error:
        raise ClaimError(ErrorKind.CONFIG, f"claim {entry.key}: {doing}: {error}") from error
    except HardwareError as error:
        raise ClaimError(ErrorKind.HARDWARE, f"claim {entry.key}: {doing} failed: {error}", devices) from error
    except Exception as error:
        logger.exception("claim %s: %s failed", entry.key, doing)
        raise ClaimError(ErrorKind.HARDWARE, f"claim {entry.key}: {doing} failed: {error!r}", devices) from error

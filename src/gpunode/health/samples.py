"""What a poll of a GPU's counters means: level-triggered faults that end when the poll no longer shows them."""

from collections.abc import Sequence

from gpunode.health import rules
from gpunode.health.catalogue import LEVEL_OF_ACTION
from gpunode.health.state import DeviceState
from gpunode.model.health import Action, Clear, Dimension, GpuSample, Level

LEFTOVERS = "leftover-processes"
# Boards with page retirement (before A100) may retire 64 pages. Source: NVIDIA, dynamic page retirement.
_MAX_RETIRED = 64
_UNUSABLE_FABRIC = frozenset({"route-unhealthy", "access-timeout-recovery", "incorrect-configuration"})
_UNREADY_FABRIC = frozenset({"notStarted", "inProgress"})
_LESSER_FABRIC = frozenset({"degraded-bandwidth", "route-recovery", "limited-capacity"})


def effects(
    device: str, sample: GpuSample, state: DeviceState, polled: Sequence[GpuSample]
) -> tuple[rules.Raise | rules.Seen, ...]:
    """Everything that a poll of one GPU shows. `polled` are the polls of all GPUs of the same moment."""
    if not sample.present:
        return (rules.lost(device, sample.error),) if _surely_absent(sample, state) else ()
    return (
        *_memory(device, sample),
        *_fabric(device, sample),
        *_links(device, sample, state, polled),
        *(_told(device, f"throttle-{why}", f"Clocks are reduced ({why})") for why in sorted(sample.throttle)),
        *_leftovers(device, sample),
    )


def _surely_absent(sample: GpuSample, state: DeviceState) -> bool:
    """A GPU that NVML calls lost is lost; any other failure (a driver being reloaded) has to last for two polls."""
    return not sample.error or "lost" in sample.error.lower() or state.absent > 0


def _shown(
    device: str, dimension: Dimension, code: str, name: str, meaning: str, action: Action, level: Level | None = None
) -> rules.Raise:
    return rules.Raise(
        device,
        dimension,
        code,
        action,
        level or LEVEL_OF_ACTION[action],
        rules.sentence(name, meaning, action, level=level),
        frozenset({Clear.SAMPLE}),
        detailed=True,
    )


def _memory(device: str, sample: GpuSample) -> list[rules.Raise]:
    found = []
    if sample.ecc_uncorrected:
        errors = (
            "1 uncorrected memory error"
            if sample.ecc_uncorrected == 1
            else f"{sample.ecc_uncorrected} uncorrected memory errors"
        )
        meaning = f"{errors} since the last reset"
        found.append(
            _shown(device, Dimension.ECC, "uncorrected", "ECC fault", meaning, Action.RESET_GPU, Level.DEGRADED)
        )
    if sample.sram_threshold_exceeded:
        meaning = "on-chip memory has had more errors than it may"
        found.append(
            _shown(device, Dimension.ECC, "sram-threshold", "ECC fault", meaning, Action.INSPECT, Level.UNHEALTHY)
        )
    if sample.remap_pending or sample.retirement_pending:
        meaning = "a memory row or page is replaced at the next reset; its data is safe"
        found.append(
            _shown(device, Dimension.REMAP, "pending", "Pending row remap", meaning, Action.RESET_GPU, Level.DEGRADED)
        )
    if sample.remap_failed or (sample.pages_retired or 0) >= _MAX_RETIRED:
        meaning = "no spare memory is left for a faulty row or page, so the board has to be replaced"
        found.append(
            _shown(device, Dimension.REMAP, "failed", "Row remap failure", meaning, Action.INSPECT, Level.UNHEALTHY)
        )
    return found


def _fabric(device: str, sample: GpuSample) -> list[rules.Raise]:
    if sample.fabric_state in _UNREADY_FABRIC:
        meaning = "registration with the NVLink fabric has not ended"
        return [_shown(device, Dimension.FABRIC, sample.fabric_state, "Fabric start", meaning, Action.INSPECT)]
    if not sample.fabric_faults:
        return []
    faults = sorted(sample.fabric_faults, key=lambda fault: (fault not in _UNUSABLE_FABRIC, fault))
    level = Level.UNHEALTHY if faults[0] in _UNUSABLE_FABRIC else Level.DEGRADED
    return [_shown(device, Dimension.FABRIC, faults[0], "Fabric fault", ", ".join(faults), Action.INSPECT, level)]


def _links(device: str, sample: GpuSample, state: DeviceState, polled: Sequence[GpuSample]) -> list[rules.Raise]:
    """Compare with what the GPU itself and its equals on the node have had: a board without bridges has no fault."""
    if sample.links_active is None:
        return []
    equals = [other.links_active or 0 for other in polled if other.links_total == sample.links_total]
    expected = max((state.links_seen, *equals))
    if sample.links_active >= expected:
        return []
    level = Level.DEGRADED if sample.links_active else Level.UNHEALTHY
    meaning = f"{sample.links_active} of {expected} NVLinks are up"
    return [_shown(device, Dimension.LINK, "down", "NVLink fault", meaning, Action.RESET_GPU, level)]


def _leftovers(device: str, sample: GpuSample) -> list[rules.Seen]:
    if not sample.leftover_pids:
        return []
    pids = ", ".join(str(pid) for pid in sample.leftover_pids[:8])
    more = len(sample.leftover_pids) - 8
    who = f"{pids} and {more} more" if more > 0 else pids
    return [_told(device, LEFTOVERS, f"Processes have the GPU open although no claim holds it: pid {who}")]


def missed_ecc(device: str, fresh: int, total: int) -> rules.Seen:
    """Uncorrected errors that happened, and were cleared by a reset, while nobody looked."""
    meaning = f"{fresh} uncorrected memory errors since the last look, cleared by a reset; {total} in the board's life"
    return _told(device, "ecc-lifetime", f"ECC ({meaning}): nothing to do; see whether more follow")


def _told(device: str, code: str, message: str) -> rules.Seen:
    return rules.Seen(device, code, message, dimension=None)


def unknown(sample: GpuSample) -> frozenset[str]:
    """Faults that this poll says nothing about, because the driver offered no value: they stand as they are."""
    values = {
        "ecc/uncorrected": (sample.ecc_uncorrected,),
        "ecc/sram-threshold": (sample.sram_threshold_exceeded,),
        "remap/pending": (sample.remap_pending, sample.retirement_pending),
        "remap/failed": (sample.remap_failed, sample.pages_retired),
        "link/down": (sample.links_active,),
    }
    keys = frozenset(key for key, offered in values.items() if all(value is None for value in offered))
    if sample.fabric_state == "unsupported":
        keys |= {f"fabric/{code}" for code in _UNREADY_FABRIC | _LESSER_FABRIC | _UNUSABLE_FABRIC}
    return keys

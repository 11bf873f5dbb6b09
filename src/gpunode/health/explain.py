"""One XID in words: what it means, what is done about it, and what ends it."""

from gpunode.health import rules
from gpunode.health.catalogue import Catalogue
from gpunode.health.policy import Policy
from gpunode.model.grace import FOREVER, NEVER, grace_end
from gpunode.model.health import Clear, Dimension, Finding, Level
from gpunode.model.times import parse_time, stamp

_SOURCES = {
    "catalogue": "NVIDIA's XID catalogue",
    "driver": "NVIDIA's open kernel modules",
    "judgement": "this project; NVIDIA's catalogue names no action",
    "override": "your changes to the catalogue",
}
_ENDS = {
    Clear.REBOOT: "a reboot of the host",
    Clear.RESET: "a successful reset of the GPU, which a reload of the driver is too",
    Clear.VERDICT: "the driver's verdict that nothing is to be done",
    Clear.SAMPLE: "a poll that no longer shows it",
}


def explain_xid(code: int, catalogue: Catalogue, policy: Policy) -> dict[str, str]:
    """Names and sentences, in the order to show them."""
    entry = catalogue.of(code)
    level = entry.level
    if level is not Level.HEALTHY:
        level = policy.level(Dimension.XID, str(code), level)
    effect = policy.effect(Dimension.XID, str(code), level, entry.class_)
    told = {
        "XID": f"{code} {entry.mnemonic}",
        "meaning": entry.meaning,
        "class": str(entry.class_),
        "action": rules.WHAT_NOW[entry.action],
        "level": str(level),
        "taint": "none" if level is Level.HEALTHY else f"gpunode.dev/xid={code}:{effect}",
        "gangs": _gangs(level, effect, policy.gang_grace(Dimension.XID, str(code), level, entry.class_)),
        "architectures": ", ".join(entry.architectures) or "not used by current data centre boards",
        "verdict follows": _follows(entry.follows_154),
        "source": _SOURCES[entry.source],
    }
    if str(code) in rules.DETAILED:
        told["details"] = "level and action are those of the code alone; the kernel log line's details decide"
    if str(code) in rules.REPEATABLE:
        told["repetition"] = f"met by {policy.repeat_count} different processes on one GPU it counts against the board"
    if level is not Level.HEALTHY:
        ends = "; ".join(_ENDS[clear] for clear in Clear if clear in entry.clears)
        told["ends with"] = f"{ends}; or the operator's word; then {policy.hold_down_s:g} s without relapse"
    return told


def gangs_stay(finding: Finding) -> str:
    """Until when gangs may stay on the device as far as this finding goes: a time, `for ever` or `no`."""
    if finding.effect == "None" or (finding.effect == "NoSchedule" and finding.grace is FOREVER):
        return "for ever"
    if finding.effect == "NoExecute" or not finding.grace:
        return "no"
    end = grace_end(parse_time(finding.since), finding.grace)
    return "for ever" if end == NEVER else f"until {stamp(end)}"


def _gangs(level: Level, effect: str, grace: int | None) -> str:
    """What becomes of the gangs that run there; kept to what the gang controller does with the taints."""
    if level is Level.HEALTHY or effect == "None":
        return "stay where they are"
    if effect == "NoExecute":
        return "are evicted at once, by Kubernetes too"
    if grace is FOREVER:
        return "stay where they are; no new ones come"
    return f"may stay {grace} s from its beginning, then are moved" if grace else "are moved at once"


def _follows(branch: int | None) -> str:
    if branch is None:
        return "no XID 154 follows"
    return "an XID 154 follows" + (f" from driver {branch} on" if branch else "")

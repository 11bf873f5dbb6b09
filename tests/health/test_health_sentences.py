"""What is said when a fault of each kind begins and when it is over: exact sentences, for people read them."""

from dataclasses import replace

import pytest
from health_node import GOOD_A, GPU_A, GPU_B, SWITCH, A, Node, xid

from gpunode.health import rules
from gpunode.health.signals import (
    FallenOffBus,
    GpuLost,
    GpuReset,
    OperatorClear,
    PrepareResult,
    RecoveryActionChanged,
    Signal,
    SxidSignal,
)
from gpunode.model.health import Dimension
from gpunode.model.health import RecoveryAction as Recovery

_NO_WORK = "no new work is placed here"
_RESET = f"drain and reset the GPU; {_NO_WORK}"
_HOST = f"restart the host, then check the board; {_NO_WORK}"
_BOARD = f"have the board checked or replaced; {_NO_WORK}"
_ASK = "have the board checked and contact support if it repeats"
_LATER = "reset the GPU when it is free; until then it stays in use"
_LINKED = replace(GOOD_A, links_active=18, links_total=18)
_BROKEN = PrepareResult(GPU_A, "driver busy (MIG): try later")

# Signals, the fault's name with its meaning, and what is to be done.
KINDS: dict[str, tuple[tuple[Signal, ...], str, str]] = {
    "xid/79": ((xid(79, text=""),), "XID 79 (GPU has fallen off the bus)", _HOST),
    "xid/79 without an XID": ((FallenOffBus(A),), "XID 79 (GPU has fallen off the bus)", _HOST),
    "xid/79 in a program": (
        (xid(79, pid=77, process="python3"),),
        "XID 79 (GPU has fallen off the bus: in python3 (pid 77))",
        _HOST,
    ),
    "xid/119": (
        (xid(119, previous=94),),
        "XID 119 (GPU system processor (GSP) did not answer in time: after XID 94)",
        _RESET,
    ),
    "xid/999": ((xid(999),), "XID 999 (code unknown to this version)", _ASK),
    "xid/13-repeated": (
        (xid(13, pid=1), xid(13, pid=2), xid(13, pid=3)),
        "XID 13 (met by 3 different processes, so probably not their fault)",
        _ASK,
    ),
    "xid/reset-failed": ((GpuReset("GPU-a", False),), "Reset failure (the GPU could not be reset)", _HOST),
    "xid/154": (
        (RecoveryActionChanged(A, Recovery.NONE, Recovery.DRAIN_P2P),),
        "XID 154 (the driver asks to end peer-to-peer work)",
        f"let running work end; {_NO_WORK}",
    ),
    "ecc/uncorrected one": (
        (replace(GOOD_A, ecc_uncorrected=1),),
        "ECC fault (1 uncorrected memory error since the last reset)",
        _LATER,
    ),
    "ecc/uncorrected": (
        (replace(GOOD_A, ecc_uncorrected=5),),
        "ECC fault (5 uncorrected memory errors since the last reset)",
        _LATER,
    ),
    "ecc/sram-threshold": (
        (replace(GOOD_A, sram_threshold_exceeded=True),),
        "ECC fault (on-chip memory has had more errors than it may)",
        _BOARD,
    ),
    "remap/pending": (
        (replace(GOOD_A, remap_pending=True),),
        "Pending row remap (a memory row or page is replaced at the next reset; its data is safe)",
        _LATER,
    ),
    "remap/failed": (
        (replace(GOOD_A, remap_failed=True),),
        "Row remap failure (no spare memory is left for a faulty row or page, so the board has to be replaced)",
        _BOARD,
    ),
    "fabric/inProgress": (
        (replace(GOOD_A, fabric_state="inProgress"),),
        "Fabric start (registration with the NVLink fabric has not ended)",
        _ASK,
    ),
    "fabric/route-unhealthy": (
        (replace(GOOD_A, fabric_state="completed", fabric_faults=frozenset({"route-unhealthy", "limited-capacity"})),),
        "Fabric fault (route-unhealthy, limited-capacity)",
        _BOARD,
    ),
    "fabric/sxid-20034": (
        (SxidSignal(SWITCH, 0, 20034, True, 30, "LTSSM Fault Up"),),
        "SXid 20034 (fatal error of one port of NVSwitch 0 link 30: LTSSM Fault Up)",
        _RESET,
    ),
    "link/down": ((_LINKED, replace(_LINKED, links_active=17)), "NVLink fault (17 of 18 NVLinks are up)", _LATER),
    "link/down all": ((_LINKED, replace(_LINKED, links_active=0)), "NVLink fault (0 of 18 NVLinks are up)", _RESET),
    "presence/lost": ((GpuLost(A, "GPU is lost"),), "GPU loss (the driver cannot reach it: GPU is lost)", _HOST),
    "presence/lost no word": ((GpuLost(A, ""),), "GPU loss (the driver cannot reach it)", _HOST),
    "prepare/failed": ((_BROKEN,) * 3, "Prepare failure (3 times in a row: driver busy (MIG): try later)", _BOARD),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_sentences_of_a_fault(kind: str) -> None:
    signals, name, action = KINDS[kind]
    node = Node()
    for signal in signals:
        node.feed(signal)
    key = kind.partition(" ")[0]
    (raised,) = [t for t in node.log if t.change == "raised"]
    assert (f"{raised.dimension}/{raised.code}", raised.message) == (key, f"{name}: {action}")
    (device,) = [d for d in (GPU_A, GPU_B) if node.health.of(d).findings]
    node.feed(OperatorClear(device, by="operator ann"))
    (cleared,) = [t for t in node.log if t.change == "cleared"]
    assert (f"{cleared.dimension}/{cleared.code}", cleared.message) == (key, f"{name} is over: cleared by operator ann")


def test_there_is_a_sentence_for_every_dimension() -> None:
    assert {kind.partition("/")[0] for kind in KINDS} == set(Dimension)


@pytest.mark.parametrize("message", ["", "x" * 2000, "no form of ours", "(): ", "a (b): " * 400])
def test_a_sentence_of_another_version_is_bounded(message: str) -> None:
    told = rules.over(message, "y" * 2000)
    assert len(told) <= rules.MAX_MESSAGE
    assert " is over: yyy" in told and not told.startswith(" ")

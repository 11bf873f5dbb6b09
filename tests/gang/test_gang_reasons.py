"""The sentences people read, word for word."""

import pytest
from msgspec.structs import replace
from scenario import CONFIG, DRIVER, NOW, reasons, run, scenario

from gpunode.gang.explain import explain
from gpunode.model.gang import ReasonCode


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "node n1\nnode n2\nnode n3 cordoned\ngang train pods=8 bound=n1\ntaint n2/gpu-3 xid=79\n"
            "gang g pods=8,8 same=nvlinkDomain",
            "WaitingForDevices: needs 2 pods × 8 GPUs on one nvlinkDomain each; 0 of 3 nodes have 8 free matching GPUs "
            "(8 held by default/train, 1 tainted gpunode.dev/xid=79 on n2, 1 node cordoned)",
        ),
        (
            "node n1 gpus=4\ngang g pods=8",
            "NoMatchingDevices: needs 1 pod × 8 GPUs; no node has 8 matching GPUs, the most is 4",
        ),
        (
            "node n1 model=a100\nnode n2 model=a100\ngang g pods=1,1 model=h100",
            "NoMatchingDevices: needs 2 pods × 1 GPU; no published device on 2 nodes matches",
        ),
        (
            "norule\nnode n1\ngang g pods=8",
            "WaitingForManagedTaint: needs 1 pod × 8 GPUs; 8 devices match but none carries the managed taint yet",
        ),
        (
            "node a1 rack=a\nnode b1 rack=b\nnode b2 rack=b\ngang old pods=4 bound=b1\ngang g pods=8,8 topology=rack",
            "WaitingForDevices: needs 2 pods × 8 GPUs in one rack; 2 of 3 nodes have 8 free matching GPUs "
            "(4 held by default/old); the best rack, a, has room for 1 of 2 such pods",
        ),
        (
            "node n1 cpu=4\nnode n2 cpu=4\ngang g pods=1,1 cpu=8",
            "NodesDoNotFit: needs 2 pods × 1 GPU; 2 of 2 nodes have 1 free matching GPU "
            "(2 nodes short of cpu (a pod needs 8))",
        ),
        (
            "node n1\npod old gpus=8 on=n1 terminating\ngang g pods=8",
            "WaitingForRelease: needs 1 pod × 8 GPUs; 0 of 1 nodes have 8 free matching GPUs "
            "(8 held by terminating default/old)",
        ),
        ("node n1\ngang g pods=1,1 min=3", "WaitingForMembers: has 2 of the 3 pods it must start with"),
        (
            "node n1\ngang g pods=1,1 noclaim",
            "WaitingForClaims: 2 of 2 pods have no ResourceClaim yet, first g-0 for gpu",
        ),
        (
            "node n1\ngang g pods=1,1 foreign",
            "WaitingForForeignGate: 2 of 2 pods still carry the scheduling gate example.com/wait of others",
        ),
        (
            "node n1\ngang g pods=1 class=nope",
            "DeviceClassNotFound: claim default/g-0-gpu, request gpu: device class nope does not exist",
        ),
        (
            "node n1 incomplete\ngang g pods=8",
            f"WaitingForDevices: needs 1 pod × 8 GPUs; 0 of 1 nodes have 8 free matching GPUs "
            f"(1 pool being updated, first {DRIVER}/n1)",
        ),
        (
            "node a rack=a\ngang g pods=1 topology=zone",
            "NodesDoNotFit: no node carries the topology label zone that the gang's members must share",
        ),
        (
            "node n1 link=4\ngang g pods=6 same=nvlinkDomain",
            "WaitingForDevices: needs 1 pod × 6 GPUs on one nvlinkDomain each; 1 of 1 nodes have 6 free matching GPUs; "
            f"needs 6 devices of one {DRIVER}/nvlinkDomain, best has 4 free",
        ),
        (
            "node n1 gpus=5\nnode n2 gpus=5\ngang g pods=4,3,3",
            "WaitingForDevices: needs 1 pod × 4 GPUs + 2 pods × 3 GPUs; 2 of 2 nodes have 4 free matching GPUs; "
            "no arrangement of all pods exists",
        ),
    ],
)
def test_reason(text: str, expected: str) -> None:
    assert reasons(run(text)) == {"g": expected}


def test_a_gang_that_has_run_is_not_said_to_wait() -> None:
    world = scenario("node n1\nnode n2\ngang g pods=8,8 bound=n1,n2")
    for key, phase in (("default/g-0", "Succeeded"), ("default/g-1", "Failed")):
        world.pods[key] = replace(world.pods[key], status=replace(world.pods[key].status, phase=phase))
    reason = explain(world.snapshot(), "podgroup/default/g", NOW, CONFIG)
    assert reason.text == "all 2 pods have run to the end, 1 with success"


def test_a_failing_selector_is_quoted() -> None:
    world = scenario(f'node n1\ngang g pods=1 cel=device.attributes["{DRIVER}"].serial=="x"')
    reason = explain(world.snapshot(), "podgroup/default/g", NOW, CONFIG)
    assert reason.code is ReasonCode.SELECTOR_ERROR
    assert "serial" in reason.text and "default/g-0-gpu" not in reason.facts


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("node n1\nnode n2\ngang g pods=8,8", "podgroup/default/g", "Placed: fits now: 2 pods go to n1, n2"),
        ("node n1\ngang g pods=8 bound=n1", "podgroup/default/g",
         "Placed: its 1 pod has its place on n1"),
        ("node n1\npod p gpus=8", "pod/default/p", "Placed: fits now: 1 pod goes to n1"),
        ("node n1", "podgroup/default/none", "WaitingForMembers: has no live pods"),
    ],
)  # fmt: skip
def test_explain(text: str, key: str, expected: str) -> None:
    reason = explain(scenario(text).snapshot(), key, NOW, CONFIG)
    assert f"{reason.code}: {reason.text}" == expected

"""Kubernetes' own code as judge: the API server accepts what the planner makes, and the scheduler's allocator gives out
from it exactly what the hardware could."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpunode.cluster.build import find_go, modules
from gpunode.cluster.errors import ClusterError
from gpunode.cluster.paths import cache_root
from gpunode.hardware.board import Board, board_names, load_board
from gpunode.hardware.discover import discover
from gpunode.hardware.fake import FakeMachine
from gpunode.model.hardware import Inventory, MigProfile, device_name, mig_device_name
from gpunode.model.health import Action, DeviceHealth, Dimension, Finding, Level, NodeHealth
from gpunode.model.resource import ResourceSlice
from gpunode.slices.linter import lint
from gpunode.slices.planner import GpuMode, SliceConfig, plan

VERSIONS = ("1.37.2", "1.36.3")
NODE = "node-0"
DRIVER = "gpu.gpunode.dev"
SOURCE = Path(__file__).with_name("main.go")
# One board of each MIG table.
MIG_BOARDS = list({b.mig_profiles: b.name for b in map(load_board, board_names()) if b.mig_profiles}.values())

Ask = Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="session", params=VERSIONS)
def ask(request: pytest.FixtureRequest) -> Ask:
    """Judges cases with the compiled oracle. Skips, with the reason, where it cannot be compiled."""
    program = _built(request.param)

    def judge(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        text = "".join(json.dumps(case) + "\n" for case in cases)
        done = subprocess.run([str(program)], input=text, capture_output=True, text=True, timeout=300, check=True)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == len(cases)
        return answers

    return judge


def _built(kubernetes: str) -> Path:
    """The oracle in the cache, compiled when this source is new to it."""
    digest = hashlib.sha256(SOURCE.read_bytes() + kubernetes.encode()).hexdigest()[:12]
    program = cache_root() / f"oracle-{kubernetes}-{digest}" / "oracle"
    if program.exists():
        return program
    try:
        go = find_go()
    except ClusterError as error:
        pytest.skip(f"the oracle needs Go: {error}")
    with tempfile.TemporaryDirectory() as work:
        shutil.copy(SOURCE, work)
        head = modules(kubernetes)[0].head
        Path(work, "go.mod").write_text(f"module oracle\n\ngo 1.26.0\n\n{head}")
        environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
        built = subprocess.run(
            [str(go), "build", "-mod=mod", "-p", "1", "-o", "oracle", "."],
            cwd=work, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if built.returncode and re.search(r"dial tcp|no such host|proxyconnect|i/o timeout", built.stderr):
            pytest.skip(f"the oracle's modules cannot be fetched: {built.stderr.strip().splitlines()[-1]}")
        assert built.returncode == 0, built.stderr
        program.parent.mkdir(parents=True, exist_ok=True)
        temporary = program.with_suffix(f".{os.getpid()}")
        shutil.copy(Path(work, "oracle"), temporary)
        temporary.rename(program)
    return program


def body(found: ResourceSlice) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **plain}


def claim(count: int = 1, expression: str = "true", **exactly: Any) -> dict[str, Any]:
    request = {
        "deviceClassName": "any",
        "allocationMode": "ExactCount",
        "count": count,
        "selectors": [{"cel": {"expression": expression}}],
    }
    devices = {"requests": [{"name": "r", "exactly": request | exactly}]}
    return {"metadata": {"name": "c", "namespace": "default"}, "spec": {"devices": devices}}


def inventory_of(board: Board, base: Path) -> Inventory:
    machine = FakeMachine.create(board, NODE, base)
    machine.nvml.nvmlInit()
    return discover(machine.nvml, machine.roots, NODE)


def alone(board: Board) -> Board:
    """The board with its first GPU only."""
    first = msgspec.structs.replace(board.gpus[0], peers=())
    return msgspec.structs.replace(board, gpus=(first,))


def planned(inventory: Inventory, mode: GpuMode, health: NodeHealth | None = None) -> tuple[ResourceSlice, ...]:
    config = SliceConfig(DRIVER, NODE, mode=mode, managed_taint=False)
    return plan(inventory, health or NodeHealth(), config)


@pytest.mark.parametrize("board", board_names())
def test_every_board_in_every_mode_is_accepted_and_gives_devices(board: str, ask: Ask, tmp_path: Path) -> None:
    inventory = inventory_of(load_board(board), tmp_path)
    sick = Finding(Dimension.XID, Level.UNHEALTHY, "79", Action.RESTART_HOST, "x", "2026-01-01T00:00:00Z")
    cases = []
    expected = []
    for mode in ("none", "static", "dynamic", "shared"):
        slices = planned(inventory, mode)
        name = slices[-1].spec.devices[0].name.partition("-mig-")[0]
        hurt = planned(inventory, mode, NodeHealth({name: DeviceHealth(name, (sick,))}))
        cases += [
            {"slices": [body(s) for s in slices], "claim": claim(len(inventory.gpus), f'{attribute("type")} == "gpu"')},
            {"slices": [body(s) for s in hurt], "claim": claim(len(inventory.gpus), f'{attribute("type")} == "gpu"')},
        ]
        expected += [len(inventory.gpus), None]
    answers = ask(cases)
    assert [(a["refused"], a["error"]) for a in answers] == [([], "")] * len(cases)
    assert [a["devices"] and len(a["devices"]) for a in answers] == expected, "a tainted GPU is not given out"


def test_a_device_with_every_fault_and_grace_is_accepted_and_its_graces_keep_nobody_away(
    ask: Ask, tmp_path: Path
) -> None:
    """Sixteen taints; a claim that tolerates those with an effect gets the device."""
    inventory = inventory_of(alone(load_board("hgx-h100")), tmp_path)
    name = planned(inventory, "none")[0].spec.devices[0].name
    since = "2026-01-01T00:00:00Z"
    found = tuple(Finding(d, Level.UNHEALTHY, "x", Action.INSPECT, "x", since, grace=600) for d in Dimension)
    config = SliceConfig(DRIVER, NODE, managed_taint=True)
    slices = plan(inventory, NodeHealth({name: DeviceHealth(name, found)}), config, (), held=frozenset({name}))
    taints = slices[0].spec.devices[0].taints
    assert (len(taints), sum(t.effect == "None" for t in taints)) == (16, len(Dimension))
    keys = [t.key for t in taints if t.effect == "NoSchedule"]
    tolerations = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]
    bodies = [body(s) for s in slices]
    answers = ask([
        {"slices": bodies, "claim": claim(tolerations=tolerations)},
        {"slices": bodies, "claim": claim(tolerations=tolerations[1:])},
    ])  # fmt: skip
    assert [(a["refused"], a["devices"] and len(a["devices"])) for a in answers] == [([], 1), ([], None)]


def attribute(name: str) -> str:
    return f'device.attributes["{DRIVER}"].{name}'


@pytest.mark.parametrize("count", [0, 1, 16])
def test_pools_of_none_one_and_sixteen_gpus(count: int, ask: Ask, tmp_path: Path) -> None:
    board = load_board("hgx-h100")
    both = board.gpus + tuple(msgspec.structs.replace(g, pci=g.pci.replace("0000:", "0001:")) for g in board.gpus)
    inventory = inventory_of(msgspec.structs.replace(board, name="n", gpus=both[:count]), tmp_path)
    cases = [
        {"slices": [body(s) for s in planned(inventory, mode)], "claim": claim(max(count, 1))}
        for mode in ("static", "dynamic", "shared")
    ]
    answers = ask(cases)
    assert [(a["refused"], a["error"]) for a in answers] == [([], "")] * 3
    assert [len(a["devices"] or ()) for a in answers] == [count] * 3


HOSTILE = [
    "",
    " ",
    "\x00\x1b[31m",
    "x" * 500,
    "é" * 40,
    "🙂" * 20,
    "a\nb",
    "\u202ertl",
    '"}]}',
    "../../etc",
    "-",
    "0x",
    "ÿ\ufffd",
]


def test_hostile_names_and_versions_are_accepted_or_left_out(ask: Ask, tmp_path: Path) -> None:
    inventory = inventory_of(load_board("hgx-h100"), tmp_path)
    cases = []
    for text in HOSTILE:
        first = dataclasses.replace(
            inventory.gpus[0], product=text, brand=text, architecture=text, pcie_root=text, serial=text
        )
        made = dataclasses.replace(inventory, driver_version=text, cuda_version=text, gpus=(first, *inventory.gpus[1:]))
        cases += [
            {"slices": [body(s) for s in planned(made, mode)], "claim": claim(8)} for mode in ("static", "dynamic")
        ]
    answers = ask(cases)
    assert [(a["refused"], len(a["devices"] or ())) for a in answers] == [([], 8)] * len(cases)


@pytest.mark.parametrize("board", MIG_BOARDS)
def test_two_partitions_fit_exactly_when_the_hardware_has_room(board: str, ask: Ask, tmp_path: Path) -> None:
    """Every pair of placements of one GPU: held the one, the other is allocated if and only if their memory slices
    are apart and there is a media engine for each that has one."""
    one = load_board(board)
    inventory = inventory_of(alone(one), tmp_path)
    gpu = inventory.gpus[0]
    counters, devices = planned(inventory, "dynamic")
    by_name = {d.name: d for d in devices.spec.devices}
    places = [(p, start, mig_device_name(gpu.pci, p.name, start)) for p in gpu.mig_profiles for start in p.starts]
    cases, expected = [], []
    for (p, a, first), (q, b, second) in itertools.permutations(places, 2):
        pair = msgspec.structs.replace(devices.spec, devices=(by_name[first], by_name[second]))
        slices = [body(counters), body(msgspec.structs.replace(devices, spec=pair))]
        cases.append({"slices": slices, "held": [first], "claim": claim()})
        apart = a + p.size <= b or b + q.size <= a
        expected.append([second] if apart and not (p.ofa_engines and q.ofa_engines) else None)
    assert [a["devices"] for a in ask(cases)] == expected
    assert None in expected
    assert any(expected)


@pytest.mark.parametrize("board", MIG_BOARDS)
def test_a_partition_is_added_to_a_layout_exactly_when_it_stays_legal(board: str, ask: Ask, tmp_path: Path) -> None:
    gpu = inventory_of(alone(load_board(board)), tmp_path).gpus[0]
    counters, devices = planned(inventory_of(alone(load_board(board)), tmp_path), "dynamic")
    by_name = {d.name: d for d in devices.spec.devices}
    places = [(p, start) for p in gpu.mig_profiles for start in p.starts]
    choose = random.Random(board)
    cases, expected = [], []
    for _ in range(60):
        layout: list[tuple[MigProfile, int]] = []
        for place in choose.sample(places, choose.randint(2, 12)):
            legal = _legal([*layout, place])
            names = [mig_device_name(gpu.pci, p.name, start) for p, start in [*layout, place]]
            trimmed = msgspec.structs.replace(devices.spec, devices=tuple(by_name[n] for n in names))
            slices = [body(counters), body(msgspec.structs.replace(devices, spec=trimmed))]
            cases.append({"slices": slices, "held": names[:-1], "claim": claim()})
            expected.append([names[-1]] if legal else None)
            layout += [place] if legal else []
    assert [a["devices"] for a in ask(cases)] == expected


def _legal(layout: list[tuple[MigProfile, int]]) -> bool:
    """What MIG allows: no memory slice twice, and one partition with media engines beside others of one slice."""
    slices = [n for profile, start in layout for n in range(start, start + profile.size)]
    return len(slices) == len(set(slices)) and sum(p.ofa_engines for p, _ in layout) <= 1


@pytest.mark.parametrize("board", MIG_BOARDS)
def test_whole_gpu_and_partition_exclude_each_other(board: str, ask: Ask, tmp_path: Path) -> None:
    one = load_board(board)
    inventory = inventory_of(alone(one), tmp_path)
    slices = planned(inventory, "dynamic")
    names = [d.name for d in slices[1].spec.devices]
    whole, partitions = names[-1], names[:-1]
    bodies = [body(s) for s in slices]
    wants_whole = claim(1, f'{attribute("type")} == "gpu"')
    cases = [{"slices": bodies, "held": [name], "claim": wants_whole} for name in partitions]
    cases.append({"slices": bodies, "held": [whole], "claim": claim()})
    cases.append({"slices": bodies, "claim": wants_whole})
    assert [a["devices"] for a in ask(cases)] == [None] * (len(partitions) + 1) + [[whole]]


def test_a_gpu_with_dead_links_is_left_out_by_a_selector(ask: Ask, tmp_path: Path) -> None:
    bodies = [body(s) for s in planned(inventory_of(load_board("b200-dead-nvlink"), tmp_path), "static")]
    whole = f"{attribute('nvlinkLinksActive')} == {attribute('nvlinkLinksTotal')}"
    eight, seven = ask([{"slices": bodies, "claim": claim(count, whole)} for count in (8, 7)])
    assert eight["devices"] is None
    assert "gpu-0000-52-00-0" not in seven["devices"]


def test_a_claim_for_two_gets_an_nvlink_pair(ask: Ask, tmp_path: Path) -> None:
    bodies = [body(s) for s in planned(inventory_of(load_board("a100-nvlink-pairs"), tmp_path), "static")]
    cases = []
    for count, held in ((2, []), (2, ["gpu-0000-01-00-0"]), (3, [])):
        linked = claim(count)
        linked["spec"]["devices"]["constraints"] = [{"matchAttribute": f"{DRIVER}/nvlinkDomain"}]
        cases.append({"slices": bodies, "held": held, "claim": linked})
    assert [a["devices"] for a in ask(cases)] == [
        ["gpu-0000-01-00-0", "gpu-0000-41-00-0"],
        ["gpu-0000-81-00-0", "gpu-0000-c1-00-0"],
        None,
    ]


def test_first_fit_fills_the_high_half_first(ask: Ask, tmp_path: Path) -> None:
    one = load_board("hgx-h100")
    inventory = inventory_of(alone(one), tmp_path)
    bodies = [body(s) for s in planned(inventory, "dynamic")]
    small = f'{attribute("profile")} == "1g.10gb"'
    (three,) = ask([{"slices": bodies, "claim": claim(3, small)}])
    assert [name[-2:] for name in three["devices"]] == ["-6", "-5", "-4"]
    (large,) = ask(
        [{"slices": bodies, "held": three["devices"], "claim": claim(1, f'{attribute("profile")} == "4g.40gb"')}]
    )
    assert large["devices"] == ["gpu-0000-1b-00-0-mig-4g-40gb-0"]


def test_a_shared_gpu_is_given_out_by_memory(ask: Ask, tmp_path: Path) -> None:
    one = load_board("l4")
    inventory = inventory_of(alone(one), tmp_path)
    bodies = [body(s) for s in planned(inventory, "shared")]
    device = inventory.gpus[0]
    shares = [{"device": device_name(device.pci), "consumed": {"memory": "7Gi"}}] * 2
    wanted = {size: claim(capacity={"requests": {"memory": size}}) for size in ("7Gi", "8Gi", "9Gi", "100Mi")}
    cases = [{"slices": bodies, "shares": shares, "claim": c} for c in (*wanted.values(), claim())]
    cases.append({"slices": bodies, "claim": claim()})
    found = [bool(a["devices"]) for a in ask(cases)]
    assert found == [True, True, False, True, False, True], "22 GiB less 14; a claim that names no amount wants all"


def test_the_linter_refuses_no_less_than_the_api_server(ask: Ask) -> None:
    """The linter's own bad examples: whatever the API server refuses, the linter has named."""
    from tests.slices.test_slices_linter import BAD_DEVICES, BAD_SLICES, device, made

    slices = [made(device("good"), bad) for bad, _ in BAD_DEVICES.values()] + [bad for bad, _ in BAD_SLICES.values()]
    names = [*BAD_DEVICES, *BAD_SLICES]
    accepted = {n for n, a in zip(names, ask([{"slices": [body(s)]} for s in slices]), strict=True) if not a["refused"]}
    assert all(lint([s]) for s in slices)
    assert accepted == set()


WORDS = [
    "", "a", "A", "-a", "a-", "a.b", "a/b", "//", "a" * 33, "a" * 63, "a" * 64, "a" * 65, "a" * 254, "é" * 33, "1.2.3",
    "01.2.3", "1.2.3-rc", "1.2", "1Gi", "0", "-1", "1e3", "1.5", "100m", "80 GB", "16Ei", "NoSchedule", "None", "Foo",
    "example.com/x", "a_b", "1a", "x y", "\x00", "9223372036854775808", "1u",
]  # fmt: skip


def test_linter_and_api_server_agree_on_damaged_slices(ask: Ask, tmp_path: Path) -> None:
    """Real slices with one value damaged: the linter names what the API server refuses, and is stricter only on
    names with several slashes, on upper case in domains, and on forms of quantities."""
    choose = random.Random(20260101)
    inventory = inventory_of(alone(load_board("hgx-h100")), tmp_path)
    sound = [body(s) for mode in ("static", "dynamic", "shared") for s in planned(inventory, mode)]
    damaged: list[tuple[dict[str, Any], ResourceSlice]] = []
    while len(damaged) < 1500:
        one = _damage(json.loads(json.dumps(choose.choice(sound))), choose)
        with contextlib.suppress(msgspec.MsgspecError):
            damaged.append((one, msgspec.convert(one, ResourceSlice)))
    for (_, decoded), answer in zip(damaged, ask([{"slices": [one]} for one, _ in damaged]), strict=True):
        problems = [p.text for p in lint([decoded]) if "which has none such" not in p.text]
        if answer["refused"]:
            assert problems, answer["refused"]
        else:
            assert all("[domain/]identifier" in p or "Kubernetes quantity" in p for p in problems), problems


def _damage(one: dict[str, Any], choose: random.Random) -> dict[str, Any]:
    """One value of the spec replaced, removed, cut or repeated, or one of the fields added that we never set."""
    devices = one["spec"].get("devices") or [{}]
    device = choose.choice(devices)
    added = {
        "taints": [{"key": choose.choice(WORDS), "value": choose.choice(WORDS), "effect": choose.choice(WORDS)}],
        "bindingConditions": [choose.choice(WORDS)] * choose.randint(1, 2),
        "bindingFailureConditions": [choose.choice(WORDS), "B"],
        "capacity": {"m": {"value": "10Gi", "requestPolicy": _policy(choose)}},
    }
    if device and choose.random() < 0.4:
        names = choose.sample(sorted(added), 2)
        device.update({name: added[name] for name in names}, allowMultipleAllocations=choose.random() < 0.8)
        return one
    *path, last = choose.choice(list(_paths(one["spec"])))
    parent = functools.reduce(lambda inner, key: inner[key], path, one["spec"])
    value, named = parent[last], path[-1:] in (["attributes"], ["capacity"], ["counters"])
    if isinstance(parent, dict) and choose.random() < 0.2:
        del parent[last]
    elif named and choose.random() < 0.4:
        parent[choose.choice(WORDS)] = parent.pop(last)
    elif isinstance(value, str):
        parent[last] = choose.choice(WORDS)
    elif isinstance(value, bool):
        parent[last] = not value
    elif isinstance(value, int):
        parent[last] = choose.choice([0, -1, 2**31, 2**63 - 1])
    elif isinstance(value, list):
        parent[last] = value * choose.randint(0, 4)
    else:
        parent[last] = {}
    return one


def _policy(choose: random.Random) -> dict[str, Any]:
    sizes = ["0", "1Gi", "2Gi", "3Gi", "10Gi", "11Gi", "1500Mi"]
    given: dict[str, Any] = {"default": choose.choice(sizes)}
    if choose.random() < 0.5:
        given["validValues"] = choose.sample(sizes, choose.randint(0, 4))
    if choose.random() < 0.6:
        given["validRange"] = {"min": choose.choice(sizes), "max": choose.choice(sizes), "step": choose.choice(sizes)}
    return given


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from _paths(value[key], (*path, key))

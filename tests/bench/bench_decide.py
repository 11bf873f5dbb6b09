"""How long decide() takes: 1,000 nodes of 8 GPUs, 60 gangs of 16 pods of 8 GPUs.

Run as a program, or call `bench_decide`. Search only: no API server, no writes.
"""

import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from gpunode.gang.decide import Decider
from gpunode.model.gang import Place, Report, Snapshot

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gang"))

from scenario import CONFIG, NOW, Scenario, managed_rule


def cluster(nodes: int, gangs: int, pods: int, size: int) -> Snapshot:
    """A cluster of equal nodes and waiting gangs of equal shape."""
    world = Scenario()
    world.rules["managed"] = managed_rule()
    for number in range(nodes):
        world.node(f"node-{number:04}", gpus="8", link="8")
    for number in range(gangs):
        world.gang(f"gang-{number:03}", pods=",".join([str(size)] * pods), same="nvlinkDomain")
    return world.snapshot()


def bench_decide(
    repeats: int = 3, nodes: int = 1000, gangs: int = 60, pods: int = 16, size: int = 8
) -> dict[str, list[float]]:
    """Samples in milliseconds: `place` a cold start that places all it can, `again` the same decision once more with
    warm caches, `waiting` a warm decision in which 60 gangs wait and nothing changed."""
    samples: dict[str, list[float]] = {"place": [], "again": [], "waiting": []}
    free = cluster(nodes, gangs, pods, size)
    # Half of the GPUs of every node are gone: nothing fits, all gangs wait.
    full = replace(free, slices={
        name: _halved(slice_) for name, slice_ in free.slices.items()
    })  # fmt: skip
    for _ in range(repeats):
        decider = Decider()
        samples["place"].append(_time(decider, free, Place, gangs))
        samples["again"].append(_time(decider, free, Place, gangs))
        decider = Decider()
        _time(decider, full, Report, gangs)
        samples["waiting"].append(_time(decider, full, Report, gangs))
    return samples


def _halved(slice_):  # type: ignore[no-untyped-def]
    from msgspec.structs import replace as with_fields

    return with_fields(slice_, spec=with_fields(slice_.spec, devices=slice_.spec.devices[:4]))


def _time(decider: Decider, snapshot: Snapshot, kind: type, expected: int) -> float:
    start = perf_counter()
    actions = decider.decide(snapshot, NOW, CONFIG)
    elapsed = (perf_counter() - start) * 1000
    found = sum(isinstance(a, kind) for a in actions)
    if found != expected:
        raise RuntimeError(f"expected {expected} {kind.__name__}, got {found}")
    return elapsed


if __name__ == "__main__":
    for name, values in bench_decide().items():
        print(f"{name}: {', '.join(f'{v:.0f}' for v in values)} ms")

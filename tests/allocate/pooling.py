"""Pools from slices and taint rules, as the controller groups them for its view."""

from collections.abc import Mapping

from gpunode.allocate.pools import Pool, build_pool
from gpunode.model.resource import DeviceTaintRule, ResourceSlice


def build_pools(
    slices: Mapping[str, ResourceSlice], rules: Mapping[str, DeviceTaintRule], drivers: frozenset[str]
) -> dict[tuple[str, str], Pool]:
    """Pools of the given drivers by (driver, pool name), in sorted order."""
    grouped: dict[tuple[str, str], list[tuple[str, ResourceSlice]]] = {}
    for name, slice_ in slices.items():
        if slice_.spec.driver in drivers:
            grouped.setdefault((slice_.spec.driver, slice_.spec.pool.name), []).append((name, slice_))
    ordered = [rules[name] for name in sorted(rules)]
    return {key: build_pool([s for _, s in sorted(grouped[key])], ordered) for key in sorted(grouped)}

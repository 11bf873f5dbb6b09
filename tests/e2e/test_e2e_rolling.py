"""The watch over a node's slices: one that cannot see a gap proves nothing."""

from msgspec import convert

from gpunode.model.resource import ResourceSlice
from tests.e2e.rolling import SliceGaps


def slice_(name: str, generation: int = 1, count: int = 1) -> ResourceSlice:
    pool = {"name": "n", "generation": generation, "resourceSliceCount": count}
    return convert(
        {"metadata": {"name": name, "uid": f"u-{name}"}, "spec": {"driver": "d", "pool": pool}}, ResourceSlice
    )


def test_a_pool_that_is_gone_is_a_gap_until_it_is_back() -> None:
    watch = SliceGaps()
    watch.on_slice("a", slice_("a"))
    assert watch.longest_s == 0
    watch.on_slice("a", None)
    assert watch.longest_s > 0, "a gap that lasts counts"
    watch.on_slice("b", slice_("b"))
    assert len(watch.gaps_s) == 1
    assert watch.longest_s == watch.gaps_s[0] > 0
    assert watch.uids == {"u-a", "u-b"}


def test_a_pool_that_is_not_whole_is_a_gap_too() -> None:
    watch = SliceGaps()
    for name in "ab":
        watch.on_slice(name, slice_(name, count=2))
    watch.gaps_s.clear()  # while the first slices came in
    watch.on_slice("a", slice_("a", generation=2, count=2))
    assert watch.longest_s > 0
    watch.on_slice("b", slice_("b", generation=2, count=2))
    assert len(watch.gaps_s) == 1
    watch.on_slice("b", None)
    assert watch.longest_s > 0

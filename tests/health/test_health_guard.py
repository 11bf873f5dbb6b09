"""The blast-radius guard: which failures are a burst."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.health.guard import BlastRadius

RADIUS = BlastRadius(share=0.2, window_s=600, minimum=16)


@pytest.mark.parametrize(
    ("failed_at", "total", "bursts"),
    [
        ([], 0, ()),
        ([990.0] * 15, 16, ()),  # fewer than the minimum, however large a share
        ([990.0] * 16, 64, ((990.0, 990.0),)),
        ([990.0] * 16, 80, ()),  # exactly the share
        ([990.0] * 17, 80, ((990.0, 990.0),)),
        ([990.0] * 9 + [300.0] * 9, 80, ()),
        ([900.0] * 9 + [300.0] * 9, 80, ((300.0, 900.0),)),
        ([0.0] * 40 + [5000.0] * 2, 80, ((0.0, 0.0),)),  # two more, later: they are dealt with
        ([0.0] * 20 + [5000.0] * 20, 80, ((0.0, 0.0), (5000.0, 5000.0))),
        ([float(n * 60) for n in range(40)], 40, ()),  # one a minute is no burst: eleven in ten minutes
        ([float(n * 30) for n in range(40)], 40, ((0.0, 1170.0),)),  # one chain
    ],
)
def test_bursts(failed_at: list[float], total: int, bursts: tuple[tuple[float, float], ...]) -> None:
    assert RADIUS.bursts(failed_at, total) == bursts


@given(st.lists(st.floats(0, 5000), max_size=60), st.integers(0, 100))
def test_every_failure_is_in_a_burst_just_if_one_window_around_it_is_too_full(times: list[float], spare: int) -> None:
    total = len(times) + spare
    bursts = RADIUS.bursts(times, total)
    for at in times:
        windows = [[t for t in times if start <= t <= start + 600] for start in times if start <= at <= start + 600]
        full = any(len(w) >= 16 and len(w) > 0.2 * total for w in windows)
        assert any(first <= at <= last for first, last in bursts) == full
    assert all(one[1] < other[0] for one, other in pairwise(bursts))

"""Kubernetes quantities are exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.model.quantity import format_bytes, format_milli, parse, parse_milli


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("0", 0),
        ("1", 1000),
        ("500m", 500),
        ("1.5", 1500),
        (".5", 500),
        ("2.", 2000),
        ("1n", 1),
        ("80Gi", 80 * 2**30 * 1000),
        ("1e3", 1_000_000),
        ("1E3", 1_000_000),
        ("1E", 10**21),
        ("-1", -1000),
        ("12e-1", 1200),
    ],
)
def test_parse(text: str, milli: int) -> None:
    assert parse_milli(text) == milli


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "0x10", "1e", "NaN", "1" * 65, "1KiB"])
def test_refuses_what_is_not_a_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="not a Kubernetes quantity"):
        parse_milli(text)


@given(st.integers(0, 2**62))
def test_bytes_round_trip(value: int) -> None:
    assert parse(format_bytes(value)) == value


@given(st.integers(0, 2**50))
def test_milli_round_trip(value: int) -> None:
    assert parse_milli(format_milli(value)) == value


def test_rounds_up_like_the_api_server() -> None:
    assert parse("1m") == 1
    assert parse("1001m") == 2

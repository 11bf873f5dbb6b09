"""Kubernetes quantities ("80Gi", "500m", "1e3") as exact integers of a thousandth.

Source: k8s.io/apimachinery/pkg/api/resource/quantity.go (suffix table, rounding up).
"""

import re
from fractions import Fraction
from functools import lru_cache

_SUFFIX = {
    "": Fraction(1), "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12),
    "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40),
    "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip
_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)")
_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


@lru_cache(maxsize=65536)
def parse_milli(text: str) -> int:
    """Value in thousandths, rounded up as the API server does.

    Raises ValueError for text that is not a quantity.
    """
    match = _FORM.fullmatch(text) if len(text) <= 64 else None
    if match is None:
        raise ValueError(f"not a Kubernetes quantity: {text[:64]!r} (examples: 80Gi, 500m, 4)")
    number, exponent, suffix = match.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SUFFIX[suffix or ""]
    value = Fraction(number) * scale * 1000
    return -((-value.numerator) // value.denominator)


def parse(text: str) -> int:
    """Value in whole units, rounded up. Raises ValueError."""
    return -(-parse_milli(text) // 1000)


def format_bytes(value: int) -> str:
    """Shortest exact binary form: 85899345920 -> "80Gi"."""
    suffix = ""
    for candidate in _BINARY:
        if value == 0 or value % 1024:
            break
        value //= 1024
        suffix = candidate
    return f"{value}{suffix}"


def format_milli(value: int) -> str:
    """Shortest exact decimal form of a value in thousandths: 1500 -> "1500m", 2000 -> "2"."""
    return str(value // 1000) if value % 1000 == 0 else f"{value}m"

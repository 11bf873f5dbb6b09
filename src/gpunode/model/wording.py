"""Wording that sentences for people share."""

from collections.abc import Sequence


def why(error: Exception) -> str:
    """What an error says, without the number and the path of an OSError: the sentence around it names the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def some(names: Sequence[str], limit: int = 4, more: str = "more") -> str:
    """The first names, and how many there are besides: "a, b and 3 more"."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} {more}"

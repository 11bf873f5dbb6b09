"""API timestamps."""

from datetime import UTC, datetime


def parse_time(text: str | None) -> datetime | None:
    """An API timestamp (RFC 3339) as an aware datetime; None for none and for text that is no timestamp."""
    try:
        value = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

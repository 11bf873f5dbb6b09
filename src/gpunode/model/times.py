"""API timestamps: RFC 3339, UTC."""

from datetime import UTC, datetime


def stamp(moment: datetime) -> str:
    """An aware datetime as the API writes it, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def stamp_micro(moment: datetime) -> str:
    """The same with microseconds, as Events and Leases have it (MicroTime)."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def stamp_now() -> str:
    """This moment as the API writes it."""
    return stamp(datetime.now(UTC))


def parse_time(text: str | None) -> datetime | None:
    """An API timestamp as an aware datetime; None for none and for text that is no timestamp."""
    try:
        value = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

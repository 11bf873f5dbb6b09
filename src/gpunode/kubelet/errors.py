"""Why a claim cannot be prepared or released, in a form that metrics, Events and the black-hole guard can use."""

from enum import StrEnum


class ErrorKind(StrEnum):
    """Label of the failure metric. Only HARDWARE says something about a device."""

    REQUEST = "request"
    NOT_FOUND = "not-found"
    UID = "uid"
    NOT_ALLOCATED = "not-allocated"
    WRONG_NODE = "wrong-node"
    UNKNOWN_DEVICE = "unknown-device"
    HELD = "held"
    CONFIG = "config"
    API = "api"
    HARDWARE = "hardware"
    STORAGE = "storage"
    BUSY = "busy"
    INTERNAL = "internal"


class ClaimError(Exception):
    """One claim's failure. `devices` are the device names at fault, for HARDWARE.

    The message may quote what others wrote: it is made printable and cut at 1024 characters.
    """

    def __init__(self, kind: ErrorKind, message: str, devices: tuple[str, ...] = ()) -> None:
        self.message = "".join(c if c.isprintable() else "?" for c in message[:1024])
        super().__init__(self.message)
        self.kind = kind
        self.devices = devices

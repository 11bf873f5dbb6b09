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
    """One claim's failure. `devices` are the device names at fault, for HARDWARE."""

    def __init__(self, kind: ErrorKind, message: str, devices: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.devices = devices


class HardwareError(Exception):
    """Raised by hardware seams (partitioner, sharing): one sentence with the driver's own error."""


class InUseError(HardwareError):
    """The partition still has users; try again."""

"""Errors that hardware raises and the kubelet plugin understands."""


class HardwareError(Exception):
    """What could not be done to a device: one sentence with the driver's own error."""


class InUseError(HardwareError):
    """The device still has users; the same call may succeed later."""


class NotOfferedError(HardwareError):
    """This cannot be had here, and no device is at fault: the node lacks something, or the settings are refused."""

"""Faults as values: what can be done to a fake machine, and what driver and hardware would say about it."""

from typing import Annotated

import msgspec
import pynvml
from msgspec import Meta

DeviceText = Annotated[str, Meta(min_length=1, max_length=128)]


class _Fault(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower, forbid_unknown_fields=True):
    """Base that only carries the codec settings: {"kind": "xid", ...}."""


class Xid(_Fault, frozen=True, kw_only=True):
    """The driver reports an XID. device: DRA device name, PCI address, UUID or NVML index.

    text: the part after the code; "" takes the driver's usual words. gi, ci: MIG instances.
    """

    device: DeviceText
    code: Annotated[int, Meta(ge=1, le=9999)]
    text: Annotated[str, Meta(max_length=512)] = ""
    gi: int | None = None
    ci: int | None = None
    pid: int | None = None


class Recover(_Fault, frozen=True, kw_only=True):
    """A successful reset of the GPU: it answers again, and its counters and links are as new."""

    device: DeviceText


class Lost(_Fault, frozen=True, kw_only=True):
    """The GPU stops answering NVML, and nothing is logged."""

    device: DeviceText


class LinkDown(_Fault, frozen=True, kw_only=True):
    """One NVLink goes down."""

    device: DeviceText
    link: Annotated[int, Meta(ge=0, le=35)]


class SwitchError(_Fault, frozen=True, kw_only=True):
    """An NVSwitch reports an error (SXid). switch: its number or PCI address; port: the number of its link, None for
    an error of the whole switch. text: the part after both; "" takes the driver's usual words.

    A fatal one takes links down: that of the port, or all of the switch. Their GPUs report XID 74.
    """

    switch: DeviceText
    code: Annotated[int, Meta(ge=10000, le=99999)]
    fatal: bool = True
    port: Annotated[int, Meta(ge=0, le=999)] | None = None
    text: Annotated[str, Meta(max_length=512)] = ""


class FabricChange(_Fault, frozen=True, kw_only=True):
    """Fabric registration of a GPU changes. state: 0 unsupported to 3 completed; summary and mask as in NVML."""

    device: DeviceText
    state: Annotated[int, Meta(ge=0, le=3)]
    summary: Annotated[int, Meta(ge=0, le=3)] = pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY
    mask: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0


class RecoveryChange(_Fault, frozen=True, kw_only=True):
    """The driver changes its verdict on a GPU (XID 154). action: NVML's recovery action, 0 to 7."""

    device: DeviceText
    action: Annotated[int, Meta(ge=0, le=7)]


class RemapPending(_Fault, frozen=True, kw_only=True):
    """A memory row waits for a reset to be remapped (XID 63)."""

    device: DeviceText


class DriverReload(_Fault, frozen=True, kw_only=True):
    """The driver is unloaded and loaded again: handles of before are void. version: "" keeps the version."""

    version: Annotated[str, Meta(pattern=r"^$|^[0-9]{3}(\.[0-9]{1,3}){1,2}$")] = ""


class DriverGone(_Fault, frozen=True, kw_only=True):
    """The driver is unloaded: NVML cannot be used until a DriverReload."""


Fault = (
    Xid
    | Recover
    | Lost
    | LinkDown
    | SwitchError
    | FabricChange
    | RecoveryChange
    | RemapPending
    | DriverReload
    | DriverGone
)


def parse_fault(text: str | bytes) -> Fault:
    """One fault from JSON, e.g. {"kind": "xid", "device": "gpu-0000-07-00-0", "code": 79}. Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=Fault)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a fault: {error}") from None


LINK_TEXT = "NVLink: fatal error detected on link {}(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)"
# What the driver prints after the code, in the forms of the NVIDIA open kernel modules.
XID_TEXT = {
    13: "Graphics Exception: ESR 0x505730=0x107000e 0x505734=0x20 (GPC 1, TPC 0, SM 1)",
    31: "MMU Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_0 faulted @ 0x7f42_a9400000. FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: "Ch 00000008, engmask 00000101",
    45: "Ch 00000010, errorString CTX SWITCH TIMEOUT, Info 0x1c00c",
    48: "An uncorrectable double bit error (DBE) has been detected on GPU (FB partition 6, subpartition 0).",
    63: "Row Remapper: New row (0x00000000d4c8a0c0) marked for remapping, reset gpu to activate.",
    64: "Row Remapper: Error recording row (0x00000000d4c8a0c0) to the inforom",
    74: LINK_TEXT.format(5),
    79: "GPU has fallen off the bus.",
    94: "Contained: SM (0x1). RST: No, D-RST: No",
    95: "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    109: "CTX SWITCH TIMEOUT, Info 0x5c00c",
    119: "Timeout after 6s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL)",
    120: "GSP task exception: 0x5 @ pc:0x13c0d8c, task: 1",
}
# What the NVSwitch driver prints after code and link.
SXID_TEXT = {
    12020: "Crossbar ingress sequence ID error",
    12028: "egress non-posted PRIV error",
    20034: "LTSSM Fault Up",
    22013: "Minion Link DLREQ interrupt",
}
LINK_XID = 74
# After these the driver's own verdict is a reset (catalogue class RESET_GPU, and 48 and 74 on their own).
RESET_XIDS = frozenset({46, 48, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
OFF_BUS_XID = 79
RECOVERY_XID = 154
RECOVERY_NAMES = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: "None",
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "GPU Reset Required",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "Node Reboot Required",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "Drain P2P",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "Drain and Reset",
    # Older bindings have no names for these.
    5: "Recover IMEX Domain",
    6: "Bus Reset",
    7: "System Reboot",
}

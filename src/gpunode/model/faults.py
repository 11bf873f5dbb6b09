"""Fault orders for fake hardware, as they stand in the ConfigMap that agents watch.

One key a node; its value is a JSON list of orders, oldest first. Decoding is strict: an order that is not understood
is refused with its field, and the others still count.
"""

import re
from typing import Final

import msgspec

MAX_ORDERS: Final = 64
_MAX_TEXT: Final = 256 * 1024
# A ConfigMap holds 1 MiB, for all nodes together.
_KEPT_TEXT: Final = 64 * 1024
MAX_SCENARIO: Final = 32 * 1024
_ID = re.compile(r"[a-z0-9-]{1,64}")


class FaultOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One order: exactly one of `xid` (make this XID happen), `recover` (undo what was done to the device) and
    `scenario` (play this fault scenario from now on).

    id: unique, so that an order is carried out once. device: DRA device name; "" with a scenario, which names GPUs by
    index. scenario: its text, YAML or JSON as in fake_gpus/faults. at: RFC 3339, when it was given.
    """

    id: str
    device: str = ""
    xid: int | None = None
    recover: bool = False
    scenario: str = ""
    at: str = ""

    def problem(self) -> str:
        """What is wrong with the order, or ""."""
        if not _ID.fullmatch(self.id):
            return f"id {self.id[:80]!r} is not 1 to 64 of a-z, 0-9 and -"
        if (self.xid is not None) + self.recover + bool(self.scenario) != 1:
            return f"order {self.id}: give one of xid, recover and scenario"
        if not self.device and not self.scenario:
            return f"order {self.id}: give a device"
        if len(self.scenario) > MAX_SCENARIO:
            return f"order {self.id}: the scenario is longer than {MAX_SCENARIO} characters"
        if self.xid is not None and not 1 <= self.xid <= 999:
            return f"order {self.id}: xid {self.xid} is not between 1 and 999"
        return ""


def parse_orders(text: str) -> tuple[list[FaultOrder], list[str]]:
    """Orders of one node and the problems with those that were refused. Never raises."""
    if len(text) > _MAX_TEXT:
        return [], [f"longer than {_MAX_TEXT} characters"]
    try:
        raw = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.MsgspecError as error:
        return [], [f"not a JSON list: {error}"]
    orders: list[FaultOrder] = []
    problems: list[str] = []
    for item in raw[-MAX_ORDERS:]:
        try:
            order = msgspec.json.decode(item, type=FaultOrder)
        except msgspec.MsgspecError as error:
            problems.append(str(error))
            continue
        if problem := order.problem():
            problems.append(problem)
        else:
            orders.append(order)
    return orders, problems


def encode_orders(orders: list[FaultOrder]) -> str:
    """The ConfigMap value; only the newest orders are kept, as many as fit."""
    kept = orders[-MAX_ORDERS:]
    while len(text := msgspec.json.encode(kept).decode()) > _KEPT_TEXT and len(kept) > 1:
        kept = kept[1:]
    return text

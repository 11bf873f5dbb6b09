"""What an administrator can set about health, with defaults that suit a shared training cluster."""

import msgspec


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times in seconds. Levels follow from the catalogue's actions; override the catalogue to change a code.

    hold_down_s: how long a fault's end must last before the device returns; doubled for each return to fault
    within flap_window_s, at most hold_down_max_s.
    repeat_count: so many different processes in repeat_window... on one GPU make XID 13 or 31 a matter for the
    board (same GPC and TPC for 13), not the program.
    prepare_failures: so many failed preparations in a row take a device out, for prepare_retry_s.
    remind_s: a harmless code that goes on is told about again after this time.
    """

    hold_down_s: float = 30.0
    hold_down_max_s: float = 3600.0
    flap_window_s: float = 86400.0
    repeat_count: int = 3
    prepare_failures: int = 3
    prepare_retry_s: float = 600.0
    remind_s: float = 3600.0

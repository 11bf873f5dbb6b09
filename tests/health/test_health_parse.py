"""Kernel log lines: each documented form, damaged ones, and the ordinary ones that must mean nothing."""

import random
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.health.parse import MAX_LINE, Pending, Record, parse, parse_record
from gpunode.health.signals import (
    DriverReloaded,
    FallenOffBus,
    GpuReset,
    RecoveryActionChanged,
    Signal,
    SxidSignal,
    XidSignal,
)
from gpunode.model.hardware import PciAddress
from gpunode.model.health import RecoveryAction as Recovery

GPU = PciAddress(0, 7, 0)
SWITCH = PciAddress(0, 0xC4, 0)
UUID = "GPU-5d5a1e0b-7b2c-4b5d-9c1e-8a3f0a2b4c6d"
X = "NVRM: Xid (PCI:0000:07:00"
NETIR = "NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x004505c6 0x00000000 0x0 0x0 0x0 0x0)"
WORDS = "Training Error, on link 4(0x0,0x0,0x10000,0x0,0x0,0x0,0x0)"

# What: line -> signal.
FORMS: dict[str, tuple[str, Signal]] = {
    "with process": (f"{X}): 13, pid=42, name=python3, Gr", XidSignal(GPU, 13, pid=42, process="python3", text="Gr")),
    "MIG": (f"{X} GPU-I:03 GPU-CI:01): 94, pid=1, name=a, C", XidSignal(GPU, 94, 3, 1, 1, "a", "C")),
    "GPU instance only": (f"{X} GPU-I:05): 31, pid=1, name=a, M", XidSignal(GPU, 31, 5, None, 1, "a", "M")),
    "8-digit domain": (
        "NVRM: Xid (PCI:00010000:0f:1e): 48, DBE",
        XidSignal(PciAddress(0x10000, 0x0F, 0x1E), 48, text="DBE"),
    ),
    "upper case": ("NVRM: Xid (PCI:0000:D9:00): 48, DBE", XidSignal(PciAddress(0, 0xD9, 0), 48, text="DBE")),
    "without PCI": ("NVRM: Xid (0000:07:00): 8, Channel 1", XidSignal(GPU, 8, text="Channel 1")),
    "with function": (f"{X}.0): 31, Ch 1", XidSignal(GPU, 31, text="Ch 1")),
    "quoted unknown": (f"{X}): 79, pid='<unknown>', name=<unknown>, off", XidSignal(GPU, 79, text="off")),
    "unknown pid only": (f"{X}): 79, pid=<unknown>, off", XidSignal(GPU, 79, text="off")),
    "no fields": (f"{X}): 79", XidSignal(GPU, 79, text="-")),
    "name ends the line": (f"{X}): 43, pid=7, name=x", XidSignal(GPU, 43, pid=7, process="x", text="-")),
    "name with spaces": (f"{X}): 43, pid=7, name=a b=c, t", XidSignal(GPU, 43, pid=7, process="a b=c", text="t")),
    "follows another": (
        f"{X}): 45, pid=7, name=x, Ch 0000000c caused by previous Xid 31",
        XidSignal(GPU, 45, pid=7, process="x", text="Ch 0000000c", previous=31),
    ),
    "NVLink 5": (f"{X}): 149, {NETIR}", XidSignal(GPU, 149, text=NETIR)),
    "NVLink 5 with process": (
        f"{X}): 149, pid=9, name=nccl, {NETIR}",
        XidSignal(GPU, 149, pid=9, process="nccl", text=NETIR),
    ),
    "NVLink": (f"{X}): 74, pid='<unknown>', name=<unknown>, {WORDS}", XidSignal(GPU, 74, text=WORDS)),
    "contained": (
        f"{X}): 94, pid=9, name=a, Contained: SM (0x1). RST: No, D-RST: No",
        XidSignal(GPU, 94, pid=9, process="a", text="Contained: SM (0x1). RST: No, D-RST: No"),
    ),
    "off the bus, GPU form": ("NVRM: GPU 0000:07:00.0: GPU has fallen off the bus.", FallenOffBus(GPU)),
    "switch, fatal": (
        "nvidia-nvswitch3: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        SxidSignal(SWITCH, 3, 20034, True, 30, "LTSSM Fault Up"),
    ),
    "switch, without link": (
        "nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 10003, Non-fatal, Host_priv_error",
        SxidSignal(SWITCH, 0, 10003, False, None, "Host_priv_error"),
    ),
    "reset": (f"GPU reset executed: {UUID}, success: true", GpuReset(UUID, True)),
    "reset failed": (f"GPU reset executed: {UUID}, success: false", GpuReset(UUID, False)),
    "open driver loaded": (
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)",
        DriverReloaded("580.95.05"),
    ),
    "driver loaded": (
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        DriverReloaded("550.54.15"),
    ),
}
RECOVERY_NAMES = {
    "None": Recovery.NONE,
    "GPU Reset Required": Recovery.GPU_RESET,
    "Node Reboot Required": Recovery.NODE_REBOOT,
    "Drain P2P": Recovery.DRAIN_P2P,
    "Drain and Reset": Recovery.DRAIN_AND_RESET,
    "Recover IMEX Domain": Recovery.RECOVER_IMEX,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "3,1234,987654321,-;",
        "6,12,987654321,-,caller=T1234;",
        "[  987.654321] ",
        "<3>[  987.654321] ",
        "[  987.654321][ T1234] ",
        "Nov 29 14:00:01 node-7 kernel: ",
        "Nov  9 14:00:01 node-7.example kernel: [  987.654321] ",
        "2026-11-29T14:00:01.123456+0000 node-7 kernel: ",
        "2026-11-29T14:00:01+00:00 node-7 kernel: [  987.654321] ",
    ],
)
def test_every_form_behind_every_prefix(form: str, prefix: str) -> None:
    line, signal = FORMS[form]
    record = parse_record(prefix + line + "\n")
    assert parse(record.text) == ((signal,), Pending())
    if "987" in prefix:
        assert record.uptime == 987.654321


@pytest.mark.parametrize("name", RECOVERY_NAMES)
def test_recovery_action(name: str) -> None:
    text = f"{X}): 154, pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x1 ({name})"
    assert parse(text)[0] == (RecoveryActionChanged(GPU, Recovery.NONE, RECOVERY_NAMES[name]),)


def test_a_154_that_cannot_be_read_stays_an_xid() -> None:
    assert parse(f"{X}): 154, something else")[0] == (XidSignal(GPU, 154, text="something else"),)


def test_a_verdict_in_words_of_another_driver_is_known_by_its_number() -> None:
    text = "GPU recovery action changed from 0x0 (None) to 0x{} (Reset The Card Please)"
    assert parse(f"{X}): 154, {text.format(1)}")[0] == (RecoveryActionChanged(GPU, Recovery.NONE, Recovery.GPU_RESET),)
    assert parse(f"{X}): 154, {text.format(7)}")[0] == (
        RecoveryActionChanged(GPU, Recovery.NONE, Recovery.SYSTEM_REBOOT),
    )
    unknown = text.format("8")
    assert parse(f"{X}): 154, {unknown}")[0] == (XidSignal(GPU, 154, text=unknown),)


OFF_BUS = (
    "NVRM: The NVIDIA GPU 0000:07:00.0",
    "NVRM: (PCI ID: 10de:2330) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


def feed(lines: tuple[str, ...]) -> list[Signal]:
    found: list[Signal] = []
    pending = Pending()
    for line in lines:
        signals, pending = parse(line, pending)
        found += signals
    return found


def test_fallen_off_the_bus_in_three_records_even_with_others_between() -> None:
    between = ("e1000e: link is up", *OFF_BUS[1:])
    assert feed((OFF_BUS[0], *between)) == [FallenOffBus(GPU)]
    assert feed((OFF_BUS[0], *["e1000e: link is up"] * 20, *OFF_BUS[1:])) == []
    assert feed(OFF_BUS[1:]) == []


def test_fallen_off_the_bus_in_one_record() -> None:
    record = parse_record("3,5,6,-;" + "\\x0a".join(OFF_BUS) + "\n SUBSYSTEM=pci\n")
    for text in (record.text, "\n".join(OFF_BUS)):
        assert parse(text) == ((FallenOffBus(GPU),), Pending())


FORGED = [
    f"EXT4-fs: bad file a\n{X}): 79, off",
    f"EXT4-fs: bad file a\\x0a{X}): 79, off",
    f"NVRM: GPU note\\x0a{X}): 79, off",
]


@pytest.mark.parametrize("text", FORGED)
def test_a_name_with_a_newline_in_it_forges_nothing(text: str) -> None:
    """Nor do the characters of an escape, which the kernel escapes once more."""
    assert parse(text)[0] == ()
    assert parse(parse_record(f"3,5,6,-;{printed(text)}\n").text)[0] == ()


@pytest.mark.parametrize("newline", ["\n", "\\x0a"])
@pytest.mark.parametrize("more", [f"{X}): 79, off", *OFF_BUS, "GPU reset executed: GPU-x"])
def test_the_name_in_an_xid_forges_nothing(newline: str, more: str) -> None:
    for forged in (parse_record(f"{X}): 13, pid=5, name=a{newline}{more}, Ch 8").text, f"{X}): 13, pid=5\n{more}"):
        signals, pending = parse(forged)
        assert [signal.code for signal in signals if isinstance(signal, XidSignal)] == [13]
        assert (len(signals), pending) == (1, Pending())


def test_a_driver_record_of_several_lines_is_read_to_its_xid() -> None:
    assert parse(f"NVRM: GPU note\n{X}): 79, off\n{X}): 48, more")[0] == (XidSignal(GPU, 79, text="off"),)


def printed(text: str) -> str:
    """A text as /dev/kmsg shows it."""
    return "".join(c if " " <= c < "\x7f" and c != "\\" else "".join(f"\\x{b:02x}" for b in c.encode()) for c in text)


def test_an_unsupported_board_is_not_off_the_bus() -> None:
    assert feed((OFF_BUS[0], OFF_BUS[1].replace("has", "is not"), "NVRM: supported by the driver")) == []


def test_record_fields() -> None:
    assert parse_record("30,7,8000000,-;hello\n KEY=v\n") == Record("hello", 8.0, 7, 6)
    assert parse_record("hello; 1,2,3") == Record("hello; 1,2,3")


ORDINARY = (Path(__file__).parent / "ordinary_kernel_lines.txt").read_text().splitlines()


@pytest.mark.parametrize("line", ORDINARY)
def test_an_ordinary_line_gives_nothing(line: str) -> None:
    for prefix in ("", "6,1,1,-;", "[    1.000001] ", "Nov 29 14:00:01 node-7 kernel: "):
        assert parse(parse_record(prefix + line).text)[0] == ()


def test_ordinary_lines_in_a_row_give_nothing() -> None:
    assert len(ORDINARY) > 60
    assert feed(tuple(ORDINARY)) == []


@given(st.text(max_size=300))
def test_any_text_is_survived(text: str) -> None:
    parse(parse_record(text).text, Pending(GPU, 3))


@given(st.sampled_from(sorted(FORMS)), st.text(max_size=40), st.integers(0, 200))
def test_text_put_into_a_line_is_survived(form: str, text: str, at: int) -> None:
    line = FORMS[form][0]
    parse(parse_record(line[:at] + text + line[at:]).text)


def mutations(seed: int, count: int) -> None:
    """Mutate lines of every kind: nothing may raise, and an ordinary line may not become a fault."""
    chance = random.Random(seed)
    forms = [line for line, _ in FORMS.values()]
    letters = string.printable + "\x00é\u0660"
    for _ in range(count):
        ordinary = chance.random() < 0.5
        line = list(chance.choice(ORDINARY if ordinary else forms))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(line) + 1)
            line[at : at + chance.randint(0, 3)] = chance.choices(letters, k=chance.randint(0, 3))
        signals, _ = parse(parse_record("".join(line)).text)
        assert not (ordinary and signals), line


@pytest.mark.parametrize("seed", range(4))
def test_mutated_lines(seed: int) -> None:
    mutations(seed, 2500)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_a_million_mutated_lines(seed: int) -> None:
    mutations(1000 + seed, 100_000)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:" + "0" * 100_000,
        f"{X}): 13, pid=1, name=" + "a, " * 50_000,
        f"{X}): 45, " + " caused by previous Xid 3" * 20_000,
        f"{X}): 154, " + "GPU recovery action changed from 0x1 (" * 10_000,
        "NVRM: loading NVIDIA UNIX " + "x86_64 " * 50_000,
        "1,1,1," + "-" * 100_000,
        "\\x0a" * 50_000,
    ],
)
def test_long_lines_are_cut(line: str) -> None:
    record = parse_record(line)
    assert len(record.text) <= MAX_LINE
    parse(record.text)
    parse(line)

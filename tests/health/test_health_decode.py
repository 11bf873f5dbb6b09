"""Details of NVLink and NVSwitch errors: each row, each bit, each code."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.health.decode import SxidClass, link_tables, nvlink4, nvlink5, sxid_class, sxid_classes
from gpunode.health.devices import DeviceMap
from gpunode.health.machine import HealthMachine
from gpunode.health.signals import Signal, XidSignal
from gpunode.health.state import HealthState, Instant
from gpunode.model.hardware import PciAddress, device_name
from gpunode.model.health import Action, Level

A = PciAddress(0, 7, 0)
ROWS = [
    line.split()
    for line in (Path(__file__).parent / "nvlink5_rows.txt").read_text().splitlines()
    if not line.startswith("#")
]
WANT = {"none": Action.NONE, "reset": Action.RESET_GPU, "verdict": Action.RESTART_APP}


def words(unit: str, info: str, status: str, severity: str = "Nonfatal") -> str:
    return f"{unit} {severity} XC0 i0 Link 03 ({info} {status} 0x00000000 0x00000000 0x00000000 0x00000000)"


def test_there_are_as_many_rows_as_in_the_table() -> None:
    assert len(ROWS) == len(link_tables().nvlink5) == 95


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:5]))
def test_every_row_for_both_driver_layouts(row: list[str]) -> None:
    xid, units, old, new, status, action = row[:6]
    old_unit, new_unit = units.split("/")[0], units.split("/")[-1]
    statuses = ["0x00000000", "0x00000001", "0xffffffff"] if status == "*" else [status]
    for one in statuses:
        for branch, unit, info in ((570, old_unit, old), (575, new_unit, new), (580, new_unit, new), (570, units, old)):
            details = nvlink5(int(xid), words(unit, info, one), branch)
            assert details is not None
            assert details.action is WANT[action], (branch, unit)
            assert details.link == 3 and details.text.startswith(f"{unit} on link 3")


@pytest.mark.parametrize("row", [row for row in ROWS if len(row) > 6], ids=lambda row: "-".join(row[:5]))
def test_promotion(row: list[str]) -> None:
    xid, unit, _, _, status, _, old, new, action = row
    for branch, info in ((570, old), (574, old), (575, new), (580, new), (None, old), (None, new)):
        details = nvlink5(int(xid), words(unit, info, status), branch)
        assert details is not None and details.action is WANT[action]


def test_bits_above_the_table_do_not_matter() -> None:
    details = nvlink5(145, words("RLW_REMAP", hex(0x82 | 0xFC000000 | 0xFFC00), "0x40"), 570)
    assert details is not None and details.action is Action.RESET_GPU


def test_an_unknown_driver_takes_the_worse_meaning() -> None:
    for info in ("0x00000082", "0x00000004"):
        details = nvlink5(145, words("RLW_REMAP", info, "0x40"), None)
        assert details is not None and details.action is Action.RESET_GPU


def test_several_bits_of_status_are_several_errors() -> None:
    details = nvlink5(145, words("RLW_REMAP", "0x4", "0x141"), 580)
    assert details is not None and details.action is Action.RESET_GPU
    details = nvlink5(145, words("RLW_REMAP", "0x4", "0x101"), 580)
    assert details is not None and details.action is Action.RESTART_APP


@pytest.mark.parametrize(("severity", "action"), [("Fatal", Action.RESET_GPU), ("Nonfatal", Action.NONE)])
def test_a_row_that_is_missing_is_judged_by_its_word(severity: str, action: Action) -> None:
    details = nvlink5(147, words("NEW_UNIT", "0x0", "0x1", severity), 600)
    assert details is not None
    assert details.action is action and "not in the tables" in details.text


@pytest.mark.parametrize("text", ["", "SAW_MVB", "SAW_MVB Fatal XC0 i0 Link 03", "x" * 5000, "A/" * 2000])
def test_other_text_has_no_details(text: str) -> None:
    assert nvlink5(144, text, 580) is None
    assert nvlink4(text) is None


# XID 74 by hand: word -> bit -> (action at first, action when it repeats on one link). Every other bit of these
# words is in no table and asks for a reset.
N, R, I = Action.NONE, Action.RESET_GPU, Action.INSPECT  # noqa: E741
ECC, HARD, SIGNAL, REPEAT, QUIET = (N, R), (R, None), (I, None), (N, I), (N, None)
BITS = {
    1: {4: ECC, 5: ECC, **dict.fromkeys((8, 9, 12, 16, 17, 24, 28), HARD), 21: SIGNAL, 22: SIGNAL, 27: REPEAT,
        29: REPEAT, **dict.fromkeys((0, 23, 30, 1, 20), QUIET)},
    3: {**dict.fromkeys((0, 1, 2, 6), ECC), 16: SIGNAL, 19: SIGNAL, 17: REPEAT, 18: REPEAT},
    4: {16: QUIET, 17: QUIET, 18: HARD},
    5: {**dict.fromkeys((18, 19, 21, 22, 24, 25, 27, 28), ECC), **dict.fromkeys((20, 23, 26, 29), QUIET)},
}  # fmt: skip


def xid74(word: int, bit: int, link: int = 4) -> str:
    values = ["0x0"] * 7
    values[word - 1] = hex(1 << bit)
    return f"NVLink: fatal error detected on link {link}({', '.join(values)})"


@pytest.mark.parametrize(("word", "bit"), list(product((1, 3, 4, 5), range(32))))
def test_every_bit_of_xid_74(word: int, bit: int) -> None:
    details = nvlink4(xid74(word, bit))
    assert details is not None
    assert (details.action, details.repeated) == BITS[word].get(bit, HARD)
    assert details.link == 4


def test_words_without_a_verdict() -> None:
    for word in (2, 6, 7):
        assert nvlink4(xid74(word, 3)) is None


def test_the_worst_bit_of_xid_74_counts() -> None:
    details = nvlink4("NVLink: error on link 11(0x100010,0x0,0x0,0x0,0x40000,0x0,0x0)")
    assert details is not None
    assert (details.action, details.repeated, details.link) == (N, R, 11)


ALWAYS = {12020, 22003, 22011, *range(23001, 23018)}
FATAL = {11001, 11009, 11013, 11018, 11019, 11020, 12001, 12002, 12022, *range(12024, 12028), *range(12030, 12033)}
FATAL |= {14017, 15001, 15006, 15009, 15010, 15012, 15013, 19047, 19048, 19054, 19056, 19058, 19060, 19061, 19063}
FATAL |= {19064, 19066, 19067, 19069, 19070, 20034, *range(24004, 24008)}
HOST = {*range(10001, 10006), 22012}


@pytest.mark.parametrize("code", sorted(ALWAYS | FATAL | HOST | {11004, 12021, 12028, 19084, 20001, 29999}))
def test_switch_errors(code: int) -> None:
    if code in ALWAYS:
        expected = (SxidClass.ALWAYS_FATAL, SxidClass.ALWAYS_FATAL)
    elif code in HOST:
        expected = (SxidClass.ALWAYS_FATAL, SxidClass.HOST)
    else:
        expected = (SxidClass.FATAL, SxidClass.NOTE)
    assert (sxid_class(code, fatal=True), sxid_class(code, fatal=False)) == expected


def test_switch_table_is_complete() -> None:
    kinds = {kind: {c for c, k in sxid_classes().items() if k is kind} for kind in SxidClass}
    assert (kinds[SxidClass.ALWAYS_FATAL], kinds[SxidClass.FATAL], kinds[SxidClass.HOST]) == (ALWAYS, FATAL, HOST)


class Gpu:
    def __init__(self, branch: int | None = 580) -> None:
        self.machine, self.state, self.now = HealthMachine(), HealthState(), 100.0
        self.map, self.log = DeviceMap(driver_branch=branch), []

    def feed(self, *signals: Signal, after: float = 0.1) -> Level:
        self.now += after
        step = self.machine.step(self.state, signals, self.map, Instant(1e9 + self.now, self.now))
        self.state = step.state
        self.log += [(t.code, t.change, t.level) for t in step.transitions]
        return self.machine.project(self.state, self.map).of(device_name(A)).level


KERNEL_BAD = XidSignal(A, 145, text=words("RLW_REMAP", "0x4", "0x40", "Fatal"))
KERNEL_GOOD = XidSignal(A, 145, text=words("RLW_REMAP", "0x4", "0x100"))
NVML = XidSignal(A, 145)


@pytest.mark.parametrize("order", [(NVML, KERNEL_BAD), (KERNEL_BAD, NVML)])
def test_details_decide_whichever_source_is_first(order: tuple[Signal, Signal]) -> None:
    for branch in (580, None):
        gpu = Gpu(branch)
        gpu.feed(order[0])
        assert gpu.feed(order[1]) is Level.UNHEALTHY
        gpu.feed(after=10)
        assert gpu.log == [("145", "raised", Level.UNHEALTHY)]


@pytest.mark.parametrize("order", [(NVML, KERNEL_GOOD), (KERNEL_GOOD, NVML)])
def test_a_harmless_one_never_taints_for_a_moment(order: tuple[Signal, Signal]) -> None:
    gpu = Gpu()
    for signal in order:
        assert gpu.feed(signal) is Level.HEALTHY
    assert gpu.feed(after=10) is Level.HEALTHY
    assert gpu.log == [("145", "noted", Level.HEALTHY)]


def test_without_a_kernel_log_the_bare_code_counts_after_a_moment() -> None:
    gpu = Gpu()
    assert gpu.feed(NVML) is Level.HEALTHY
    assert gpu.feed(after=2) is Level.DEGRADED
    assert gpu.feed(XidSignal(A, 74)) is Level.DEGRADED
    assert gpu.feed(after=2) is Level.UNHEALTHY


def test_a_harmless_one_does_not_end_a_fault() -> None:
    gpu = Gpu()
    gpu.feed(KERNEL_BAD)
    assert gpu.feed(KERNEL_GOOD, after=5) is Level.UNHEALTHY


def test_a_link_whose_errors_repeat() -> None:
    gpu = Gpu()
    other = XidSignal(A, 74, text=xid74(1, 4, link=5))
    again = XidSignal(A, 74, text=xid74(1, 4))
    levels = [gpu.feed(signal, after=60) for signal in (again, other, again, other, again)]
    assert levels == [Level.HEALTHY] * 4 + [Level.UNHEALTHY]


def test_a_user_who_reclassifies_a_code_is_obeyed() -> None:
    from gpunode.health.catalogue import builtin_catalogue, parse_overrides

    gpu = Gpu()
    text = "xids: [{code: 145, class: ignore, action: none}]"
    gpu.machine = HealthMachine(parse_overrides(text, builtin_catalogue()))
    assert gpu.feed(KERNEL_BAD) is Level.HEALTHY


@given(st.text(max_size=200), st.integers(144, 150), st.sampled_from([None, 570, 580]))
def test_any_text_is_survived(text: str, xid: int, branch: int | None) -> None:
    nvlink5(xid, text, branch)
    nvlink4(text)


@given(
    st.integers(144, 150),
    st.sampled_from([row[1] for row in ROWS]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, 570, 580]),
)
def test_any_words_give_an_action(xid: int, unit: str, info: int, status: int, branch: int | None) -> None:
    details = nvlink5(xid, words(unit, hex(info), hex(status)), branch)
    assert details is not None and details.text
    assert replace(details, action=Action.NONE).link == 3


SIGNAL_74 = XidSignal(A, 74, text=xid74(1, 21))
HARDWARE_74 = XidSignal(A, 74, text=xid74(1, 8))


def test_a_bare_code_adds_nothing_to_what_details_said() -> None:
    gpu = Gpu()
    assert gpu.feed(SIGNAL_74) is Level.DEGRADED
    assert gpu.feed(XidSignal(A, 74)) is Level.DEGRADED
    assert gpu.feed(XidSignal(A, 74), after=60) is Level.DEGRADED


def test_worse_details_are_believed_and_better_ones_are_not() -> None:
    gpu = Gpu()
    assert [gpu.feed(s) for s in (SIGNAL_74, HARDWARE_74, SIGNAL_74)] == [
        Level.DEGRADED,
        Level.UNHEALTHY,
        Level.UNHEALTHY,
    ]
    assert [change for _, change, _ in gpu.log] == ["raised", "changed"]


def test_details_that_come_late_correct_the_bare_code_in_both_directions() -> None:
    gpu = Gpu()
    gpu.feed(XidSignal(A, 74))
    assert gpu.feed(after=5) is Level.UNHEALTHY
    assert gpu.feed(SIGNAL_74) is Level.DEGRADED
    assert gpu.feed(XidSignal(A, 74), after=5) is Level.DEGRADED


def test_different_details_in_one_batch_are_all_looked_at() -> None:
    gpu = Gpu()
    assert gpu.feed(SIGNAL_74, HARDWARE_74) is Level.UNHEALTHY
    links = [XidSignal(A, 74, text=xid74(1, 4, link)) for link in range(18)]
    gpu.feed(*links, *links)
    assert {code for code in gpu.state.devices[device_name(A)].notes} == {f"74-link-{link}" for link in range(18)}

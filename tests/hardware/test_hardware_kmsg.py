"""The kernel log reader: on a regular file (replay, growth, truncation, replacement, damage) and on a device."""

import asyncio
import errno
import os
import pty
import termios
import tty
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.hardware import kmsg
from gpunode.hardware.stream import ThreadStream
from gpunode.health.parse import Pending, parse
from gpunode.model.kmsg import KernelRecord, parse_record


async def take(stream: ThreadStream[KernelRecord], count: int) -> list[str]:
    return [(await asyncio.wait_for(anext(stream), 5)).text for _ in range(count)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("3,17,1234,-;NVRM: Xid", KernelRecord(17, 1234, "NVRM: Xid", 3)),
        ("6,1,2,-,caller=T1;a;b", KernelRecord(1, 2, "a;b", 6)),
        ("30,1,2,c;a\\x0ab\\x5cx0a \\xc3\\xbc\\xff\n KEY=v", KernelRecord(1, 2, "a\nb\\x0a ü\ufffd", 6)),
        ("4,1,2,-;\\x0A \\xg0 \\x", KernelRecord(1, 2, "\\x0A \\xg0 \\x", 4)),
        (" SUBSYSTEM=pci", None),
        (" KEY=1,2,3,4;x", None),
        ("", None),
        ("x,1,2,-;t", None),
        ("3,1,2;t", None),
        ("3,-1,2,-;t", None),
        ("3," + "9" * 40 + ",2,-;t", None),
    ],
)
def test_record_forms(line: str, expected: KernelRecord | None) -> None:
    assert parse_record(line) == expected


@given(st.text())
def test_any_text_is_read_or_ignored(line: str) -> None:
    record = parse_record(line)
    assert record is None or record.seq >= 0


async def test_follows_from_the_start_and_on(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    async with kmsg.follow(log) as stream:
        await asyncio.sleep(0.05)  # not there yet
        log.write_text("3,0,1,-;one\n SUBSYSTEM=pci\n3,1,2,-;two\n3,2,3,-;thr")
        assert await take(stream, 2) == ["one", "two"]
        with log.open("a") as file:
            file.write("ee\n")
        assert await take(stream, 1) == ["three"]


async def test_replayed_records_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,4,1,-;old\n3,5,2,-;new\n")
    async with kmsg.follow(log, after=4) as stream:
        assert await take(stream, 1) == ["new"]
        log.unlink()
        await asyncio.sleep(0.3)
        log.write_text("3,0,1,-;of the next boot\n")
        assert await take(stream, 1) == ["of the next boot"]


async def test_many_waiting_records_are_all_read(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("".join(f"3,{i},1,-;{i}\n" for i in range(20_000)))
    async with kmsg.follow(log, limit=50_000) as stream:
        assert await take(stream, 20_000) == [str(i) for i in range(20_000)]


async def test_a_log_that_begins_anew_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,0,1,-;a\n3,1,2,-;b\n3,2,2,-;c\n")
    async with kmsg.follow(log) as stream:
        assert await take(stream, 3) == ["a", "b", "c"]
        log.write_text("3,0,1,-;short\n")
        assert await take(stream, 1) == ["short"]
        log.unlink()
        await asyncio.sleep(0.2)
        log.write_text("3,0,1,-;another file\n")
        assert await take(stream, 1) == ["another file"]


async def test_endless_line_and_bytes_of_any_kind_do_not_stop_the_reader(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(b"3,0,1,-;" + b"x" * 300_000 + b"\n\xff\xfe\x00\n3,1,2,-;after \xff\n")
    async with kmsg.follow(log) as stream:
        assert (await take(stream, 1))[0].startswith("after")


async def test_the_oldest_are_dropped_when_nobody_reads(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("".join(f"3,{i},1,-;{i}\n" for i in range(100)))
    async with kmsg.follow(log, limit=10) as stream:
        while stream.dropped < 90:
            await asyncio.sleep(0.01)
        assert await take(stream, 10) == [str(i) for i in range(90, 100)]


async def test_cancelled_reader_leaves_the_stream_usable(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("")
    async with kmsg.follow(log) as stream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        log.write_text("3,0,1,-;later\n")
        assert await take(stream, 1) == ["later"]


@pytest.fixture
def terminal() -> Iterator[tuple[int, Path]]:
    """A character device that gives one line a read, as /dev/kmsg gives one record; and where its lines are put in."""
    master, slave = pty.openpty()
    tty.setcbreak(slave)
    settings = termios.tcgetattr(slave)
    settings[3] = settings[3] & ~termios.ECHO | termios.ICANON
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    yield master, Path(os.ttyname(slave))
    os.close(master)
    os.close(slave)


async def test_a_device_gives_a_record_a_read(terminal: tuple[int, Path]) -> None:
    lines, path = terminal
    async with kmsg.follow(path, after=4) as stream:
        os.write(lines, b"3,4,1,-;known\n3,5,2,-;first\n")
        assert await take(stream, 1) == ["first"]
        os.write(lines, b"no record\n3,6,3,-;a\\x0ab\n")
        assert await take(stream, 1) == ["a\nb"]


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EINVAL, errno.EAGAIN, errno.EIO])
async def test_a_device_that_fails_once_is_read_on(
    terminal: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """EPIPE: the ring overran; EINVAL: too long a record; EAGAIN: nothing there after all; others: opened anew."""
    lines, path = terminal
    real, failures = os.read, [number]

    def read(descriptor: int, size: int) -> bytes:
        if descriptor != lines and failures:
            raise OSError(failures.pop(), os.strerror(number))
        return real(descriptor, size)

    monkeypatch.setattr(kmsg.os, "read", read)
    os.write(lines, b"3,7,1,-;after it\n")
    async with kmsg.follow(path) as stream:
        assert await take(stream, 1) == ["after it"]
    assert not failures


async def test_this_machines_own_log_is_read_and_has_no_fault_in_it() -> None:
    path = Path("/dev/kmsg")
    try:
        with path.open("rb", buffering=0) as log:
            os.set_blocking(log.fileno(), False)
            if not path.is_char_device() or not log.read(8192):
                pytest.skip("/dev/kmsg is no kernel log here")
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be read here: {error}")
    records = []
    async with kmsg.follow(path) as stream:
        with suppress(TimeoutError):
            while len(records) < 500:
                records.append(await asyncio.wait_for(anext(stream), 0.5))
    sequences = [record.seq for record in records]
    assert sequences == sorted(set(sequences)) and len(sequences) > 0
    if not Path("/proc/driver/nvidia").exists():
        pending = Pending()
        for record in records:
            signals, pending = parse(record.text, pending)
            assert not signals, record

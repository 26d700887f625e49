from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import ConfigError
from edge.publish.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOMY = 1_000_000


def fill(outbox: Outbox, *payloads: str) -> None:
    for payload in payloads:
        outbox.append("edge/dev/s/results", payload.encode())


def contents(outbox: Outbox) -> list[str]:
    return [entry.payload.decode() for entry in outbox.oldest(1000)]


@pytest.fixture(params=["memory", "disk", "disk, flushed"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Outbox]:
    """An outbox that holds a, b and c."""
    with Outbox(None if request.param == "memory" else tmp_path / "outbox.db", max_bytes=ROOMY) as opened:
        fill(opened, "a", "b", "c")
        if "flushed" in request.param:
            opened.flush()
        yield opened


def test_entries_come_in_order_and_go_when_they_are_acknowledged(outbox: Outbox) -> None:
    first, second, _ = outbox.oldest(3)
    outbox.ack(second)

    assert contents(outbox) == ["a", "c"]
    assert len(outbox) == 2

    outbox.flush()
    outbox.ack(first)
    fill(outbox, "d")

    assert contents(outbox) == ["c", "d"]
    assert [entry.payload for entry in outbox.oldest(1, after=first.seq)] == [b"c"]
    assert outbox.oldest(5, after=outbox.last_seq) == []


def test_order_spans_what_is_on_disk_and_what_is_still_in_memory(tmp_path: Path) -> None:
    with Outbox(tmp_path / "outbox.db", max_bytes=ROOMY) as outbox:
        fill(outbox, "a", "b")
        outbox.flush()
        fill(outbox, "c", "d")

        assert contents(outbox) == ["a", "b", "c", "d"]
        assert [entry.payload for entry in outbox.oldest(2, after=outbox.oldest(1)[0].seq)] == [b"b", b"c"]


def test_what_is_not_acknowledged_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "outbox.db"
    with Outbox(path, max_bytes=ROOMY) as outbox:
        fill(outbox, "a", "b", "c")
        outbox.ack(outbox.oldest(1)[0])

    with Outbox(path, max_bytes=ROOMY) as outbox:
        fill(outbox, "d")

        assert contents(outbox) == ["b", "c", "d"]
        assert outbox.location == str(path)


def test_what_was_flushed_survives_a_crash(tmp_path: Path) -> None:
    path, copy = tmp_path / "outbox.db", tmp_path / "crashed"
    copy.mkdir()
    with Outbox(path, max_bytes=ROOMY) as outbox:
        fill(outbox, "a", "b")
        outbox.flush()
        fill(outbox, "c")
        for file in tmp_path.glob("outbox.db*"):  # the database and its log, as a killed process leaves them
            (copy / file.name).write_bytes(file.read_bytes())

    with Outbox(copy / "outbox.db", max_bytes=ROOMY) as outbox:
        assert contents(outbox) == ["a", "b"]


def test_a_result_that_is_acknowledged_before_the_flush_never_touches_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path, max_bytes=ROOMY) as outbox:
        log = path.with_name("outbox.db-wal")
        before = (path.stat().st_mtime_ns, log.stat().st_size)
        for _ in range(100):
            fill(outbox, "x" * 600)
            outbox.ack(outbox.oldest(1)[0])
            outbox.flush()

        assert (path.stat().st_mtime_ns, log.stat().st_size) == before


@pytest.mark.parametrize("flushed", [False, True])
def test_beyond_the_bound_the_oldest_go_and_are_counted(tmp_path: Path, flushed: bool) -> None:
    with Outbox(tmp_path / "outbox.db", max_bytes=1000) as outbox:
        for index in range(10):
            fill(outbox, f"{index}" * 150)  # 200 bytes each, with topic and overhead
            if flushed:
                outbox.flush()

        assert [text[0] for text in contents(outbox)] == ["5", "6", "7", "8", "9"]
        assert outbox.dropped == 5
        assert len(outbox) == 5

    with Outbox(tmp_path / "outbox.db", max_bytes=1000) as outbox:
        assert [text[0] for text in contents(outbox)] == ["5", "6", "7", "8", "9"]


def test_an_entry_that_was_dropped_while_it_was_in_flight_can_still_be_acknowledged(tmp_path: Path) -> None:
    with Outbox(tmp_path / "outbox.db", max_bytes=1000) as outbox:
        fill(outbox, "a" * 150)
        in_flight = outbox.oldest(1)[0]
        for index in range(5):
            fill(outbox, f"{index}" * 150)
            outbox.flush()
        outbox.ack(in_flight)

        assert len(outbox) == 5
        assert [text[0] for text in contents(outbox)] == ["0", "1", "2", "3", "4"]


def test_a_message_beyond_the_whole_bound_is_dropped() -> None:
    with Outbox(None, max_bytes=100) as outbox:
        fill(outbox, "x" * 200)

        assert (len(outbox), outbox.dropped) == (0, 1)


@pytest.mark.parametrize("damage", [b"this is no database" * 500, b"SQLite format 3\0" + b"\xff" * 9000])
def test_a_damaged_file_is_moved_aside_and_a_new_one_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    path = tmp_path / "outbox.db"
    path.write_bytes(damage)

    with Outbox(path, max_bytes=ROOMY) as outbox:
        fill(outbox, "a")

    with Outbox(path, max_bytes=ROOMY) as outbox:
        assert contents(outbox) == ["a"]
    assert (tmp_path / "outbox.db.damaged").read_bytes() == damage
    assert caplog.text.count("is damaged") == 1


def test_a_file_that_is_damaged_while_it_is_used_costs_only_what_was_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path, max_bytes=8 * ROOMY) as outbox:  # more than SQLite's cache of 2 MB holds
        fill(outbox, *(f"{index:4000}" for index in range(1500)))
    with Outbox(path, max_bytes=8 * ROOMY) as outbox:
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * 4_000_000)
        fill(outbox, "new")
        read = contents(outbox)
        outbox.flush()
        fill(outbox, "newer")

        assert read[-1:] == ["new"]
        assert contents(outbox) == ["new", "newer"]
        assert len(outbox) == 2
    assert caplog.text.count("is damaged") == 1


def test_a_file_of_a_later_version_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "outbox.db"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 7")
    database.close()

    with Outbox(path, max_bytes=ROOMY) as outbox:
        fill(outbox, "a")

    assert "written in format 7" in caplog.text


def test_a_place_that_cannot_be_written_means_memory_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")

    with Outbox(tmp_path / "file" / "outbox.db", max_bytes=ROOMY) as outbox:
        fill(outbox, "a")
        outbox.flush()

        assert contents(outbox) == ["a"]
        assert outbox.location == "memory"
    assert caplog.text.count("results wait in memory only") == 1


def test_a_second_owner_is_kept_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path, max_bytes=ROOMY) as first, Outbox(path, max_bytes=ROOMY) as second:
        fill(first, "a")
        fill(second, "b")

        assert second.location == "memory"
        assert "database is locked" in caplog.text
    with Outbox(path, max_bytes=ROOMY) as outbox:
        assert contents(outbox) == ["a"]


def test_a_full_disk_means_memory_until_there_is_room_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = tmp_path / "outbox.db"
    try:
        with Outbox(path, max_bytes=ROOMY) as outbox:
            fill(outbox, "on disk")
            outbox.flush()
            size = max(file.stat().st_size for file in tmp_path.iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, limits[1]))
            fill(outbox, *(f"{index:1000}" for index in range(100)))
            for _ in range(3):
                outbox.flush()

            troubled = [outbox.troubled]
            assert len(outbox) == len(contents(outbox)) == 101

            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            outbox.flush()

            assert [*troubled, outbox.troubled] == [True, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caplog.text.count("results wait in memory until it can be written again") == 1
    with Outbox(path, max_bytes=ROOMY) as outbox:
        assert len(contents(outbox)) == 101


def test_what_a_full_disk_did_not_take_by_the_end_is_counted_as_lost(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = tmp_path / "outbox.db"
    outbox = Outbox(path, max_bytes=ROOMY)
    try:
        with outbox:
            fill(outbox, "on disk")
            outbox.flush()
            size = max(file.stat().st_size for file in tmp_path.iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, limits[1]))
            fill(outbox, *(f"{index:1000}" for index in range(100)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)

    assert (len(outbox), outbox.dropped) == (1, 100)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("deliver"), st.integers(1, 5)),
        st.tuples(st.just("lose connection"), st.just(0)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(steps)
def test_each_entry_is_delivered_at_least_once_and_first_in_order_whatever_happens_between(
    actions: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outbox.db"
        outbox = Outbox(path, max_bytes=ROOMY)
        delivered: list[int] = []
        appended = sent = 0

        def deliver(limit: int, lose_every: int) -> None:
            """Send a window; every so many acknowledgements never arrive."""
            nonlocal sent
            for entry in outbox.oldest(limit, after=sent):
                sent = entry.seq
                delivered.append(int(entry.payload))
                if len(delivered) % lose_every:
                    outbox.ack(entry)

        for action, amount in actions:
            if action == "append":
                fill(outbox, *map(str, range(appended, appended + amount)))
                appended += amount
            elif action == "deliver":
                deliver(amount, 3)
            elif action == "lose connection":
                sent = 0
            elif action == "flush":
                outbox.flush()
            else:
                outbox.close()
                outbox = Outbox(path, max_bytes=ROOMY)
                sent = 0
        sent = 0
        while len(outbox):
            sent = 0
            deliver(5, 7)
        outbox.close()

        first_time = list(dict.fromkeys(delivered))
        assert first_time == list(range(appended))


def test_a_file_of_another_kind_is_not_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("version: 1")

    def use() -> None:
        with Outbox(path, max_bytes=1000):
            pass

    with pytest.raises(ConfigError, match=r"mqtt\.outbox\.path: .*deployment\.yaml: is a file of another kind"):
        use()

    assert path.read_text() == "version: 1"


@pytest.fixture
def file_limit() -> Iterator[Callable[[int | None], None]]:
    """Sets how long files may become, which SQLite takes for a full disk; None lifts the limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def set_limit(size_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0] if size_bytes is None else size_bytes, limits[1]))

    yield set_limit
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system; a limit on file sizes stands in for it elsewhere")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def check_that_what_the_disk_does_not_take_waits_in_memory_and_then_goes_oldest_first(
    path: Path, fill_disk: Callable[[], object], make_room: Callable[[], None]
) -> None:
    with Outbox(path, max_bytes=100_000) as outbox:
        fill(outbox, *(f"{index:1000}" for index in range(20)))
        outbox.flush()
        fill_disk()
        fill(outbox, *(f"{index:1000}" for index in range(20, 60)))
        outbox.flush()

        troubled = [outbox.troubled]
        assert [int(text) for text in contents(outbox)] == list(range(60))

        fill(outbox, *(f"{index:1000}" for index in range(60, 120)))
        outbox.flush()
        kept = [int(text) for text in contents(outbox)]
        assert kept == list(range(120 - len(kept), 120))
        assert len(outbox) == outbox.results == len(kept)
        assert outbox.dropped == 120 - len(kept) > 0
        for entry in outbox.oldest(5):
            assert outbox.ack(entry)

        make_room()
        outbox.flush()
        assert [*troubled, outbox.troubled] == [True, False]
    with Outbox(path, max_bytes=100_000) as outbox:
        assert [int(text) for text in contents(outbox)] == kept[5:]
        assert outbox.taken_up == len(kept) - 5


def test_a_limit_on_files_means_memory_within_the_bound(tmp_path: Path, file_limit: Callable[..., None]) -> None:
    check_that_what_the_disk_does_not_take_waits_in_memory_and_then_goes_oldest_first(
        tmp_path / "outbox.db", lambda: file_limit(40_000), lambda: file_limit(None)
    )


def fill_up(folder: Path) -> Path:
    """Leave no room in a file system."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    assert os.statvfs(folder).f_bavail == 0
    return ballast


def test_a_full_file_system_means_memory_within_the_bound(small_disk: Path) -> None:
    check_that_what_the_disk_does_not_take_waits_in_memory_and_then_goes_oldest_first(
        small_disk / "outbox.db", lambda: fill_up(small_disk), (small_disk / "ballast").unlink
    )


def test_results_of_an_earlier_run_are_taken_up_from_a_full_file_system(small_disk: Path) -> None:
    with Outbox(small_disk / "outbox.db", max_bytes=ROOMY) as outbox:
        fill(outbox, "a", "b")
    fill_up(small_disk)

    with Outbox(small_disk / "outbox.db", max_bytes=ROOMY) as outbox:
        assert outbox.taken_up == 2
        assert contents(outbox) == ["a", "b"]


def test_a_file_system_that_is_full_at_the_start_is_used_once_it_has_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "outbox.db"
    ballast = fill_up(small_disk)
    with Outbox(path, max_bytes=ROOMY) as outbox:
        fill(outbox, "a")
        assert not outbox.reopen()
        assert not outbox.reopen()
        assert outbox.location == "memory"

        ballast.unlink()

        assert outbox.reopen()
        assert outbox.location == str(path)
        assert caplog.text.count("cannot be opened") == 1
    with Outbox(path, max_bytes=ROOMY) as outbox:
        assert contents(outbox) == ["a"]


def test_what_is_found_on_opening_late_comes_before_what_waits_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path, max_bytes=1000) as second_owner:
        fill(second_owner, "old 1", "old 2")
        second_owner.flush()
        outbox = Outbox(path, max_bytes=1000)
        unopened = [outbox.unopened]
        fill(outbox, *(f"{index}" * 150 for index in range(6)))
        assert outbox.dropped == 1
        assert not outbox.reopen()

    assert outbox.reopen()

    assert [*unopened, outbox.unopened] == [True, False]
    assert (outbox.taken_up, outbox.dropped) == (2, 3)  # the two old ones are beyond the bound
    assert [text[0] for text in contents(outbox)] == ["1", "2", "3", "4", "5"]
    outbox.flush()
    fill(outbox, "newest")
    assert [text[0] for text in contents(outbox)] == ["2", "3", "4", "5", "n"]
    for entry in outbox.oldest(10):
        assert outbox.ack(entry)
    assert len(outbox) == outbox.results == 0
    outbox.close()


def test_an_outbox_may_be_handed_from_one_thread_to_another(tmp_path: Path) -> None:
    with Outbox(tmp_path / "outbox.db", max_bytes=ROOMY) as outbox:
        fill(outbox, "a")
        other = threading.Thread(target=outbox.flush)
        other.start()
        other.join()

        assert not outbox.unwritten
        assert contents(outbox) == ["a"]


def test_results_that_were_lost_with_a_damaged_file_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path, max_bytes=8 * ROOMY) as outbox:
        fill(outbox, *(f"{index:4000}" for index in range(1500)))
        outbox.append("edge/dev/events", b"e")
        outbox.flush()
        with path.open("r+b") as file:
            file.write(b"\xff" * 4_000_000)
        with path.with_name("outbox.db-wal").open("r+b") as file:
            file.write(b"\xff" * 4_000_000)
        outbox.oldest(1000)
        fill(outbox, "new")
        outbox.flush()

        assert outbox.dropped + outbox.results == 1501

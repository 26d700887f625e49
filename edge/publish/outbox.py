"""Messages that the broker has not acknowledged yet: in order, bounded in bytes, on disk where a path is given.

Results and events wait in one order; what is counted are the results. A message is first kept in memory; ``flush`` then
moves what is still unacknowledged to SQLite in one transaction. One row a transaction costs 16 KB of writes for a
result of 600 bytes, twenty rows a fifth of that, and what is acknowledged before the next flush never touches the flash
at all. So a crash of the process loses at most what came since the last flush. Disk trouble never raises: messages then
stay in memory, and the log says so once.

Not thread-safe: one thread at a time uses an outbox, but it may be handed from one to another.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from edge.errors import ConfigError
from edge.publish.message import RESULTS_SUFFIX, is_result

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Entry", "Outbox"]

logger = logging.getLogger(__name__)

_FORMAT = 1
# What a row costs beside its texts: key, headers and its share of the tree's pages, rounded up.
_ROW_BYTES = 32
_IS_RESULT = f"substr(topic, -{len(RESULTS_SUFFIX)}) = '{RESULTS_SUFFIX}'"  # 1 or 0
_OLDEST = f"SELECT seq, length(topic) + length(payload), {_IS_RESULT} FROM results WHERE seq > ? ORDER BY seq"  # noqa: S608
_TOTALS = f"SELECT count(*), total(length(topic) + length(payload)), max(seq), total({_IS_RESULT}) FROM results"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Entry:
    """One message that waits."""

    seq: int
    """Its place in the order, rising by one."""
    topic: str
    payload: bytes

    @property
    def size_bytes(self) -> int:
        """What it counts against the bound."""
        return len(self.topic) + len(self.payload) + _ROW_BYTES


class Outbox:
    """A queue on disk from which an entry goes only by ``ack``, or by the bound."""

    def __init__(self, path: Path | None, *, max_bytes: int) -> None:
        """Open the outbox and take up what an earlier process left.

        Args:
            path: SQLite file, created where it is missing; None keeps everything in memory.
            max_bytes: beyond it the oldest entries are dropped.
        """
        self.dropped = 0
        """Results that were lost here, to the bound or with the disk."""
        self.taken_up = 0
        """Results that were found in the file."""
        self._path = path
        self._max_bytes = max_bytes
        self._fresh: dict[int, Entry] = {}  # not on disk yet, in order
        self._stored_count = 0  # on disk, neither acknowledged nor dropped
        self._stored_results = 0  # of those, results
        self._bytes = 0  # of all that wait
        self._acked: set[int] = set()  # still on disk, to be deleted with the next flush
        self._floor = 0  # entries up to here were dropped; those on disk go with the next flush
        self._floor_on_disk = 0
        self._next_seq = 1
        self._troubled = False
        self._closed = False
        self._why_unopened: str | None = None  # the reason that the log has
        self._database = None if path is None else self._open(path)
        self._in_memory = self._database is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """How many entries wait."""
        return self._stored_count + len(self._fresh)

    @property
    def results(self) -> int:
        """How many of the entries that wait are results. Counts them."""
        return self._stored_results + self._fresh_results()

    @property
    def last_seq(self) -> int:
        """Of the newest entry ever appended here."""
        return self._next_seq - 1

    @property
    def troubled(self) -> bool:
        """Whether the last attempt to write failed; the next one is worth some patience."""
        return self._troubled

    @property
    def unwritten(self) -> bool:
        """Whether ``flush`` has something to do."""
        changed = self._fresh or self._acked or self._floor > self._floor_on_disk
        return self._database is not None and bool(changed)

    @property
    def unopened(self) -> bool:
        """Whether entries wait in memory though they should wait in a file; ``reopen`` may mend that."""
        return self._database is None and self._path is not None and not self._closed

    @property
    def location(self) -> str:
        """Where entries wait, for messages."""
        return "memory" if self._in_memory else str(self._path)

    def append(self, topic: str, payload: bytes) -> None:
        """Add the newest entry; beyond the bound the oldest go, and the results among them into ``dropped``."""
        entry = Entry(self._next_seq, topic, payload)
        self._next_seq += 1
        self._fresh[entry.seq] = entry
        self._bytes += entry.size_bytes
        if self._bytes > self._max_bytes:
            self._drop_oldest()

    def oldest(self, limit: int, *, after: int = 0) -> list[Entry]:
        """Up to ``limit`` of the oldest entries with a seq beyond ``after``, in order."""
        found = self._read(limit, after) if self._stored_count else []
        if found is None and self._stored_count:
            return []  # newer ones would overtake those that cannot be read just now
        found = found or []
        if len(found) < limit:
            newer = (entry for seq, entry in self._fresh.items() if seq > after)
            found += islice(newer, limit - len(found))
        return found

    def ack(self, entry: Entry) -> bool:
        """Forget an entry that has been delivered; return whether it still waited, and was not dropped meanwhile."""
        if self._fresh.pop(entry.seq, None) is not None:
            self._bytes -= entry.size_bytes
            return True
        if entry.seq > self._floor and entry.seq not in self._acked and self._database is not None:
            self._acked.add(entry.seq)
            self._stored_count -= 1
            self._stored_results -= is_result(entry.topic)
            self._bytes -= entry.size_bytes
            return True
        return False

    def flush(self) -> None:
        """Bring the disk up to date in one transaction: drop, delete, insert."""
        database = self._database
        if database is None or not self.unwritten:
            return
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute("DELETE FROM results WHERE seq <= ?", (self._floor,))
            database.executemany("DELETE FROM results WHERE seq = ?", [(seq,) for seq in sorted(self._acked)])
            database.executemany(
                "INSERT INTO results (seq, topic, payload) VALUES (?, ?, ?)",
                [(entry.seq, entry.topic, entry.payload) for entry in self._fresh.values()],
            )
            database.execute("COMMIT")
        except sqlite3.Error as error:
            self._fail(error)
            return
        self._stored_count += len(self._fresh)
        self._stored_results += self._fresh_results()
        self._fresh.clear()
        self._acked.clear()
        self._floor_on_disk = self._floor
        if self._troubled:
            self._troubled = False
            logger.info("outbox %s: can be written again", self._path)

    def reopen(self) -> bool:
        """Try once more to open the file; return whether that is new.

        What it holds is older than what waits in memory, which therefore gets new numbers. So nobody may hold an entry.
        """
        if self._path is None or not self.unopened:
            return False
        self._database = self._open(self._path)
        if self._database is None:
            return False
        logger.info("outbox %s: can be opened now", self._path)
        self._in_memory = False
        self._floor = self._floor_on_disk = 0
        newer, self._fresh = self._fresh, {}
        for entry in newer.values():
            self._fresh[self._next_seq] = Entry(self._next_seq, entry.topic, entry.payload)
            self._next_seq += 1
        if self._bytes > self._max_bytes:
            self._drop_oldest()
        return True

    def close(self) -> None:
        """Flush and close the file."""
        self._closed = True
        self.flush()
        if self._database is not None:
            if self._fresh:
                lost = self._fresh_results()
                logger.warning("outbox %s: %d results could not be written and are lost", self._path, lost)
                # Counted where the lost are, so that nobody reads that they wait in the file.
                self.dropped += lost
                self._fresh.clear()
            self._database.close()
            self._database = None

    def _read(self, limit: int, after: int) -> list[Entry] | None:
        assert self._database is not None, "only a database stores entries"
        # Acknowledged rows are still there until the next flush, so that many more may have to be looked at.
        query = "SELECT seq, topic, payload FROM results WHERE seq > ? ORDER BY seq LIMIT ?"
        try:
            rows = self._database.execute(query, (max(after, self._floor), limit + len(self._acked))).fetchall()
        except sqlite3.Error as error:
            self._fail(error)
            return None
        return [Entry(*row) for row in rows if row[0] not in self._acked][:limit]

    def _drop_oldest(self) -> None:
        if self._stored_count:
            assert self._database is not None, "only a database stores entries"
            try:
                with closing(self._database.execute(_OLDEST, (self._floor,))) as rows:
                    for seq, length, counts in rows:
                        if self._bytes <= self._max_bytes:
                            return
                        self._floor = seq
                        if seq in self._acked:
                            continue
                        self._stored_count -= 1
                        self._bytes -= length + _ROW_BYTES
                        self._stored_results -= counts
                        self.dropped += counts
            except sqlite3.Error as error:
                self._fail(error)
                # What cannot be read cannot be sent either.
                self._forget_stored()
        while self._bytes > self._max_bytes and self._fresh:
            entry = self._fresh.pop(next(iter(self._fresh)))
            self._floor = entry.seq
            self._bytes -= entry.size_bytes
            self.dropped += is_result(entry.topic)

    def _fresh_results(self) -> int:
        return sum(is_result(entry.topic) for entry in self._fresh.values())

    def _forget_stored(self) -> None:
        """What is on disk is lost, whether it is still there or not."""
        self._acked.clear()
        self._floor = next(iter(self._fresh), self._next_seq) - 1
        self.dropped += self._stored_results
        self._stored_count = self._stored_results = 0
        self._bytes = sum(entry.size_bytes for entry in self._fresh.values())

    def _open(self, path: Path) -> sqlite3.Connection | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return self._connect(path)
        except (sqlite3.OperationalError, OSError) as error:
            # A box whose flash has gone read-only shall still see and publish.
            self._complain("cannot be opened", error)
            return None
        except sqlite3.DatabaseError as error:
            if path.suffix != ".db" and not _is_sqlite(path):
                # A typing error in the deployment must not move somebody's file away.
                text = f"mqtt.outbox.path: {path}: is a file of another kind; name one that ends in .db"
                raise ConfigError([text]) from error
            return self._start_over(path, error)

    def _connect(self, path: Path) -> sqlite3.Connection:
        # Whoever waits for a lock does not serve the network meanwhile, so not for long.
        database = sqlite3.connect(path, isolation_level=None, timeout=1, check_same_thread=False)
        try:
            # EXCLUSIVE keeps a second daemon out, and needs no shared memory beside the WAL.
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            # In WAL mode NORMAL survives a crash of the process whole; a power cut can take the last transactions,
            # never the file.
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA journal_size_limit = 4194304")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"written in format {version}; this version knows {_FORMAT}")
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            database.execute(
                "CREATE TABLE IF NOT EXISTS results"
                " (seq INTEGER PRIMARY KEY, topic TEXT NOT NULL, payload BLOB NOT NULL)"
            )
            if version != _FORMAT:  # which would need room on a disk that may be full
                database.execute(f"PRAGMA user_version = {_FORMAT}")
            count, size, last, results = database.execute(_TOTALS).fetchone()
        except sqlite3.Error:
            database.close()
            raise
        self._stored_count = count
        self._stored_results = int(results)
        self.taken_up += self._stored_results
        self._bytes += int(size) + count * _ROW_BYTES
        self._next_seq = max(self._next_seq, (last or 0) + 1)
        return database

    def _start_over(self, path: Path, error: Exception) -> sqlite3.Connection | None:
        """Move a damaged file out of the way and begin with an empty one."""
        aside = path.with_name(path.name + ".damaged")
        try:
            path.replace(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            logger.warning(
                "outbox %s: is damaged (%s); it was moved to %s and a new one was started", path, error, aside
            )
            return self._connect(path)
        except (sqlite3.Error, OSError) as second:
            self._complain("cannot be replaced", second)
            return None

    def _complain(self, what: str, error: Exception) -> None:
        """Log why results wait in memory only, once for each reason."""
        why = f"{what} ({_reason(error)})"
        level = logging.DEBUG if why == self._why_unopened else logging.WARNING
        self._why_unopened = why
        logger.log(level, "outbox %s: %s; results wait in memory only", self._path, why)

    def _fail(self, error: sqlite3.Error) -> None:
        """Carry on after a failed read or write: on trouble with the disk retry later, on a damaged file start over."""
        database, path = self._database, self._path
        assert database is not None, "only a database fails"
        assert path is not None, "a database has a path"
        if isinstance(error, sqlite3.OperationalError):
            # SQLITE_FULL may have rolled back by itself.
            if database.in_transaction:
                database.execute("ROLLBACK")
            if not self._troubled:
                self._troubled = True
                logger.warning("outbox %s: %s; results wait in memory until it can be written again", path, error)
            return
        database.close()
        self._forget_stored()
        self._database = self._start_over(path, error)
        self._in_memory = self._database is None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _is_sqlite(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(16) == b"SQLite format 3\0"
    except OSError:
        return False

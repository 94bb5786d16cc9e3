"""Quotas that several processes of the router count together, and that a restart does not forget: a file of SQLite.

    day, key, process -> requests, tokens     -1, key, process -> reserved, at_once: of requests under way

One transaction for each admission and each end. Requests under way are counted for the process that has them, so those
of a process that died are found by its name and given up: the processes are those of one machine and one pid namespace.
Written without waiting for the disk: what the file has survives a process that is killed, and the last moments before a
power cut may be missing. A file that cannot be written refuses nothing: what it misses is written with a later request.
"""

import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cairn.core.errors import ConfigError
from cairn.fleet.quota import DAY_S, MOST_KEYS, Limits, Quotas, Refused, Used

log = logging.getLogger("cairn")
UNDER_WAY = -1  # no day
LOCKED_S = 0.2  # that another process may hold the file
START_LOCKED_S = 5.0  # the same, before the first request
MOST_TOKENS = 2**53  # of one request: a client may ask for any number
TABLE = """CREATE TABLE IF NOT EXISTS used (day INTEGER, key TEXT, process TEXT, requests INTEGER DEFAULT 0,
    tokens INTEGER DEFAULT 0, reserved INTEGER DEFAULT 0, at_once INTEGER DEFAULT 0, PRIMARY KEY (key, day, process))
    WITHOUT ROWID"""
SUM = """SELECT total(requests * (day = :day)), total(tokens * (day = :day)), total(reserved), total(at_once)
    FROM used WHERE key = :key"""
ADD = """INSERT INTO used VALUES (:day, :key, :process, max(:requests, 0), max(:tokens, 0), max(:reserved, 0),
    max(:at_once, 0)) ON CONFLICT DO UPDATE SET requests = max(requests + :requests, 0),
    tokens = max(tokens + :tokens, 0), reserved = max(reserved + :reserved, 0), at_once = max(at_once + :at_once, 0)"""
EVICT_LEAST_USED = """DELETE FROM used WHERE key IN (SELECT key FROM used
    WHERE key NOT IN (SELECT value FROM json_each(:named)) GROUP BY key HAVING sum(at_once) = 0
    ORDER BY sum(tokens), sum(requests) LIMIT :count)"""
COUNTED_EVERY = 1000  # admissions, between looks at how many keys there are


class KeptQuotas(Quotas):
    def __init__(self, usual: Limits, path: Path, process: str | None = None) -> None:
        """`process`: whose requests these are; this one's name, unless a test says otherwise."""
        super().__init__(usual)
        self._process = process or name_of(os.getpid())
        self._failed, self._admitted = False, 0
        self._unwritten: dict[tuple[str, int], Used] = {}  # by key and day
        try:
            self._file = sqlite3.connect(path, timeout=START_LOCKED_S, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute(TABLE)
            self._release_dead_processes()
            self._file.execute(f"PRAGMA busy_timeout = {round(1000 * LOCKED_S)}")
        except sqlite3.Error as error:
            hint = "name a file in a folder that you own"
            if "locked" in str(error):
                hint = "another program holds it: end that one, or name another file"
            raise ConfigError(f"quota_file {path}: {error}", hint=hint) from None

    def admit(self, key: str, reserved: int, now_s: float) -> Refused | None:
        reserved, refused = min(reserved, MOST_TOKENS), None
        if self._begin(now_s):
            with self._rolled_back():
                fields = self._file.execute(SUM, {"day": self._day, "key": key}).fetchone()
                used = Used(*map(int, fields))
                for day in (self._day, UNDER_WAY):
                    used = _sum(used, self._unwritten.get((key, day), Used()))
                refused = self.refusal(used, key, reserved, now_s)
        if refused is None:
            self._note(key, self._day, Used(requests=1))
            self._note(key, UNDER_WAY, Used(at_once=1, reserved=reserved))
            self._admitted += 1
        self._commit()
        return refused

    def settle(self, key: str, reserved: int, tokens: int, now_s: float) -> None:
        self._begin(now_s)
        self._note(key, self._day, Used(tokens=min(tokens, MOST_TOKENS)))
        self._note(key, UNDER_WAY, Used(at_once=-1, reserved=-min(reserved, MOST_TOKENS)))
        self._commit()

    def close(self) -> None:
        self._file.close()

    def _begin(self, now_s: float) -> bool:
        """A transaction; False: the file cannot be written now."""
        before, self._day = self._day, int(now_s) // DAY_S
        with self._rolled_back():
            self._file.execute("BEGIN IMMEDIATE")
            if self._day != before:
                self._file.execute("DELETE FROM used WHERE day < ? AND at_once = 0", (self._day,))
        return self._file.in_transaction

    def _commit(self) -> None:
        """Everything that is not written yet. Without a transaction it stays so."""
        if not self._file.in_transaction:
            return
        with self._rolled_back():
            for (key, day), used in self._unwritten.items():
                whose = {"day": day, "key": key, "process": self._process}
                self._file.execute(ADD, msgspec.structs.asdict(used) | whose)
            self._bound()
            self._file.execute("COMMIT")
            self._unwritten.clear()
            self._failed = False

    @contextmanager
    def _rolled_back(self) -> Iterator[None]:
        """Roll back on any error; file errors are logged once until the file is writable again."""
        try:
            yield
        except BaseException as error:
            if self._file.in_transaction:
                with suppress(sqlite3.Error):
                    self._file.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            if not self._failed:
                log.warning("what a key used is not in the quota file yet: %s", error)
            self._failed = True

    def _note(self, key: str, day: int, more: Used) -> None:
        """Queue usage for writing. With too many keys only those with requests in flight are kept."""
        total = _sum(self._unwritten.pop((key, day), Used()), more)
        if total != Used():
            self._unwritten[key, day] = total
        if len(self._unwritten) > MOST_KEYS:
            kept = self._unwritten.items()
            self._unwritten = {at: used for at, used in kept if at[1] == UNDER_WAY}

    def _bound(self) -> None:
        """Invented keys make no file without end, and push out none that [[keys]] names."""
        if not self._admitted or self._admitted % COUNTED_EVERY:
            return
        (keys,) = self._file.execute("SELECT count(DISTINCT key) FROM used").fetchone()
        if keys >= MOST_KEYS:
            named = json.dumps(list(self._keys))
            self._file.execute(EVICT_LEAST_USED, {"named": named, "count": MOST_KEYS // 2})

    def _release_dead_processes(self) -> None:
        for (process,) in self._file.execute("SELECT DISTINCT process FROM used").fetchall():
            pid = str(process).partition(" ")[0]
            if process == self._process or name_of(pid) != process:
                self._file.execute("DELETE FROM used WHERE day = -1 AND process = ?", (process,))


def name_of(pid: int | str) -> str:
    """Its number, when it began and at which boot, because numbers are given again. Empty: it does not run."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{pid} {began} {boot}"


def _sum(one: Used, other: Used) -> Used:
    return Used(
        one.requests + other.requests,
        one.tokens + other.tokens,
        one.reserved + other.reserved,
        one.at_once + other.at_once,
    )

"""Quotas that several processes of the router count together, and that a restart does not forget: a file of SQLite.

    day, key, process -> requests, tokens     -1, key, process -> reserved, at_once: of requests under way

One transaction for each admission and each end. Requests under way are counted for the process that has them, so those
of a process that died are found by its number and given up. Written without waiting for the disk: what the file has
survives a process that is killed, and the last moments before a power cut may be missing. A file that cannot be written
refuses nothing and says so once.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cairn.core.errors import ConfigError
from cairn.fleet.quota import DAY_S, MOST_KEYS, Limits, Quotas, Refused, Used

log = logging.getLogger("cairn")
UNDER_WAY = -1  # no day
LOCKED_S = 0.2  # that another process may hold the file
TABLE = """CREATE TABLE IF NOT EXISTS used (day INTEGER, key TEXT, process INTEGER, requests INTEGER DEFAULT 0,
    tokens INTEGER DEFAULT 0, reserved INTEGER DEFAULT 0, at_once INTEGER DEFAULT 0, PRIMARY KEY (key, day, process))
    WITHOUT ROWID"""
SUM = """SELECT total(requests * (day = :day)), total(tokens * (day = :day)), total(reserved), total(at_once)
    FROM used WHERE key = :key"""
ADD = """INSERT INTO used VALUES (:day, :key, :process, :requests, :tokens, :reserved, :at_once)
    ON CONFLICT DO UPDATE SET requests = requests + :requests, tokens = tokens + :tokens,
    reserved = reserved + :reserved, at_once = at_once + :at_once"""
LEAST = """DELETE FROM used WHERE at_once = 0 AND key IN (SELECT key FROM used GROUP BY key
    ORDER BY sum(at_once), sum(tokens), sum(requests) LIMIT :count)"""
COUNTED_EVERY = 1000  # admissions, between looks at how many keys there are


class KeptQuotas(Quotas):
    def __init__(self, usual: Limits, path: Path, process: int | None = None) -> None:
        """`process`: whose requests these are; this one's number, unless a test says otherwise."""
        super().__init__(usual)
        self._process, self._failed, self._admitted = process or os.getpid(), False, 0
        try:
            self._file = sqlite3.connect(path, timeout=LOCKED_S, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = OFF")
            self._file.execute(TABLE)
            self._give_up_of_the_dead()
        except sqlite3.Error as error:
            raise ConfigError(
                f"quota_file {path}: {error}", hint="name a file in a folder that you own"
            ) from None

    def admit(self, key: str, reserved: int, now_s: float) -> Refused | None:
        refused = None
        with self._transaction():
            self._turn(now_s)
            fields = self._file.execute(SUM, {"day": self._day, "key": key}).fetchone()
            refused = self.refusal(Used(*map(int, fields)), key, reserved, now_s)
            if refused is None:
                self._add(key, self._day, requests=1)
                self._add(key, UNDER_WAY, at_once=1, reserved=reserved)
                self._bound()
        return refused

    def settle(self, key: str, reserved: int, tokens: int, now_s: float) -> None:
        with self._transaction():
            self._turn(now_s)
            self._add(key, self._day, tokens=tokens)
            self._add(key, UNDER_WAY, at_once=-1, reserved=-reserved)

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._file.execute("BEGIN IMMEDIATE")
            yield
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            if not self._failed:
                log.warning("what keys use is not counted any more: %s", error)
            self._failed = True

    def _add(self, key: str, day: int, **counts: int) -> None:
        none = {"requests": 0, "tokens": 0, "reserved": 0, "at_once": 0}
        whose = {"day": day, "key": key, "process": self._process}
        self._file.execute(ADD, none | counts | whose)

    def _turn(self, now_s: float) -> None:
        if (day := int(now_s) // DAY_S) == self._day:
            return
        self._day = day
        self._file.execute("DELETE FROM used WHERE day < ? AND at_once = 0", (day,))

    def _bound(self) -> None:
        """Invented keys make no file without end."""
        self._admitted += 1
        if self._admitted % COUNTED_EVERY:
            return
        (keys,) = self._file.execute("SELECT count(DISTINCT key) FROM used").fetchone()
        if keys >= MOST_KEYS:
            self._file.execute(LEAST, {"count": MOST_KEYS // 2})

    def _give_up_of_the_dead(self) -> None:
        for (process,) in self._file.execute("SELECT DISTINCT process FROM used").fetchall():
            if process == self._process or not _runs(process):
                self._file.execute("DELETE FROM used WHERE day = -1 AND process = ?", (process,))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True

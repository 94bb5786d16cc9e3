"""Quotas in a file: the same answers as in memory, over several processes and restarts."""

import sqlite3
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.fleet import quota_file
from cairn.fleet.config import FleetConfig, RouterConfig, ServerGroup
from cairn.fleet.quota import Limits, Quotas
from cairn.fleet.quota_file import KeptQuotas, name_of
from cairn.fleet.router_processes import check_processes

LIMITS = Limits(requests_per_day=6, tokens_per_day=100, at_once=3)
OTHER = "1 0 another process"

moves = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 60), st.booleans(),
              st.sampled_from([0, 10, 50_000]), st.integers(0, 1)), max_size=40)  # fmt: skip


@settings(max_examples=40)
@given(moves)
def test_two_processes_refuse_what_one_that_counts_everything_would(steps):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "used"
        whole = Quotas(LIMITS)
        parts = [KeptQuotas(LIMITS, path), KeptQuotas(LIMITS, path, OTHER)]
        now, open_ = 0.0, []
        for key, reserved, used, ends, later, at in steps:
            now += later
            if ends and open_:
                key, reserved, at = open_.pop(0)
                whole.settle(key, reserved, used, now)
                parts[at].settle(key, reserved, used, now)
                continue
            expected = whole.admit(key, reserved, now)
            assert parts[at].admit(key, reserved, now) == expected
            if expected is None:
                open_.append((key, reserved, at))
        for part in parts:
            part.close()


def test_what_was_used_survives_a_restart_and_requests_of_the_dead_are_given_up(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert name_of(ended.pid) == ""
    before = KeptQuotas(LIMITS, tmp_path / "used", f"{ended.pid} 1 boot")
    for _ in range(3):
        assert before.admit("a", 20, 0.0) is None
    before.settle("a", 20, 50, 0.0)
    assert before.admit("a", 0, 0.0) is None
    assert (before.admit("a", 0, 0.0) or pytest.fail("it was admitted")).code == "key_concurrency"
    before.close()
    after = KeptQuotas(LIMITS, tmp_path / "used")
    assert (after.admit("a", 60, 0.0) or pytest.fail("it was admitted")).code == "key_budget"
    assert after.admit("a", 50, 0.0) is None
    assert after.admit("a", 0, 0.0) is None
    assert (after.admit("a", 0, 0.0) or pytest.fail("it was admitted")).code == "key_requests"
    assert after.admit("a", 50, 86_400.0) is None
    after.close()


def test_invented_keys_make_no_file_without_end_and_push_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(quota_file, "MOST_KEYS", 40)
    monkeypatch.setattr(quota_file, "COUNTED_EVERY", 10)
    quotas = KeptQuotas(LIMITS, tmp_path / "used")
    quotas.change(LIMITS, {"named": Limits(requests_per_day=1)})
    for key, used in (("real", 90), ("named", 0)):
        assert quotas.admit(key, 90, 0.0) is None
        quotas.settle(key, 90, used, 0.0)
    for number in range(200):
        assert quotas.admit(f"invented {number}", 1, 0.0) is None
        quotas.settle(f"invented {number}", 1, 0, 0.0)
    (rows,) = quotas._file.execute("SELECT count(DISTINCT key) FROM used").fetchone()
    assert rows <= 50
    assert quotas.admit("real", 90, 0.0) is not None
    assert quotas.admit("named", 1, 0.0) is not None
    quotas.close()


def test_a_file_that_fails_is_refused_at_the_start_and_refuses_nobody_later(tmp_path, caplog):
    with pytest.raises(ConfigError, match="quota_file"):
        KeptQuotas(LIMITS, tmp_path / "missing" / "used")
    quotas = KeptQuotas(LIMITS, tmp_path / "used")
    quotas._file.execute("DROP TABLE used")
    assert [quotas.admit("a", 1, 0.0) for _ in range(9)] == [None] * 9
    assert [one.message for one in caplog.records] == [
        "what a key used is not in the quota file yet: no such table: used"
    ]
    quotas._file.execute(quota_file.TABLE)
    refused = quotas.admit("a", 1, 0.0) or pytest.fail("the nine were forgotten")
    assert refused.code == "key_concurrency"
    for _ in range(9):
        quotas.settle("a", 1, 1, 0.0)
    refused = quotas.admit("a", 1, 0.0) or pytest.fail("the nine were forgotten")
    assert refused.code == "key_requests"
    quotas.close()


def test_what_is_counted_while_another_process_holds_the_file_is_written_later(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(quota_file, "LOCKED_S", 0.001)
    quotas = KeptQuotas(Limits(at_once=2), tmp_path / "used")
    for _ in range(2):
        assert quotas.admit("a", 5, 0.0) is None
    holder = sqlite3.connect(tmp_path / "used", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    quotas.settle("a", 5, 3, 0.0)
    quotas.settle("a", 5, 3, 0.0)
    assert quotas.admit("b", 5, 0.0) is None
    holder.execute("ROLLBACK")
    assert quotas.admit("a", 2**64, 0.0) is None  # the two have ended; any number can be reserved
    fields = holder.execute("SELECT key, total(tokens), total(at_once) FROM used GROUP BY key")
    assert fields.fetchall() == [("a", 6, 1), ("b", 0, 1)]
    quotas.settle("a", 2**64, 0, 0.0)
    quotas.settle("a", 5, 0, 0.0)  # one too many is no credit
    fields = holder.execute("SELECT min(reserved), min(at_once) FROM used WHERE key = 'a'")
    assert fields.fetchall() == [(0, 0)]
    holder.close()
    quotas.close()


def test_several_processes_need_a_file_to_count_in():
    limited = RouterConfig(key_requests_per_day=5)
    config = FleetConfig(router=limited, servers=[ServerGroup(urls=["http://a:1"])])
    with pytest.raises(ConfigError) as error:
        check_processes(config, 2, False)
    assert "quota_file" in (error.value.hint or "")
    kept = RouterConfig(key_requests_per_day=5, quota_file="used")
    check_processes(FleetConfig(router=kept, servers=config.servers), 2, False)

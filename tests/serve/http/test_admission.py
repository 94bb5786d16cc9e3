"""Who is let in, who has to come again and when: the rules alone, on a clock of our own."""

import pytest

from cairn.core.errors import ConfigError
from cairn.serve.engine.messages import Stats
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.admission import WINDOW_S, Admission, Rules
from cairn.serve.http.server.health import Progress
from cairn.serve.http.server.keys import Keys, read_keys


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def rules(**changes):
    return Rules(**(dict(rows=2, waiting=3, first_token_s=10.0) | changes))


def refused(admission, holder="anybody", sequences=1):
    with pytest.raises(Refusal) as refusal:
        admission.admit(holder, sequences)
    return refusal.value


def test_rows_and_the_line_fill_up_and_empty(clock):
    admission = Admission(rules(), clock)
    tickets = [admission.admit("a", 1) for _ in range(5)]
    assert refused(admission).status == 429
    tickets[0].close()
    tickets[0].close()  # twice is fine
    assert refused(admission, sequences=2).status == 429
    admission.admit("a", 1)
    assert refused(admission, sequences=6).status == 400


def test_a_line_that_moves_too_slowly_is_refused_before_it_is_joined(clock):
    admission = Admission(rules(waiting=100), clock)
    for _ in range(4):  # one first token in two seconds
        ticket = admission.admit("a", 1)
        clock.now += 2
        ticket.first_token()
    assert admission.wait_s() == 0  # nobody waits
    waiting = [admission.admit("a", 1) for _ in range(5)]  # the last one waits for 8 s
    late = refused(admission)
    assert late.status == 503
    assert late.code == "deadline"
    assert int(late.headers()["retry-after"]) >= 1
    for ticket in waiting:
        ticket.close()
    admission.admit("a", 1)


def test_what_is_long_ago_says_nothing(clock):
    admission = Admission(rules(waiting=100), clock)
    for _ in range(3):
        clock.now += 9
        admission.admit("a", 1).first_token()
    for _ in range(20):
        clock.now += WINDOW_S
        admission.admit("a", 1)


def test_limits_of_a_key(clock):
    admission = Admission(rules(waiting=100, key_at_once=2, key_per_minute=3), clock)
    first = admission.admit("alice", 1)
    admission.admit("alice", 1)
    assert refused(admission, "alice").code == "key_concurrency"
    admission.admit("bob", 1)
    first.close()
    admission.admit("alice", 1).close()
    for _ in range(3):
        admission.bill("alice")
    admission.bill("bob")
    with pytest.raises(Refusal) as again:
        admission.bill("alice")
    assert again.value.code == "key_rate"
    assert again.value.headers()["retry-after"] == "20"
    clock.now += 20
    admission.bill("alice")


def test_a_server_that_stops_lets_nobody_in(clock):
    admission = Admission(rules(), clock)
    admission.draining = True
    assert refused(admission).status == 503


def test_progress_counts_only_while_there_is_work(clock):
    progress = Progress(5.0, clock)
    assert progress.look(3, busy=True) == 0
    clock.now += 4
    assert progress.look(3, busy=True) == 4
    assert progress.look(4, busy=True) == 0
    clock.now += 50
    assert progress.look(4, busy=False) == 0
    clock.now += 6
    assert progress.look(4, busy=True) == 6


def test_a_new_engine_has_the_whole_time_for_its_first_step(clock):
    progress, stats = Progress(5.0, clock), Stats(steps=7)
    assert progress.verdict(stats, True, None, None, False).status == "ok"
    clock.now += 50
    assert progress.verdict(stats, True, None, "SIGKILL", False).status == "starting"
    assert progress.verdict(stats, True, None, None, False).status == "ok"
    clock.now += 6
    assert progress.verdict(stats, True, None, None, False).status == "stalled"


@pytest.mark.parametrize(
    ("dead", "restarting", "draining", "status"),
    [
        (None, None, False, "ok"),
        (None, None, True, "draining"),
        (None, "SIGKILL", False, "starting"),
        (None, "SIGKILL", True, "starting"),
        ("gone", "SIGKILL", False, "dead"),
    ],
)
def test_a_server_whose_engine_is_away_is_not_well(clock, dead, restarting, draining, status):
    verdict = Progress(5.0, clock).verdict(Stats(), False, dead, restarting, draining)
    assert verdict.status == status
    assert (verdict.reason is None) == (status == "ok")


def scope(**headers):
    return {
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ]
    }


def test_keys_from_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nalice sk-1\n\n  # indented\nsk-2\n")
    keys = read_keys(file, {"CAIRN_API_KEYS": "sk-0, bob sk-3"})
    assert keys.holder(scope(authorization="Bearer sk-1")) == "alice"
    assert keys.holder(scope(authorization="bearer sk-3")) == "bob"
    assert keys.holder(scope(x_api_key="sk-2")) == "key-4"
    for wrong in (
        scope(),
        scope(authorization="Bearer sk-9"),
        scope(authorization="sk-1"),
        scope(x_api_key="sk-11"),
    ):
        with pytest.raises(Refusal) as refusal:
            keys.holder(wrong)
        assert refusal.value.status == 401
    assert "sk-" not in repr(keys)
    assert Keys().holder(scope()) == "anybody"


@pytest.mark.parametrize("key", ["#S3cret", "ab#cd", "ab#", "a\"b'c$d\\\\"])
def test_a_key_in_the_variable_is_taken_literally(key):
    keys = read_keys(None, {"CAIRN_API_KEYS": f"other,{key}"})
    assert keys.holder(scope(authorization=f"Bearer {key}")) == "key-2"
    for wrong in (key[:-1], key[: key.find("#")], f"{key}!"):
        with pytest.raises(Refusal):
            keys.holder(scope(authorization=f"Bearer {wrong}"))


def test_a_key_in_a_file_may_hold_a_hash(tmp_path):
    file = tmp_path / "keys"
    file.write_text("#S3cret\nab#cd\n")
    keys = read_keys(file, {})
    assert keys.holder(scope(x_api_key="ab#cd")) == "key-1"
    with pytest.raises(Refusal):
        keys.holder(scope(x_api_key="ab"))


@pytest.mark.parametrize("text", ["", " ", ",", " , ,"])
def test_a_variable_that_is_set_and_empty_is_no_open_door(text):
    with pytest.raises(ConfigError, match="CAIRN_API_KEYS is set"):
        read_keys(None, {"CAIRN_API_KEYS": text})


def test_files_of_keys_that_are_wrong(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    many = tmp_path / "many"
    many.write_text("alice sk-1 sk-2\n")
    unclear = tmp_path / "unclear"
    unclear.write_text("sk-1 #sk-2\n")
    for file, said in (
        (empty, "no API key"),
        (many, "more than"),
        (unclear, "a key or a comment"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            read_keys(file, {})
        assert "sk-" not in str(error.value)

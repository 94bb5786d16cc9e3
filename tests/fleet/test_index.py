"""The index against plain sets of what each server has, with events that get lost, doubled and reordered."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.fleet.index import EXPECTED_S, KeyIndex
from cairn.serve.pulse import Events

SERVERS, CHAINS, LENGTH = 4, 3, 6
# Three prompts as chains of keys; the first two share their beginning.
PROMPTS = [
    [100 + at for at in range(LENGTH)],
    [100, 101, 102, 203, 204, 205],
    [300 + at for at in range(LENGTH)],
]
TOKENS = {key: 16 * (at + 1) for prompt in PROMPTS for at, key in enumerate(prompt)}
ESTIMATES = [16 * (at + 1) for at in range(LENGTH)]


class Server:
    """What one server has cached, and the events that it has sent."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.sent: list[Events] = []

    def restart(self) -> None:
        self.keys, self.sent = set(), [Events(0)]

    def change(self, keys, stored: bool) -> None:
        before = set(self.keys)
        (self.keys.update if stored else self.keys.difference_update)(keys)
        new = [(key, TOKENS[key]) for key in sorted(self.keys - before)]
        self.sent.append(Events(len(self.sent), new, sorted(before - self.keys)))


def brute_force(keys: set[int], prompt: list[int]) -> int:
    """The longest beginning of which every key is there; keys before the first known one are not counted."""
    best = 0
    for key in prompt:
        if key not in keys:
            break
        best = TOKENS[key]
    return best


changes = st.tuples(
    st.integers(0, SERVERS - 1),
    st.integers(0, CHAINS - 1),
    st.integers(1, LENGTH),
    st.sampled_from(["store", "drop", "restart", "lose", "double", "swap"]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(changes, max_size=40))
def test_the_index_equals_brute_force_whatever_happens_to_events(history):
    index, servers = KeyIndex(), [Server() for _ in range(SERVERS)]
    for number, server in enumerate(servers):
        server.restart()
        index.note(number, server.sent[0])
    following = set(range(SERVERS))
    for number, chain, upto, what in history:
        server = servers[number]
        if what == "restart":
            server.restart()
            index.forget(number)
            index.note(number, server.sent[0])
            following.add(number)
            continue
        first = len(server.sent)
        server.change(PROMPTS[chain][:upto], stored=what != "drop")
        if what == "lose":  # and the next one shows the gap
            server.change(PROMPTS[chain][:1], stored=True)
            delivered = [server.sent[-1]]
        elif what == "double":
            delivered = [server.sent[first], server.sent[first], server.sent[0]]
        elif what == "swap":
            server.change(PROMPTS[chain][upto - 1 :], stored=False)
            delivered = [server.sent[-1], server.sent[first]]
        else:
            delivered = server.sent[first:]
        taken = [index.note(number, events) for events in delivered]
        if not all(taken):
            following.discard(number)
    for prompt in PROMPTS:
        found = index.match(prompt, ESTIMATES)
        for number, server in enumerate(servers):
            assert index.knows(number) == (number in following)
            known = server.keys if number in following else set()
            # A key in the middle may be gone while the first is unknown to all: only whole beginnings count.
            if prompt[0] in known or number not in following:
                assert found.get(number, 0) == brute_force(known, prompt)


def test_a_decision_counts_until_it_expires_or_an_event_comes():
    index = KeyIndex()
    index.note(0, Events(0))
    index.expect(0, PROMPTS[0], now_s=0.0)
    assert index.match(PROMPTS[0], ESTIMATES, 1.0) == {0: 16 * LENGTH}
    index.note(0, Events(1, [(PROMPTS[0][0], 16)]))
    assert index.match(PROMPTS[0], ESTIMATES, EXPECTED_S + 1) == {0: 16}
    index.expect(0, PROMPTS[2], now_s=20.0)
    index.forget(0)
    assert index.match(PROMPTS[2], ESTIMATES, 20.0) == {}
    assert len(index) == 0


@given(st.lists(st.floats(0.01, 2 * EXPECTED_S), min_size=1, max_size=8))
def test_a_decision_counts_for_half_of_the_time_at_least_and_for_all_of_it_at_most(pauses):
    index, now_s = KeyIndex(), 100.0
    index.match(PROMPTS[0], ESTIMATES, now_s - 1.0)  # its halves begin where they like
    index.expect(0, PROMPTS[0], now_s)
    for pause_s in pauses:
        now_s += pause_s
        found = index.match(PROMPTS[0], ESTIMATES, now_s)
        if now_s < 100.0 + EXPECTED_S / 2:
            assert found
        elif now_s >= 100.0 + EXPECTED_S:
            assert not found

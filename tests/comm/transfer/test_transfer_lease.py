"""Leases: pages come free exactly once, never while a living holder believes that it may read them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cairn.comm.transfer.errors import TransferRefused
from cairn.comm.transfer.handshake import Side, fingerprint, judge, say_hello
from cairn.comm.transfer.kv import KVContents, KVLayout
from cairn.comm.transfer.lease import Freed, LeaseHolder, Owner, Terms

TERMS = Terms(lease_s=5.0, beat_s=1.0, unclaimed_s=12.0)
SOON = Terms(lease_s=5.0, beat_s=1.0, unclaimed_s=1.0)
HOLDERS = ("d0", "d1")


class Leases(RuleBasedStateMachine):
    """One owner, two holders with clocks of their own, and a network that loses, doubles and reorders."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.now = Owner(SOON), 0.0
        self.offset = {"d0": 1000.0, "d1": -50.0}  # clocks differ, and nobody compares them
        self.holders = {name: LeaseHolder(SOON) for name in HOLDERS}
        self.wants: dict[str, set[str]] = {name: set() for name in HOLDERS}
        self.network: list[tuple] = []
        self.granted: set[str] = set()
        self.freed: list[Freed] = []
        self.dead: set[str] = set()

    def clock(self, holder: str) -> float:
        return self.now + self.offset[holder]

    def free(self, freed: list[Freed]) -> None:
        for one in freed:
            for name in set(HOLDERS) - self.dead:
                if one.request in self.wants[name]:
                    assert not self.holders[name].may_read(one.request, self.clock(name)), (
                        one,
                        name,
                    )
        self.freed += freed

    @rule(wanted=st.sets(st.sampled_from(HOLDERS)))
    def grant(self, wanted):
        request = chr(ord("a") + len(self.granted))
        self.owner.grant(request, [ord(request), ord(request) + 100], self.now)
        self.granted.add(request)
        for holder in wanted - self.dead:
            self.wants[holder].add(request)

    @rule(tenths=st.sampled_from([1, 5, 10, 25, 49, 60]))
    def wait(self, tenths):
        for _ in range(
            tenths
        ):  # in small steps: what matters is what holds at the moment of freeing
            self.now += 0.1
            self.free(self.owner.expire(self.now))

    @rule(holder=st.sampled_from(HOLDERS), at_once=st.booleans())
    def beat(self, holder, at_once):
        if holder not in self.dead:
            number = self.holders[holder].beat(self.clock(holder))
            self.network.append(("beat", holder, number, sorted(self.wants[holder])))
            if at_once:
                self.arrive(self.network.pop())
                self.arrive(self.network.pop())

    @rule(holder=st.sampled_from(HOLDERS), place=st.integers(0, 3))
    def finish(self, holder, place):
        for request in sorted(self.wants[holder])[place : place + 1]:
            self.wants[holder].discard(request)
            self.holders[holder].drop(request)
            self.network.append(("done", holder, request))

    @precondition(lambda self: self.network)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data, again):
        place = data.draw(st.integers(0, len(self.network) - 1))
        self.arrive(self.network[place] if again else self.network.pop(place))

    def arrive(self, message: tuple) -> None:
        match message:
            case ("beat", holder, number, wanted):
                got = [
                    one for one in wanted if self.owner.renew(one, holder, len(HOLDERS), self.now)
                ]
                assert not {one.request for one in self.freed} & set(got)
                self.network.append(("answer", holder, number, got))
            case ("answer", holder, number, got):
                # Only what it still wants: a late answer must not revive what was dropped.
                self.holders[holder].answered(
                    number, [one for one in got if one in self.wants[holder]]
                )
            case ("done", holder, request):
                self.free(self.owner.release(request, holder, len(HOLDERS), self.now))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data):
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @rule(holder=st.sampled_from(HOLDERS), luck=st.integers(0, 9))
    def die(self, holder, luck):
        if luck or holder in self.dead:  # rarely: the dead are dull
            return
        self.dead.add(holder)
        self.wants[holder].clear()
        self.free(self.owner.lost(holder, self.now))

    @rule(place=st.integers(0, 9))
    def withdraw(self, place):
        for request in sorted(self.owner.held())[place : place + 1]:
            self.free(self.owner.withdraw(request, self.now))

    @invariant()
    def every_page_is_held_or_was_freed_once(self):
        names = [one.request for one in self.freed]
        assert len(names) == len(set(names))
        assert set(names) | self.owner.held() == self.granted
        assert not set(names) & self.owner.held()
        assert all(one.pages == (ord(one.request), ord(one.request) + 100) for one in self.freed)

    def teardown(self):
        """Left alone, everything comes back."""
        self.now += 1000
        self.free(self.owner.expire(self.now))
        assert not self.owner.held()


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def test_why_pages_came_free():
    owner = Owner(TERMS)
    for request in "abcd":
        owner.grant(request, [1], 0.0)
    assert owner.renew("a", "d0", 1, 1.0)
    assert owner.release("a", "d0", 1, 2.0) == [Freed("a", (1,), "released")]
    assert owner.release("a", "d0", 1, 2.0) == []  # said twice
    assert owner.renew("b", "d0", 1, 2.0)
    assert owner.lost("d0", 3.0) == [Freed("b", (1,), "lost")]
    assert owner.renew("c", "d1", 1, 3.0)
    assert owner.expire(7.9) == []
    assert owner.expire(8.0) == [Freed("c", (1,), "expired")]
    assert not owner.renew("c", "d1", 1, 8.0)  # too late
    assert owner.expire(12.0) == [Freed("d", (1,), "never claimed")]


def test_the_holder_stops_before_the_owner_frees():
    """A beat is sent at 10 of its clock, arrives at 0 of the owner's, and the answer comes late."""
    owner, holder = Owner(TERMS), LeaseHolder(TERMS)
    owner.grant("a", [1], 0.0)
    number = holder.beat(10.0)
    assert owner.renew("a", "d0", 1, 0.0)
    assert not holder.may_read("a", 10.0)  # it has not heard yet
    holder.answered(number, ["a"])
    assert holder.may_read("a", 14.9)
    assert not holder.may_read("a", 15.0)
    assert owner.expire(4.9) == []
    assert owner.expire(5.0) == [Freed("a", (1,), "expired")]


def test_pages_wait_for_every_holder():
    owner = Owner(TERMS)
    owner.grant("a", [1], 0.0)
    assert owner.renew("a", "d0", 2, 0.0)
    assert owner.release("a", "d0", 2, 1.0) == []  # d1 has not come yet
    assert owner.renew("a", "d1", 2, 2.0)
    assert owner.release("a", "d1", 2, 3.0) == [Freed("a", (1,), "released")]


def test_a_withdrawn_request_lets_its_readers_finish():
    owner = Owner(TERMS)
    owner.grant("a", [1], 0.0)
    assert owner.renew("a", "d0", 1, 0.0)
    assert owner.withdraw("a", 1.0) == []
    assert not owner.renew("a", "d0", 1, 2.0)
    assert owner.expire(5.0) == [Freed("a", (1,), "expired")]
    owner.grant("b", [2], 6.0)
    assert owner.withdraw("b", 6.0) == [Freed("b", (2,), "withdrawn")]


def side(**change) -> Side:
    contents = KVContents(**dict(model="m", layers=4, kv_heads=4, width=8) | change)
    return Side("e1", 0, KVLayout(contents=contents, page_size=8, pages=4))


def test_a_hello_is_understood_whatever_the_layout():
    ours = side()
    other = Side(
        "e2",
        3,
        KVLayout(contents=ours.layout.contents, page_size=32, pages=9, tp=4, heads_first=True),
    )
    assert judge(ours, say_hello(other)) == other


@pytest.mark.parametrize(
    "change", [dict(model="n"), dict(dtype="float32"), dict(kv_heads=2), dict(width=16)]
)
def test_another_cache_is_refused_with_both_descriptions(change):
    ours, other = side(), side(**change)
    with pytest.raises(TransferRefused) as caught:
        judge(ours, say_hello(other))
    for one in (ours, other):
        assert one.layout.contents.words() in caught.value.message
    assert fingerprint(ours.layout.contents) != fingerprint(other.layout.contents)


def test_another_version_is_refused_before_its_hello_is_read():
    ours = side()
    with pytest.raises(TransferRefused, match=r"version 1: .* there: version 2: "):
        judge(ours, say_hello(ours, version=2))


@pytest.mark.parametrize("greeting", [b"", b"\x93\x01", b"GET / HTTP/1.1\r\n"])
def test_noise_is_refused(greeting):
    with pytest.raises(TransferRefused, match="something else than hello"):
        judge(side(), greeting)

"""Tiers of the KV cache: the gate and the eviction against brute force, and engines whose pages left and came back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.models.cache import CacheGroup
from cairn.serve.tiers.load_plan import (
    WORTH,
    Source,
    Stored,
    longest_stored,
    plan_load,
    worth_storing,
)
from cairn.serve.tiers.slot_book import SlotBook

SOURCES = (Source(8.0, 0.5), Source(1.0, 2.0))
PLACES = st.lists(st.builds(Stored, st.integers(0, 1), st.integers(1, 30)), max_size=12)


@given(found=st.integers(0, 4), places=PLACES, more=st.integers(0, 4), page_s=st.floats(0.1, 20))
def test_the_plan_is_the_fastest_of_all_splits(found, places, more, page_s):
    end = found + len(places) + more

    def compute(first, last):
        return page_s * (last - first) + 0.01 * (last**2 - first**2)

    def seconds(first, last):
        tiers = {places[at - found].tier for at in range(first, last)}
        load = sum(SOURCES[tier].wait_s for tier in tiers)
        for at in range(first, last):
            load += places[at - found].bytes / SOURCES[places[at - found].tier].bytes_per_s
        return max(compute(found, first), load) + compute(last, end)

    plan = plan_load(found, places, end, SOURCES, compute)
    alone = compute(found, end)
    changes = [n for n in range(1, len(places)) if places[n].tier != places[n - 1].tier]
    lasts = [found + n for n in [*changes, len(places)] if n]
    best = min((seconds(f, n) for n in lasts for f in range(found, n)), default=alone)
    if best < WORTH * alone - 1e-9:
        assert abs(plan.seconds - best) < 1e-6
    assert plan.seconds <= alone
    assert found <= plan.first <= plan.last <= found + len(places)
    assert plan.kind != "compute" or plan.seconds == alone
    whole = plan_load(found, places, end, SOURCES, compute, both_ends=False)
    assert whole.first in (found, whole.last)


def test_what_never_pays_is_neither_loaded_nor_stored():
    slow = (Source(1.0, 0.0),)
    places = [Stored(0, 100)] * 8
    assert plan_load(0, places, 8, slow, lambda a, b: b - a).kind == "compute"
    assert plan_load(0, places, 8, (Source(1e6, 0.0),), lambda a, b: b - a).kind == "load"
    both = plan_load(0, places, 8, (Source(100.0, 0.0),), lambda a, b: b - a)
    assert (both.kind, both.first, both.seconds) == ("both ends", 4, 4.0)
    assert worth_storing(8, slow[0], 1.0)
    assert not worth_storing(9, slow[0], 1.0)


GROUPS = st.lists(
    st.sampled_from([CacheGroup(), CacheGroup("window", 3), CacheGroup("window", 9)]), min_size=1, max_size=3
)  # fmt: skip


@given(groups=GROUPS, found=st.integers(0, 3), most=st.integers(0, 8), data=st.data())
def test_the_longest_prefix_is_what_every_group_can_go_on_from(groups, found, most, data):
    size, most = 2, max(found, most)
    held = [data.draw(st.sets(st.integers(0, 8))) for _ in groups]

    def complete(last):
        firsts = [max(group.first_page(last * size, size), found) for group in groups]
        return all(set(range(first, last)) <= own for first, own in zip(firsts, held, strict=True))

    wanted = max((last for last in range(found + 1, most + 1) if complete(last)), default=found)
    assert longest_stored(groups, size, found, most, lambda g, at: at in held[g]) == wanted


class PlainBook:
    """The same rules without a heap: everything is looked at for every eviction."""

    def __init__(self, slots):
        self.slots, self.kept, self.clock, self.turn = slots, {}, 0.0, 0

    def put(self, key, parent, seconds):
        if len(self.kept) == self.slots:
            parents = {one["parent"] for one in self.kept.values()} | {parent}
            free = [k for k, one in self.kept.items() if not one["pins"] and k not in parents]
            if not free:
                return False
            leaving = min(free, key=lambda k: (self.kept[k]["rank"], self.kept[k]["turn"]))
            self.clock = self.kept.pop(leaving)["rank"]
        self.kept[key] = {"parent": parent, "seconds": seconds, "pins": 1}
        self.use(key)
        return True

    def use(self, key):
        self.turn += 1
        one = self.kept[key]
        one["rank"], one["turn"] = self.clock + one["seconds"], self.turn


@given(slots=st.integers(1, 6), data=st.data())
@settings(max_examples=150)
def test_who_leaves_is_who_a_plain_search_would_choose(slots, data):
    book, plain = SlotBook(slots), PlainBook(slots)
    moves = st.tuples(st.integers(0, 4), st.integers(0, 8), st.integers(1, 4))
    for move, number, seconds in data.draw(st.lists(moves, max_size=60)):
        key, parent = bytes([number + 1]), bytes([number]) if number else b""
        if move <= 1 and key not in plain.kept:
            slot = book.put(key, parent, float(seconds))
            assert (slot is not None) == plain.put(key, parent, float(seconds))
            assert slot is None or not book.has(key)
        elif key not in plain.kept:
            continue
        elif move == 2 and plain.kept[key]["pins"]:
            plain.kept[key]["pins"] = 0
            book.ready(key)
        elif move == 3:
            plain.use(key)
            book.use(key)
        elif move == 4 and not plain.kept[key]["pins"]:
            del plain.kept[key]
            book.drop(key)
        assert set(book) == set(plain.kept)
        used = [book.get(key).slot for key in book]
        assert len(set(used)) == len(used) <= slots

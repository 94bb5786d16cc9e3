"""Tiers of the KV cache: the gate and the eviction against brute force, and engines whose pages left and came back."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import at_rest, greedy, prompt_of, submit, tiny_engine

from cairn.core.errors import ConfigError, RequestError
from cairn.models.cache import CacheGroup
from cairn.serve.config import EngineConfig
from cairn.serve.engine.page_events import PageEvent
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.tiers import disk_segments, disk_tier
from cairn.serve.tiers.disk_tier import DiskTier
from cairn.serve.tiers.load_plan import (
    WORTH,
    Source,
    Stored,
    longest_stored,
    plan_load,
    worth_storing,
)
from cairn.serve.tiers.object_pages import ObjectPages
from cairn.serve.tiers.open_tiers import _sample
from cairn.serve.tiers.page_copies import Copied, PageCopies
from cairn.serve.tiers.slot_table import SlotTable


@pytest.fixture(autouse=True, scope="module")
def small_trial():
    """How fast the disk is does not matter here: loading always pays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_segments, "TRIED_BYTES", 1 << 16)
        yield


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
    splits = [(f, n) for n in lasts for f in range(found, n)]
    bounds = [alone if f == found else min(alone, seconds(found, n)) for f, n in splits]
    took = [seconds(*one) for one in splits]
    pairs = list(zip(took, [WORTH * bound for bound in bounds], strict=True))
    best = min((one for one, bound in pairs if one < bound), default=alone)
    fastest = min(took, default=alone)
    if all(abs(one - bound) > 1e-9 for one, bound in pairs):
        assert plan.seconds == pytest.approx(best, abs=1e-6)
    assert plan.seconds <= fastest / WORTH + 1e-9
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
    st.sampled_from([CacheGroup(), CacheGroup("window", 3), CacheGroup("window", 9)]),
    min_size=1,
    max_size=3,
)


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
    book, plain = SlotTable(slots), PlainBook(slots)
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


# -- engines -------------------------------------------------------------------------------------


LONG = prompt_of(70, 3)
OTHERS = [prompt_of(60, seed) for seed in range(4, 8)]


def evict(engine):
    """Others fill the device's cache, so that nothing of LONG is left there."""
    submit(engine, OTHERS, max_tokens=1)
    engine.run()


def answered(engine, prompts):
    requests = submit(engine, prompts)
    engine.run()
    return [request.outputs for request in requests]


@pytest.mark.parametrize(("family", "overlap"), [("qwen3", True), ("gemma3", False)])
def test_a_prefix_that_left_the_device_comes_back_from_the_host(family, overlap):
    engine = tiny_engine(family, pages=9, host="64MiB", overlap=overlap)
    first, again = [*LONG, 1, 2, 3], [*LONG, 4, 5]
    assert answered(engine, [first]) == [greedy(family, first)]
    evict(engine)
    (request,) = submit(engine, [again])
    engine.run()
    assert request.outputs == greedy(family, again)
    assert (request.cached, request.ledger.host_tokens) == (64, 64)
    assert engine.tiers.counts.host_tokens >= 64
    at_rest(engine)


class Slow(PageCopies):
    """Copies that end when the test says so, and land only then."""

    def __init__(self, runner, slots):
        super().__init__(runner, slots)
        self.open, self.open_out, self.asked = True, True, []

    def into(self, slots, pages):
        if self.open:
            return super().into(slots, pages)
        coming = SlowCopy(lambda: super(Slow, self).into(slots, pages))
        self.asked.append(coming)
        return coming

    def out(self, pages, slots):
        if self.open_out:
            return super().out(pages, slots)
        self.asked.append(SlowCopy(lambda: super(Slow, self).out(pages, slots)))
        return self.asked[-1]


class SlowCopy(Copied):
    def __init__(self, act):
        super().__init__(0)
        self.act, self.ended, self.held = act, False, False

    def finish(self):
        if not self.ended:
            self.act()
        self.ended = True

    def done(self):
        return self.ended

    def wait(self):
        self.finish()

    def hold_steps(self):
        self.held = True
        self.finish()


def slow_engine(**more):
    engine = tiny_engine("qwen3", pages=9, host="64MiB", **more)
    tiers = engine.tiers
    tiers.copies = Slow(engine.runner, len(tiers.copies.memory_SB))
    answered(engine, [[*LONG, 1]])
    evict(engine)
    tiers.copies.open = False
    return engine, tiers.copies


def test_copies_to_the_host_are_short_beside_steps_and_what_they_miss_is_forgotten():
    engine = tiny_engine("qwen3", pages=16, host="64MiB", overlap=True)
    tiers, most = engine.tiers, 2 * engine.scheduler.limits.pages
    copies = tiers.copies = Slow(engine.runner, len(tiers.copies.memory_SB))
    copies.open_out = False
    tiers.compute = lambda first, last: 1e3
    tiers.rate = copies.page_bytes / 600  # worth a copy, and no step is long enough for two
    begin, beside = copies.out, []

    def out(pages, slots):
        if tiers._flying is not None:
            beside.append((len(pages), sum(not one.done() for one in copies.asked)))
        return begin(pages, slots)

    copies.out = out
    # There is always a step in flight, and its first page, which is copied first, does not change hands.
    submit(engine, [prompt_of(20, 90)], max_tokens=60)
    prompts = [prompt_of(30, seed) for seed in range(60)]
    requests = submit(engine, prompts, max_tokens=1)
    while not all(one.finish for one in requests):
        engine.step()
        assert len(tiers._unstored) <= most
    engine.run()
    assert set(beside) == {(1, 0)}  # one page, and none before it under way
    tiers.settle()
    assert not tiers._unstored
    copies.open_out = True
    again = submit(engine, prompts, max_tokens=1)
    engine.run()
    assert [one.outputs for one in again] == [one.outputs for one in requests]
    assert requests[0].outputs == greedy("qwen3", prompts[0])[:1]
    at_rest(engine)


def test_a_step_that_fails_is_beside_no_copy(monkeypatch):
    engine = tiny_engine("qwen3", pages=9, host="64MiB")
    (request,) = submit(engine, [LONG])

    def fails(step):
        raise RuntimeError("no kernel")

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "launch", fails)
        engine.run()
    assert request.finish == "error"
    assert (engine.tiers._flying, len(engine.tiers._scheduled)) == (None, 0)
    assert answered(engine, [LONG]) == [greedy("qwen3", LONG)]
    at_rest(engine)


def test_who_waits_for_pages_keeps_nobody_else_waiting():
    engine, copies = slow_engine()
    waiting, other = submit(engine, [[*LONG, 4, 5], [1, 2, 3]])
    while not other.finish:
        engine.step()
    assert (other.outputs, waiting.outputs) == (greedy("qwen3", [1, 2, 3]), [])
    copies.asked[0].finish()
    engine.run()
    assert waiting.outputs == greedy("qwen3", [*LONG, 4, 5])
    at_rest(engine)


def test_a_request_that_leaves_holds_the_next_step_until_its_copy_has_landed():
    engine, copies = slow_engine()
    (waiting,) = submit(engine, [[*LONG, 4, 5]])
    engine.scheduler.schedule()
    assert engine.abort(waiting.id) is waiting
    (coming,) = copies.asked
    for prompt in OTHERS[:3]:  # they take the pages that bytes may still land in
        assert answered(engine, [prompt]) == [greedy("qwen3", prompt)]
    assert coming.held
    assert answered(engine, [[*LONG, 4]]) == [greedy("qwen3", [*LONG, 4])]
    at_rest(engine)


def test_the_front_is_computed_while_the_tail_arrives():
    engine, copies = slow_engine(chunked=True)
    tiers = engine.tiers
    tiers.rate, page_bytes = 1e6, tiers.copies.page_bytes
    tiers.compute = lambda first, last: (last - first) * page_bytes / 1e6
    (request,) = submit(engine, [[*LONG, 4, 5]])
    engine.step()
    assert (request.loading.first, request.loading.last, request.loading.told) == (2, 4, True)
    engine.step()
    engine.step()
    assert (request.computed, request.outputs) == (32, [])
    copies.asked[0].finish()
    engine.run()
    assert request.outputs == greedy("qwen3", [*LONG, 4, 5])
    assert (request.cached, request.ledger.host_tokens) == (32, 32)
    at_rest(engine)


@pytest.mark.parametrize("damage", ["none", "bytes", "truncated", "other model"])
def test_pages_of_the_disk_outlive_the_server_and_are_believed_only_if_they_are_whole(
    tmp_path, damage
):
    disk = f"{tmp_path}:64MiB"
    before = tiny_engine("qwen3", pages=9, host="64MiB", disk=disk)
    assert answered(before, [[*LONG, 1]]) == [greedy("qwen3", [*LONG, 1])]
    before.tiers.settle()
    before.tiers.disk._writers.shutdown()  # what is being written is not given up
    before.tiers.close()
    (segment,) = tmp_path.glob("*/segment-*")
    content = bytearray(segment.read_bytes())
    if damage == "bytes":
        content[2 * 4096 + 77 :: 3 * 4096] = b"x" * len(content[2 * 4096 + 77 :: 3 * 4096])
        content[4096 + 5 :: 4096] = bytes(byte ^ 1 for byte in content[4096 + 5 :: 4096])
    if damage == "truncated":
        content = content[: len(content) * 2 // 5]
    if damage == "other model":
        model = before.tiers.disk.segments.model.encode()
        content = content.replace(model, model[::-1])
    segment.write_bytes(content)
    after = tiny_engine("qwen3", pages=9, host="64MiB", disk=disk)
    (request,) = submit(after, [[*LONG, 4, 5]])
    after.run()
    assert request.outputs == greedy("qwen3", [*LONG, 4, 5])
    loaded, failed = request.ledger.disk_tokens, after.tiers.counts.failed_loads
    assert {"none": (64, 0), "other model": (0, 0)}.get(damage, (loaded, failed)) == (
        loaded,
        failed,
    )
    assert damage in ("none", "other model") or loaded < 64
    at_rest(after)
    after.tiers.close()


@pytest.mark.parametrize("damage", ["none", "bytes", "gone"])
def test_pages_of_an_object_store_are_found_by_the_next_server(damage):
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://kv-{damage}"
    before = tiny_engine("qwen3", pages=9, host="64MiB", disk=f"{url}:64MiB")
    assert answered(before, [[*LONG, 1]]) == [greedy("qwen3", [*LONG, 1])]
    before.tiers.settle()
    before.tiers.disk._writers.shutdown()  # what is being written is not given up
    before.tiers.close()
    files, root = fsspec.core.url_to_fs(url)
    names = sorted(files.find(root))
    assert len(names) >= 4
    after = tiny_engine("qwen3", pages=9, host="64MiB", disk=f"{url}:64MiB")
    assert len(after.tiers.disk.book) == len(names)
    for name in names:
        if damage == "bytes":
            files.pipe_file(name, files.cat_file(name)[:-1] + b"?")
        elif damage == "gone":
            files.rm_file(name)
    (request,) = submit(after, [[*LONG, 4, 5]])
    after.run()
    assert request.outputs == greedy("qwen3", [*LONG, 4, 5])
    assert request.ledger.disk_tokens == (64 if damage == "none" else 0)
    at_rest(after)
    after.tiers.clear()
    after.tiers.close()
    assert damage != "none" or not files.find(root)


def test_an_object_store_keeps_as_many_pages_as_it_has_room_for_and_names_a_wrong_address():
    fsspec = pytest.importorskip("fsspec")
    page_B = np.arange(64, dtype=np.uint8)
    store = ObjectPages("memory://few", 3 * 64, 64, "m")
    assert (store.measure() > 0, store.slots, list(store.filled())) == (True, 3, [])
    for slot, key in ((0, b"a"), (1, b"b"), (2, b"c"), (0, b"d")):  # the first one has left
        store.write(slot, key, b"p", 0.25, page_B)
    other = ObjectPages("memory://few", 3 * 64, 64, "m")
    other.write(0, b"d", b"p", 0.5, page_B)  # slower there, and the same page
    store._files.pipe_file(f"{store.folder}/abc.", b"")  # no name of ours
    again = ObjectPages("memory://few", 3 * 64, 64, "m")
    again.measure()
    found = {one.header.key: one for one in again.filled()}
    assert set(found) == {b"b", b"c", b"d"}
    assert (found[b"d"].header.parent, found[b"d"].header.seconds > 0) == (b"p", True)
    store.write(1, b"d", b"p", 0.25, page_B)  # read as damaged, and written again in another slot
    store.write(0, b"e", b"p", 0.25, page_B)
    into_B = np.zeros(64, np.uint8)
    again.read(found[b"d"].slot, b"d", into_B)
    assert np.array_equal(into_B, page_B)
    with pytest.raises(disk_segments.Damaged):
        again.read(found[b"d"].slot, b"b", into_B)
    assert not list(ObjectPages("memory://few", 3 * 64, 64, "another").filled())
    fsspec.filesystem("memory").rm("/few", recursive=True)
    for wrong, said in (("nothing://x", "cannot be opened"), ("memory://x", "a page needs")):
        with pytest.raises(ConfigError, match=said):
            ObjectPages(wrong, 64 if "nothing" in wrong else 1, 64, "m")


def test_an_object_store_that_fails_for_a_while_is_used_again_and_loses_no_page(monkeypatch):
    pytest.importorskip("fsspec")
    page_B, into_B, now = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8), [0.0]
    store = ObjectPages("memory://fails", 2 * 64, 64, "m")
    tier = DiskTier(store)
    monkeypatch.setattr(disk_tier, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def write(key):
        assert tier.write(key, b"", 1.0, page_B)
        wait_for(tier._writing.values())
        assert tier.written() == [key]

    def read(key):
        result = tier.read([key], [into_B]).result()
        tier.have_read([key], result)
        return result

    def fails(*_, **__):
        raise RuntimeError("slow down")

    write(b"a")
    write(b"b")
    with monkeypatch.context() as broken:
        for name in ("pipe_file", "cat_file", "rm"):
            broken.setattr(store._files, name, fails)
        write(b"c")  # in the slot of the first, whose object is still known
        assert (tier.broken, len(tier.book)) == ("RuntimeError: slow down", 1)
        assert not tier.wants(b"d", b"")
        assert (read(b"b").unread, tier.has(b"b")) == ([b"b"], False)
        with pytest.raises(RequestError, match="slow down"):
            tier.clear()
    assert len(store._names) == 2
    tier._adopt()
    now[0] += disk_tier.PAUSE_S
    assert tier.wants(b"d", b"")
    assert tier.has(b"b")
    assert read(b"b") == ([], 0.0, ())
    assert np.array_equal(into_B, page_B)
    write(b"d")
    assert tier.broken is None
    assert {one.header.key for one in store.filled()} == {b"b", b"d"}
    store._files.rm_file(f"{store.folder}/{store._names[0]}")  # somebody else is faster
    tier.clear()
    assert not store._files.find(store.folder)
    tier.close()


def test_threads_that_write_equal_pages_to_an_object_store_delete_none_that_is_in_use():
    pytest.importorskip("fsspec")
    store, page_B = ObjectPages("memory://threads", 8 * 64, 64, "m"), np.arange(64, dtype=np.uint8)
    keys = [bytes([key]) for key in range(3)]

    def write(own):  # slots of its own, as the book gives them out; pages that others write, too
        for turn in range(100):
            store.write(own + turn % 2, keys[(own + turn) % 3], b"", 1.0, page_B)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(0, 8, 2)))
    there = {name.rpartition("/")[2] for name in store._files.find(store.folder)}
    assert there == set(store._names.values()) == set(store._users)
    assert store._users.total() == 8


def test_a_full_disk_is_left_alone_and_other_servers_keep_out(tmp_path, monkeypatch):
    engine = tiny_engine("qwen3", pages=9, host="64MiB", disk=f"{tmp_path}:64MiB")
    with pytest.raises(ConfigError, match="another server"):
        tiny_engine("qwen3", pages=9, host="64MiB", disk=f"{tmp_path}:64MiB")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine.tiers.disk.segments, "write", full)
    answered(engine, [[*LONG, 1]])
    engine.tiers.settle()
    engine.tiers.disk._writers.shutdown()
    evict(engine)
    assert "No space left" in engine.tiers.disk.broken
    assert len(engine.tiers.disk.book) == 0
    assert answered(engine, [[*LONG, 4]]) == [greedy("qwen3", [*LONG, 4])]


def test_other_adapters_salts_and_weights_find_nothing(tmp_path):
    engine = tiny_engine("qwen3", pages=9, host="64MiB", disk=f"{tmp_path}:64MiB")
    answered(engine, [[*LONG, 1]])
    evict(engine)
    for name, more in enumerate([{"salt": "b"}, {"identity": b"adapter 1;"}]):
        request = Request(
            f"r{name}", [*LONG, 1], SamplingParams(temperature=0.0, max_tokens=2), **more
        )
        engine.add(request)
        engine.run()
        assert (request.cached, request.ledger.host_tokens) == (0, 0)
    engine.weights_changed(1)
    (request,) = submit(engine, [[*LONG, 1]])
    engine.run()
    assert request.cached == 0
    # One that ran while the weights changed, and waits again, keeps the adapter in its name.
    (request,) = submit(engine, [[*LONG, 1]])
    request.identity = b"adapter 1;"
    engine.weights_changed(2)
    assert request.identity == b"weights 2;adapter 1;"
    engine.tiers.close()


def test_what_a_request_fills_after_a_change_of_the_weights_is_stored_nowhere(tmp_path):
    """It goes on under the name of the old weights, and its pages are of both."""
    engine = tiny_engine("qwen3", host="64MiB", disk=f"{tmp_path}:64MiB")
    (request,) = submit(engine, [LONG[:20]], max_tokens=40)
    while not request.outputs:
        engine.step()
    engine.tiers.settle()
    before = set(engine.tiers.host)
    assert len(before) == 1
    followed = engine.scheduler.blocks.prefix.follow()
    assert [event.stored for event in followed.take()] == [True]
    engine.weights_changed(1)
    assert followed.take() == [PageEvent(False, b"")]  # nobody who comes finds what was told
    engine.run()
    engine.tiers.settle()
    assert (set(engine.tiers.host), set(engine.tiers.disk.book)) == (before, before)
    (request,) = submit(engine, [LONG[:20]])
    engine.run()
    engine.tiers.settle()
    assert len(engine.tiers.host) > 1  # by the new weights alone, in host memory alone
    assert set(engine.tiers.disk.book) == before
    engine.tiers.close()


def test_a_reset_leaves_nothing_on_the_host_nor_on_the_disk(tmp_path):
    disk = f"{tmp_path}:64MiB"
    engine = tiny_engine("qwen3", pages=9, host="64MiB", disk=disk)
    answered(engine, [[*LONG, 1]])  # pages of it are still on their way to the disk
    engine.reset_prefix_cache()
    assert (len(engine.tiers.host), len(engine.tiers.disk.book)) == (0, 0)
    (request,) = submit(engine, [[*LONG, 1]])
    engine.run()
    assert (request.cached, request.outputs) == (0, greedy("qwen3", [*LONG, 1]))
    engine.reset_prefix_cache()
    engine.tiers.close()
    after = tiny_engine("qwen3", pages=9, host="64MiB", disk=disk)
    assert len(after.tiers.disk.book) == 0
    after.tiers.close()


def test_the_disk_knows_a_checkpoint_that_was_written_again_between_its_samples(tmp_path):
    """By its time, which an object store, shared by several machines, cannot go by."""

    def digest(timed=True):
        found = hashlib.sha256()
        _sample(SimpleNamespace(path=tmp_path), found, timed)
        return found.digest()

    file = tmp_path / "model.safetensors"
    content = bytearray(256 * 8192)
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    before, shared = digest(), digest(timed=False)
    assert digest() == before
    os.utime(file, ns=(2, 2))
    assert digest(timed=False) == shared
    content[5000] = 1
    file.write_bytes(content)
    assert digest() != before
    content[0] = 1
    file.write_bytes(content)
    assert digest(timed=False) != shared


def test_what_cannot_be_offloaded_is_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match="keep a state"):
        tiny_engine("qwen3_next", host="64MiB")
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        tiny_engine("qwen3", host="64MiB", prefix=False)
    with pytest.raises(ConfigError, match="DIR:SIZE"):
        tiny_engine("qwen3", host="64MiB", disk="nowhere")
    with pytest.raises(ConfigError, match="kv_offload_host"):
        EngineConfig(model="x", kv_offload_disk=f"{tmp_path}:1GiB")
    with pytest.raises(ConfigError, match="a page"):
        tiny_engine("qwen3", host="1KiB")


def test_small_tiers_under_many_requests_change_no_token():
    """Pages leave and come back all the time, requests are preempted while they wait."""
    engine = tiny_engine("qwen3", pages=7, chunked=True, host="200KiB", overlap=True)
    prompts = [[*LONG[: 16 + seed * 9], seed] for seed in range(6)] * 3 + OTHERS[:3]
    requests = submit(engine, prompts)
    while engine.has_work:
        engine.step()
        engine.scheduler.queues.check_integrity()
    assert [r.outputs for r in requests] == [greedy("qwen3", prompt) for prompt in prompts]
    assert engine.tiers.counts.host_tokens > 0
    at_rest(engine)

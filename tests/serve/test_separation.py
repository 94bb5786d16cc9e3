"""A prompt on one engine, its answer on another: the tokens of one engine, whatever happens to the pages on the way."""

import itertools
import queue
from collections import deque

import msgspec
import pytest
import tiny_engines
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import PAGE, VOCABULARY, at_rest, greedy, prompt_of, tiny_engine

from cairn.comm.transfer.choose_transport import TRANSPORTS, unusable
from cairn.comm.transfer.lease import Terms
from cairn.core.errors import CairnError, ConfigError, RequestError
from cairn.serve.config import EngineConfig, RoleConfig
from cairn.serve.engine.facts import stats_of
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start
from cairn.serve.separation import memory
from cairn.serve.separation.decode import Coming, DecodeSide
from cairn.serve.separation.handover_blocks import HandoverBlocks
from cairn.serve.separation.pair import Separated
from cairn.serve.separation.prefill import Ask, Handoff, PrefillSide
from cairn.serve.separation.prefill_client import PrefillClient
from cairn.serve.separation.remote_prefill_policy import Pending, RemoteCosts, remote_pays
from cairn.serve.separation.roles import DecodeEngine, with_role
from cairn.serve.separation.timed_answers import generate_alone
from cairn.serve.tiers.page_copies import Copied

MOST = 14
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((5, 16, 17, 40, 63, 33))]


def asks_of(prompts, **params):
    wanted = {"temperature": 0.0, "max_tokens": MOST} | params
    return [
        Ask(id=f"r{number}", prompt=prompt, params=SamplingParams(**wanted))
        for number, prompt in enumerate(prompts)
    ]


def pair_of(family="qwen3", transport="tcp", prefill=None, decode=None, **both):
    one = PrefillSide(tiny_engine(family, **(prefill or {})), transport=transport, **both)
    return Separated(
        one, DecodeSide(tiny_engine(family, **(decode or {})), transport=transport, **both)
    )


def rest(pair):
    """Both engines have everything back; the last release may still be on its way."""
    for _ in range(200):
        pair.prefill.step(0.01)
        pair.decode.step()
        pair.decode._receiver.step(pair.decode._clock(), 0.005)
        if not pair.prefill.holding:
            break
    for side in (pair.prefill, pair.decode):
        at_rest(side.engine)
    pair.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_of_two_engines_are_those_of_one(transport):
    if (why := unusable(transport)) is not None:
        pytest.skip(why)
    pair = pair_of(transport=transport)
    answers = pair.generate(asks_of(PROMPTS))
    assert [one.tokens for one in answers] == [greedy("qwen3", prompt) for prompt in PROMPTS]
    assert all(one.arrival.why_not is None for one in answers)
    assert all(len(one.at_s) == len(one.tokens) == MOST for one in answers)
    kv = pair.decode.memory.layout.contents
    token = kv.layers * 2 * kv.kv_heads * kv.width * 4
    assert [one.arrival.bytes for one in answers] == [token * len(prompt) for prompt in PROMPTS]
    rest(pair)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_other_families_and_staging_and_prompts_in_pieces(family):
    """Staged memory is what a GPU's pages go through; here it is the same copies on a CPU."""
    pair = pair_of(family, prefill={"chunked": True}, staged=True)
    answers = pair.generate(asks_of(PROMPTS))
    assert [one.tokens for one in answers] == [greedy(family, prompt) for prompt in PROMPTS]
    rest(pair)


def test_a_seed_penalties_and_least_lengths_go_on_where_they_were():
    wanted = {
        "temperature": 0.9,
        "seed": 7,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "min_tokens": 9,
        "stop_token_ids": list(range(0, VOCABULARY, 3)),
    }
    engine = tiny_engine("qwen3")
    requests = tiny_engines.submit(engine, PROMPTS, **wanted)
    engine.run()
    pair = pair_of()
    answers = pair.generate(asks_of(PROMPTS, **wanted))
    assert [one.tokens for one in answers] == [request.outputs for request in requests]
    assert [one.finish for one in answers] == [request.finish for request in requests]
    rest(pair)


def test_what_ends_with_its_first_token_needs_no_second_engine():
    pair = pair_of()
    first = [greedy("qwen3", prompt)[0] for prompt in PROMPTS]
    answers = pair.generate(asks_of(PROMPTS, max_tokens=1))
    assert [one.tokens for one in answers] == [[token] for token in first]
    assert {one.finish for one in answers} == {"length"}
    stopped = [
        msgspec.structs.replace(ask, id=f"s{ask.id}")
        for ask in asks_of(PROMPTS, stop_token_ids=first)
    ]
    answers = pair.generate(stopped)
    assert [(one.tokens, one.finish) for one in answers] == [([token], "stop") for token in first]
    assert not pair.decode.arrivals
    rest(pair)


def test_a_prefix_that_the_second_engine_has_does_not_travel_again():
    pair = pair_of()
    long = prompt_of(70, 3)
    asks = asks_of([[*long, 1, 2, 3], [*long, 4, 5]])
    answers = [*pair.generate(asks[:1]), *pair.generate(asks[1:])]
    assert [one.tokens for one in answers] == [greedy("qwen3", ask.prompt) for ask in asks]
    assert [one.arrival.cached for one in answers] == [0, 64]
    rest(pair)


def test_small_caches_on_both_sides():
    """Pages are short: hand-overs wait, arrivals are given up, requests preempted; tokens stay the same."""
    pair = pair_of(prefill={"pages": 6}, decode={"pages": 6})
    answers = pair.generate(asks_of(PROMPTS, max_tokens=20))
    assert [one.tokens for one in answers] == [greedy("qwen3", prompt, 20) for prompt in PROMPTS]
    rest(pair)


def test_pages_that_are_gone_are_computed_again():
    pair = pair_of(terms=Terms(lease_s=0.5, beat_s=0.05, unclaimed_s=0.0, read_s=5.0))
    for ask in asks_of(PROMPTS[:3]):
        pair.prefill.add(ask)
    handoffs = []
    while len(handoffs) < 3:
        handoffs += pair.prefill.step()
    while pair.prefill.holding:  # nobody has claimed them in time
        pair.prefill.step(0.01)
    tokens = {handoff.ask.id: [handoff.first] for handoff in handoffs}
    for handoff in handoffs:
        pair.decode.add(handoff)
    while pair.decode.has_work:
        pair.prefill.step()
        for output in pair.decode.step():
            tokens[output.request.id] += output.tokens
    assert list(tokens.values()) == [greedy("qwen3", prompt) for prompt in PROMPTS[:3]]
    assert all("given its pages away" in one.why_not for one in pair.decode.arrivals)
    rest(pair)


@pytest.mark.parametrize("moment", range(5))
def test_the_prefill_side_dies_at_any_moment(moment):
    """Before it was asked, with the prompt in line, on offer, being read, or read: the tokens are the same."""
    pair = pair_of()
    (ask,) = asks_of(PROMPTS[4:5])
    pair.prefill.add(ask)
    (handoff,) = pair.prefill.step()
    if moment == 0:
        pair.prefill.close()
    pair.decode.add(handoff)
    tokens = [handoff.first]
    for turn in itertools.count(1):
        tokens += [token for output in pair.decode.step(0.002) for token in output.tokens]
        if turn == moment:
            pair.prefill.close()
        if not pair.decode.has_work:
            break
        if turn < moment:
            pair.prefill.step()
    assert tokens == greedy("qwen3", ask.prompt)
    assert moment or pair.decode.arrivals[0].why_not is not None
    at_rest(pair.decode.engine)
    pair.decode.close()


@pytest.mark.parametrize("moment", [0, 1, 3])
def test_the_decode_side_dies_at_any_moment(moment):
    """Its pages are free again, and another decode side gives the whole answer."""
    pair = pair_of(terms=Terms(lease_s=0.3, beat_s=0.05, unclaimed_s=0.3, read_s=1.0))
    first, again = asks_of([PROMPTS[4]] * 2)
    pair.prefill.add(first)
    (handoff,) = pair.prefill.step()
    pair.decode.add(handoff)
    for _ in range(moment):
        pair.decode.step(0.002)
    pair.decode.close()
    while pair.prefill.holding:
        pair.prefill.step(0.01)
    at_rest(pair.prefill.engine)
    other = Separated(pair.prefill, DecodeSide(tiny_engine("qwen3"), transport="tcp"))
    (answer,) = other.generate([again])
    assert answer.tokens == greedy("qwen3", again.prompt)
    rest(other)


def test_an_engine_changes_its_role_and_keeps_its_prefixes():
    engine = tiny_engine("qwen3")
    prompt = [*prompt_of(40, 2), 7]
    events = engine.scheduler.blocks.prefix.follow()
    tiny_engines.submit(engine, [prompt])
    engine.run()
    told = events.take()
    assert len(told) == 3
    engine.scheduler.queues.preemptions = 7
    for role in ("both", "prefill", "decode", "prefill", "both"):
        config = RoleConfig(role=role, prefill_urls=["http://127.0.0.1:1"], prefill_min_tokens=99)
        engine = with_role(engine, config)
        request = Request(f"in {role}", prompt, SamplingParams(temperature=0.0, max_tokens=MOST))
        engine.add(request)
        with pytest.raises(RequestError, match="under way"):
            with_role(engine, RoleConfig(role="both" if role == "prefill" else "prefill"))
        while not request.finish:
            engine.step()
        assert request.outputs == greedy("qwen3", prompt)[: 1 if role == "prefill" else MOST]
        if role != "prefill":
            assert request.cached == 32
        if request.handoff:
            engine.abort(request.id)
            (offer,) = engine.side._offers
            engine.side._free(engine.side._sender.withdraw(offer))
        if role == "decode":
            engine._now.remote_prefills, engine._now._unanswered = 3, 2
    assert events.take() == []  # what was told is still there
    stats = stats_of(engine)
    assert (stats.preempted, stats.remote_prefills, stats.prefill_fallbacks) == (7, 3, 2)
    with pytest.raises(ConfigError, match="role prefill"):
        with_role(engine, RoleConfig(role="prefill")).sleep()
    engine = with_role(engine, RoleConfig(role="both"))
    engine.sleep()
    engine.wake()
    (request,) = tiny_engines.submit(engine, [prompt])
    engine.run()
    assert (request.cached, request.outputs) == (0, greedy("qwen3", prompt))


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_pause_that_aborts_leaves_nothing_of_any_role(role, monkeypatch):
    """Wherever requests are: in line, in the middle of a prompt, computed without room for an offer, asked for."""
    urls = ["http://127.0.0.1:1"]
    engine = tiny_engine("qwen3")
    engine = with_role(engine, RoleConfig(role=role, prefill_urls=urls, prefill_min_tokens=30))
    if role == "prefill":
        monkeypatch.setattr(engine.side.memory, "place", lambda pages: None)
    if role == "decode":
        engine._client.ask = lambda ask, reply: None  # nobody answers
    params = SamplingParams(temperature=0.0, max_tokens=MOST)
    requests = [Request(n, prompt, params) for n, prompt in enumerate(PROMPTS)]
    for request in requests[:-1]:
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine.add(requests[-1])
    left = [request for request in requests if not request.finish]
    assert len(left) > 1
    assert engine.pause(keep=True) == []
    aborted = engine.pause(keep=False)
    assert {one.id: one.finish for one in aborted} == {one.id: "abort" for one in left}
    assert all(one is requests[one.id] for one in aborted)
    if role == "prefill":
        side = engine.side
        assert [*side._asks, *side._waiting, *side._offers, *engine._requests] == []
    if role == "decode":
        assert [*engine._asked, *engine.side._expected] == []
    engine.step()
    assert not engine.has_work
    engine.resume()
    at_rest(engine._engine)


def test_what_does_not_travel_is_computed_here():
    config = RoleConfig(role="decode", prefill_urls=["http://127.0.0.1:1"], prefill_min_tokens=1)
    engine = with_role(tiny_engine("qwen3"), config)

    def is_remote(**more):
        return engine._is_remote(Request("r", [1, 2, 3], SamplingParams(), **more), 0.0)

    assert is_remote()
    assert not is_remote(adapter=1)
    assert not is_remote(identity=b"adapter 1;")
    engine.weights_changed(1)
    assert not is_remote()
    engine.close()
    side = PrefillSide(tiny_engine("qwen3"), transport="tcp")
    side.engine.weights_changed(1)
    with pytest.raises(RequestError, match="replaced by version 1"):
        side.add(asks_of(PROMPTS)[0])
    side.close()


def test_whatever_goes_wrong_while_a_server_is_asked_is_answered():
    """A key with a line break, as a file that was read has it, is no header: nobody foresaw that error."""
    client, replies = PrefillClient(["http://127.0.0.1:9"], 1.0, "key\n"), queue.SimpleQueue()
    client.ask(asks_of([PROMPTS[0]])[0], replies.put)
    reply = replies.get(timeout=30)
    assert (reply.id, reply.found) == ("r0", None)
    assert "ValueError" in reply.error
    client.close()


def test_the_bandwidth_is_known_however_many_prompts_have_come():
    side = DecodeSide(tiny_engine("qwen3"), transport="tcp")
    engine = DecodeEngine(side, None, RoleConfig(role="decode"))
    side.arrivals = deque(maxlen=1)
    one = Coming(None, Request("r", [1, 2, 3], SamplingParams()), 9, 0.0)
    for seconds in (1.0, 2.0):
        before = engine.costs.bytes_per_s
        side._note(one, seconds, None)
        assert engine.costs.bytes_per_s != before
    engine.close()


def test_pages_that_are_still_copied_out_are_not_written_by_others():
    pair = pair_of(decode={"host": "64MiB"})
    tiers, held = pair.decode.engine.tiers, []
    copied = Copied(0)
    copied.hold_steps = lambda: held.append(True)
    tiers._busy = dict.fromkeys(range(1, 97), copied)
    pair.prefill.add(asks_of(PROMPTS[4:5])[0])
    (handoff,) = pair.prefill.step()
    pair.decode.add(handoff)
    pair.decode._begin(pair.decode._clock())
    assert held == [True]
    pair.close()


def test_a_prompt_that_can_never_be_offered_is_refused(monkeypatch):
    monkeypatch.setattr(memory.KVMemory.__init__, "__defaults__", (None, 3))
    side = PrefillSide(tiny_engine("qwen3"), transport="tcp", staged=True)
    short, long = asks_of([prompt_of(48, 1), prompt_of(49, 1)])
    side.add(short)
    with pytest.raises(RequestError, match="has 4 pages, and 3 can be on offer"):
        side.add(long)
    side.close()


COSTS = st.builds(
    RemoteCosts,
    token_s=st.floats(1e-6, 1e-2),
    way_s=st.floats(0, 1),
    bytes_per_s=st.floats(1e6, 1e11),
    known_at=st.just(0.0),
)


@given(
    costs=COSTS,
    tokens=st.integers(0, 10**5),
    bytes=st.integers(0, 10**10),
    decoding=st.integers(0, 99),
    ahead=st.integers(0, 10**5),
    pending=st.builds(Pending, st.integers(0, 9), st.integers(0, 10**5)),
)
def test_a_prompt_is_computed_elsewhere_where_that_spares_more_than_it_costs(
    costs, tokens, bytes, decoding, ahead, pending
):
    load = (tokens, bytes, decoding, ahead)
    pays = remote_pays(costs, *load, 1.0)
    here = (tokens * decoding / 2 + ahead) * costs.token_s
    assert pays == (here > costs.way_s + bytes / costs.bytes_per_s)
    assert pays >= remote_pays(costs, *load, 1.0, pending)  # a line there never speaks for it
    assert remote_pays(costs, *load, 1e3)  # known too long ago
    assert remote_pays(RemoteCosts(), *load, 1.0)
    if pays:  # more of those who would wait never speaks against it, nor does a longer line or a faster way
        assert remote_pays(costs, tokens, bytes, decoding + 1, ahead, 1.0)
        assert remote_pays(costs, tokens, bytes, decoding, ahead + 1, 1.0)
        assert remote_pays(msgspec.structs.replace(costs, way_s=0.0), *load, 1.0)


def test_a_prompt_that_would_have_to_wait_here_is_computed_elsewhere():
    config = RoleConfig(role="decode", prefill_urls=["http://127.0.0.1:1"], prefill_min_tokens=1)
    engine = with_role(tiny_engine("qwen3"), config)
    engine.costs.note_reply(100, 1.0, 1.5, 0.0)
    engine.costs.note_pages(10**9, 1.0)
    request = Request("r", prompt_of(40, 2), SamplingParams())
    assert not engine._is_remote(request, 1.0)  # an idle server computes it itself
    tiny_engines.submit(engine.side.engine, [prompt_of(63, 1)])
    assert engine._is_remote(request, 1.0)
    engine.side.engine.run()
    engine.close()


def test_engines_of_different_models_refuse_each_other():
    pair = pair_of()
    other = DecodeSide(tiny_engine("llama"), transport="tcp")
    pair.prefill.add(asks_of(PROMPTS[:1])[0])
    (handoff,) = pair.prefill.step()
    other.add(handoff)
    while other.has_work:
        other.step()
        pair.prefill.step()
    assert "differ" in other.arrivals[0].why_not
    other.close()
    pair.close()


def test_a_prompt_that_was_preempted_is_still_handed_over():
    """As windows do where pages are short, and tiers whose pages could not be loaded."""
    pair = pair_of(prefill={"chunked": True})
    (ask,) = asks_of(PROMPTS[4:5])
    pair.prefill.add(ask)
    assert pair.prefill.step() == []
    pair.prefill.engine.scheduler.queues.preempt()
    handoffs = []
    while not handoffs:
        handoffs = pair.prefill.step()
    assert len(handoffs[0].offer.table) == -(-len(ask.prompt) // PAGE)
    pair.decode.add(handoffs[0])
    tokens = [handoffs[0].first]
    while pair.decode.has_work:
        pair.prefill.step(0.001)
        tokens += [token for output in pair.decode.step() for token in output.tokens]
    assert tokens == greedy("qwen3", ask.prompt)
    assert pair.decode.arrivals[0].why_not is None
    rest(pair)


def test_aborted_anywhere_leaves_nothing():
    pair = pair_of()
    for ask in asks_of(PROMPTS):
        pair.prefill.add(ask)
    pair.prefill.abort("r0")  # in line
    handoffs = []
    while pair.prefill.has_work:
        handoffs += pair.prefill.step()
    assert {one.ask.id for one in handoffs} == {f"r{n}" for n in range(1, 6)}
    pair.prefill.abort("r1")  # on offer
    for handoff in handoffs[1:]:
        pair.decode.add(handoff)
    pair.decode.abort("r2")  # has no pages there yet
    pair.decode._begin(pair.decode._clock())
    pair.decode.abort("r3")  # bytes may be under way
    tokens = {handoff.ask.id: [handoff.first] for handoff in handoffs}

    def turn():
        pair.prefill.step(0.001)
        for output in pair.decode.step():
            tokens[output.request.id] += output.tokens

    while len(tokens["r4"]) < 3:
        turn()
    pair.decode.abort("r4")  # in the middle of its answer
    while pair.decode.has_work:
        turn()
    assert tokens["r5"] == greedy("qwen3", PROMPTS[5])
    assert (len(tokens["r2"]), len(tokens["r3"]), len(tokens["r4"])) == (1, 1, 3)
    assert not pair.prefill.blocks._wanted
    rest(pair)


def test_what_cannot_be_served_is_refused_by_name():
    pair = pair_of(decode={"pages": 3})
    context = pair.prefill.engine.scheduler.limits.context
    refused = pair.generate(asks_of([[1, 2], [VOCABULARY]], max_tokens=context))
    assert "exceed the context" in refused[0].error
    assert "the vocabulary has" in refused[1].error
    too_long = pair.generate(
        [msgspec.structs.replace(ask, id="x") for ask in asks_of([prompt_of(63, 1)])]
    )
    assert "the whole cache has 3" in too_long[0].error
    with pytest.raises(RequestError, match="two requests have one id"):
        pair.generate(asks_of([[1]]) * 2)
    busy = tiny_engine("qwen3")
    tiny_engines.submit(busy, [[1, 2, 3]])
    with pytest.raises(CairnError, match="at work already"):
        PrefillSide(busy)
    pair.close()


def test_hand_offs_travel_as_bytes():
    pair = pair_of()
    pair.prefill.add(asks_of(PROMPTS[:1], logprobs=2)[0])
    (handoff,) = pair.prefill.step()
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(handoff), type=Handoff)
    assert again == handoff
    pair.close()


LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=12)


@given(lengths=LENGTHS, pages=st.integers(6, 20), moves=st.lists(st.integers(0, 6), max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_books_add_up_whatever_is_held_for_others(lengths, pages, moves):
    """Requests come, end, are reserved for, arrive, are given up and admitted in any order."""
    blocks = HandoverBlocks(pages, 16)
    fresh = [Request(n, prompt_of(size, n % 3), SamplingParams()) for n, size in enumerate(lengths)]
    running, landing, arrived, kept, lent = [], [], [], [], []
    for turn, move in enumerate(moves):
        if move == 0 and fresh:
            one = fresh.pop()
            if turn % 2:
                if blocks.reserve(one, [len(one.prompt) + 1]) is not None:
                    landing.append(one)
            elif blocks.allocate(one, one.total) is not None:
                running.append(one)
        elif move == 1 and landing:
            one = landing.pop()
            blocks.arrived(one.id)
            arrived.append(one)
        elif move == 2 and arrived:
            one = arrived.pop(0)
            table = blocks.allocate(one, len(one.prompt) + 1)
            if table is not None:
                assert len(table) * 16 > len(one.prompt)
                running.append(one)
            else:
                blocks.give_up(one.id)
        elif move == 3 and running:
            one = running.pop(0)
            blocks.keep(one.id)
            one.outputs.append(1)
            blocks.free(one)
            kept.append(one)
            assert blocks.table(one.id)
        elif move == 4 and kept:
            blocks.let_go(kept.pop().id)
        elif move == 5 and running:
            lent.append(f"offer {turn}")
            pages = blocks.lend(running[turn % len(running)], lent[-1])
            assert blocks.table(lent[-1]) == pages
        elif move == 6 and lent:
            blocks.let_go(lent.pop(0))
        blocks.check_integrity()
    for one in landing + arrived:
        blocks.give_up(one.id)
    for one in kept:
        blocks.let_go(one.id)
    for one in running:
        blocks.free(one)
    blocks.check_integrity()
    for name in lent:  # what was lent outlives its request
        assert blocks.table(name)
        blocks.let_go(name)
    blocks.check_integrity()
    assert blocks.usage().used == 0


def test_prefill_in_a_process_of_its_own_until_it_is_killed():
    config = EngineConfig(
        model="cairn-tiny",
        device="cpu",
        dtype="float32",
        weights="float",
        block_size=PAGE,
        num_gpu_blocks_override=96,
        max_num_seqs=16,
    )
    asks, at = asks_of([*PROMPTS, [10**6]]), [0.0, 0.02, 0.04, 0.0, 0.0, 0.1, 0.0]
    alone = generate_alone(start(config).engine, asks, at)
    with Separated.of(config, transport="shm") as pair:
        answers = pair.generate(asks, at)
        assert [one.tokens for one in answers] == [one.tokens for one in alone]
        assert all(len(one.gaps_s) == MOST - 1 and one.ttft_s > 0 for one in answers[:-1])
        assert all(one.arrival.why_not is None for one in answers[:-1])
        assert "the vocabulary has" in answers[-1].error
        pair.prefill._process.kill()
        (lost,) = pair.generate([msgspec.structs.replace(asks[0], id="late")])
        assert (lost.finish, lost.tokens) == ("error", [])
        assert "the prefill process has ended (status -9)" in lost.error
        (refused,) = pair.generate([msgspec.structs.replace(asks[0], id="later")])
        assert "start the prefill process again" in refused.error
        at_rest(pair.decode.engine)

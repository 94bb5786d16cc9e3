"""Pages of a prompt that come while the rest of it is computed: tokens of one engine, and nothing is left behind."""

import itertools
import time

import msgspec
import pytest
import torch
from tiny_engines import PAGE, at_rest, greedy, prompt_of, tiny_engine

from cairn.comm.transfer.choose_transport import TRANSPORTS, unusable
from cairn.comm.transfer.lease import Terms
from cairn.serve.config import RoleConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.separation.decode import DecodeSide
from cairn.serve.separation.pair import Separated
from cairn.serve.separation.prefill import Ask, Ended, Handoff, PrefillSide
from cairn.serve.separation.prefill_client import Reply
from cairn.serve.separation.roles import DecodeEngine

MOST = 14
LONG = prompt_of(115, 3)  # five chunks of at most 24 tokens, and eight pages
PROMPTS = [LONG, prompt_of(20, 1), prompt_of(97, 5), prompt_of(48, 6), prompt_of(128, 7)]
ALWAYS = {"role": "decode", "prefill_when": "always", "prefill_min_tokens": 1}
PARAMS = SamplingParams(temperature=0.0, max_tokens=MOST)


def asks_of(prompts, **more):
    params = msgspec.structs.replace(PARAMS, **more)
    return [Ask(id=f"r{n}", prompt=prompt, params=params) for n, prompt in enumerate(prompts)]


def pair_of(family="qwen3", transport="tcp", overlap=False, decode=None, **both):
    """One that computes prompts 24 tokens at a time, and knows its reader already."""
    engine = tiny_engine(family, chunked=True, overlap=overlap)
    pair = Separated(
        PrefillSide(engine, transport=transport, **both),
        DecodeSide(tiny_engine(family, **(decode or {})), transport=transport, **both),
    )
    while not pair.prefill._sender._pages.is_connected(pair.decode.transport.name):
        pair.decode.step(0.01)
    return pair


def rest(pair):
    """Both engines have everything back; the last release may still be on its way."""
    for _ in range(400):
        pair.prefill.step(0.005)
        pair.decode.step()
        pair.decode._receiver.step(pair.decode._clock(), 0.005)
        if not pair.prefill.holding and not pair.decode.has_work:
            break
    for side in (pair.prefill, pair.decode):
        at_rest(side.engine)
    assert not pair.decode._here
    assert not pair.decode.expects
    pair.close()


def streaming(pair, ask, tokens=48):
    """Ask for a prompt; returns when its first `tokens` are there, and the rest is not computed."""
    pair.prefill.add(msgspec.structs.replace(ask, reader=pair.decode.expect(ask.request())))
    for _ in range(2000):
        ready = list(pair.prefill._sender._pages._ready.values())
        if not ready or ready[0] < tokens:
            assert pair.prefill.step() == []
        pair.decode.step()
        time.sleep(0.002)  # notes travel in threads of their own
        coming = list(pair.decode._receiver.sequences.values())
        if coming and coming[0].planned >= tokens and not coming[0].under_way:
            return coming[0]
    raise AssertionError("nothing came")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_are_those_of_one_engine(transport, overlap):
    if (why := unusable(transport)) is not None:
        pytest.skip(why)
    pair = pair_of(transport=transport, overlap=overlap)
    answers = pair.generate(asks_of(PROMPTS))
    assert [one.tokens for one in answers] == [greedy("qwen3", prompt) for prompt in PROMPTS]
    assert all(one.arrival.why_not is None for one in answers)
    assert answers[0].arrival.streamed
    rest(pair)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_other_families_and_staging(family):
    """Windows give pages back while a prompt is computed: such a model hands over whole prompts."""
    pair = pair_of(family, staged=True)
    answers = pair.generate(asks_of(PROMPTS[:2]))
    assert [one.tokens for one in answers] == [greedy(family, prompt) for prompt in PROMPTS[:2]]
    assert answers[0].arrival.streamed == (family != "gemma3")
    rest(pair)


def test_pages_are_there_before_the_prompt_is_computed():
    pair = pair_of()
    (ask,) = asks_of([LONG])
    order = streaming(pair, ask, 64)
    pages = order.planned // PAGE
    sent = pair.prefill.engine.runner.pool.cache[:, :, order.offer.table[:pages]]
    came = pair.decode.engine.runner.pool.cache[:, :, list(order.table[:pages])]
    assert torch.equal(sent, came)
    assert order.planned < len(LONG)
    rest_of_it(pair, ask)
    rest(pair)


def rest_of_it(pair, ask):
    """Until its answer is whole, which is right."""
    tokens = []
    while len(tokens) < MOST:
        for found in pair.prefill.step():
            tokens.append(found.first)
            pair.decode.add(found)
        tokens += [token for one in pair.decode.step(0.002) for token in one.tokens]
    assert tokens == greedy("qwen3", ask.prompt)


def test_a_prefix_that_the_second_engine_has_does_not_travel():
    pair = pair_of()
    first, second = asks_of([[*LONG, 1, 2, 3], [*LONG, 4, 5]])
    answers = [*pair.generate([first]), *pair.generate([second])]
    assert [one.tokens for one in answers] == [
        greedy("qwen3", ask.prompt) for ask in (first, second)
    ]
    assert [one.arrival.cached for one in answers] == [0, 112]
    rest(pair)


def test_a_small_cache_takes_the_pages_later():
    pair = pair_of(decode={"pages": 11})
    answers = pair.generate(asks_of(PROMPTS[:3], max_tokens=20))
    assert [one.tokens for one in answers] == [
        greedy("qwen3", prompt, 20) for prompt in PROMPTS[:3]
    ]
    rest(pair)


def test_what_ends_with_its_first_token_is_withdrawn():
    pair = pair_of()
    first = greedy("qwen3", LONG)[0]
    for number, more in enumerate(({"max_tokens": 1}, {"stop_token_ids": [first]})):
        (ask,) = asks_of([LONG], **more)
        (answer,) = pair.generate([msgspec.structs.replace(ask, id=f"e{number}")])
        assert answer.tokens == [first]
    assert not pair.decode.arrivals
    rest(pair)


@pytest.mark.parametrize("on", ["prefill", "decode", "both"])
def test_aborted_in_the_middle_leaves_nothing(on):
    pair = pair_of()
    (ask,) = asks_of([LONG])
    streaming(pair, ask)
    if on != "prefill":
        assert pair.decode.abort(ask.id).finish == "abort"
    if on != "decode":
        pair.prefill.abort(ask.id)
    while pair.prefill.has_work:
        for found in pair.prefill.step(0.001):  # computed to the end, and nobody wants it
            assert isinstance(found, Handoff)
            pair.decode.decline(found.offer)
    if on == "prefill":
        for _ in range(100):
            pair.decode.step(0.005)
            if not pair.decode.has_work:
                break
        pair.decode.forget(ask.id)
    rest(pair)


def test_a_reader_that_dies_in_the_middle():
    """Its pages are free again, and the prompt is handed over whole to another."""
    pair = pair_of(terms=Terms(lease_s=0.3, beat_s=0.05, unclaimed_s=0.3, read_s=1.0))
    (ask,) = asks_of([LONG])
    streaming(pair, ask)
    pair.decode.close()
    while pair.prefill.holding:
        pair.prefill._free(pair.prefill._sender.freed(0.05))
    found = []
    while not found:
        found = pair.prefill.step()
    assert not found[0].offer.chunked
    other = Separated(pair.prefill, DecodeSide(tiny_engine("qwen3"), transport="tcp"))
    tokens = [found[0].first]
    other.decode.add(found[0])
    while other.decode.has_work:
        pair.prefill.step()
        tokens += [token for one in other.decode.step(0.002) for token in one.tokens]
    assert tokens == greedy("qwen3", LONG)
    rest(other)


def test_a_request_that_loses_its_pages_is_handed_over_from_its_new_ones():
    """As after pages that a tier could not bring."""
    pair = pair_of()
    (ask,) = asks_of([LONG])
    order = streaming(pair, ask)
    queues = pair.prefill.engine.scheduler.queues
    pair.prefill.engine.scheduler.blocks.prefix.clear()
    queues.preempt(queues.requests[ask.id])
    found = []
    while not found:
        found = pair.prefill.step()
    assert found[0].offer.request != order.offer.request
    tokens = [found[0].first]
    pair.decode.add(found[0])
    while pair.decode.has_work:
        pair.prefill.step(0.001)
        tokens += [token for one in pair.decode.step(0.002) for token in one.tokens]
    assert tokens == greedy("qwen3", LONG)
    rest(pair)


class InProcess:
    """A `PrefillClient` of a server in this process, which takes a step when it is told to."""

    def __init__(self, side):
        self.side, self.on_reply, self.id = side, None, ""

    def ask(self, ask, on_reply):
        self.id, self.on_reply = ask.id, on_reply
        self.side.add(ask)

    def step(self):
        for found in self.side.step():
            self.on_reply(Reply(self.id, found))

    def close(self, finish=False):
        pass


@pytest.mark.parametrize("fate", ["lives", "dies", "dies unnoticed", "fails", "is aborted"])
def test_a_decode_server_whose_prefill_server(fate):
    """The request is answered as one engine would, or is over; both sides have their pages back."""
    pair = pair_of()
    client = InProcess(pair.prefill)
    engine = DecodeEngine(pair.decode, client, RoleConfig(**ALWAYS))
    request = Request(7, LONG, PARAMS)
    engine.add(request)
    for turn in itertools.count():
        if turn < 2:  # two of five chunks
            client.step()
        engine.step()
        sequences = list(pair.decode._receiver.sequences.values())
        if sequences and sequences[0].planned >= 16:
            break
        assert turn < 2000, "nothing came while the prompt was computed"
    if fate == "dies":
        pair.prefill.close()
        client.on_reply(Reply("7", None, "the connection is gone"))
    elif fate == "dies unnoticed":  # the word comes later than the loss of its pages
        pair.prefill.close()
        while pair.decode.has_work:
            engine.step()
        client.on_reply(Reply("7", None, "the connection is gone"))
    elif fate == "fails":
        pair.prefill.abort("7")
        client.on_reply(Reply("7", Ended(id="7", token=None, finish="error", error="no room")))
    elif fate == "is aborted":
        assert engine.abort(7).finish == "abort"
    while engine.has_work or (fate == "is aborted" and pair.prefill.has_work):
        if not fate.startswith("dies"):
            client.step()
        engine.step()
    aborted, came = fate == "is aborted", fate == "lives"
    assert request.outputs == ([] if aborted else greedy("qwen3", LONG))
    assert (engine.remote_prefills, engine.prefill_fallbacks) == (came, not came and not aborted)
    if fate.startswith("dies"):
        at_rest(pair.decode.engine)
        pair.decode.close()
    else:
        rest(pair)

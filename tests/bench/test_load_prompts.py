"""Prompts have the lengths that were asked for, repeat with their seed, and share what a trace says they share."""

import itertools
import random
import statistics
from itertools import islice

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_data import shared

from cairn.bench.arrival_traces import BLOCK_TOKENS, TracedRequest, read_trace
from cairn.bench.load_mix import SCHEMA, fields
from cairn.bench.load_prompts import (
    AGENTS,
    HEAD_BLOCKS,
    TURNS,
    agent_shapes,
    asks,
    chat_shapes,
    document_shapes,
    random_shapes,
    traced_shapes,
)


def take(shapes, count, form="tokens", vocab=100, seed="0"):
    return list(itertools.islice(asks(shapes, form, vocab, seed), count))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 1000), st.text(max_size=3))
def test_random_prompts(read, written, vocab, seed):
    made = take(random_shapes(read, written), 4, vocab=vocab, seed=seed)
    assert [(len(ask.prompt), ask.output_tokens) for ask in made] == [(read, written)] * 4
    assert all(0 <= token < vocab for ask in made for token in ask.prompt)
    assert made == take(random_shapes(read, written), 4, vocab=vocab, seed=seed)


def test_no_two_are_alike_and_another_seed_has_others():
    made = take(random_shapes(64, 8), 50) + take(random_shapes(64, 8), 50, seed="1")
    assert len({tuple(ask.prompt) for ask in made}) == 100


def test_as_text_a_prompt_has_so_many_words():
    (ask,) = take(random_shapes(40, 8), 1, form="text")
    assert len(ask.prompt.split()) == 40


def test_conversations_have_the_average_lengths_that_they_promise():
    shapes = list(itertools.islice(chat_shapes(random.Random(0), 10**6, 10**6), 40_000))
    assert statistics.fmean(s.input_tokens for s in shapes) == pytest.approx(161, rel=0.05)
    assert statistics.fmean(s.output_tokens for s in shapes) == pytest.approx(338, rel=0.05)
    short = list(itertools.islice(chat_shapes(random.Random(0), 32, 16), 500))
    assert max(s.input_tokens for s in short) == 32
    assert max(s.output_tokens for s in short) == 16
    assert min(s.output_tokens for s in short) >= 1


@pytest.mark.parametrize("form", ["tokens", "text"])
def test_equal_blocks_are_equal_prompts_up_to_where_they_part(form):
    trace = [
        TracedRequest(0, 2 * BLOCK_TOKENS, 5, (7, 8)),
        TracedRequest(1, 2 * BLOCK_TOKENS - 10, 5, (7, 9)),
        TracedRequest(2, 100, 5, (7,)),
    ]
    parts = [
        ask.prompt if form == "tokens" else ask.prompt.split()
        for ask in take(traced_shapes(trace), 9, form=form)
    ]
    assert [len(part) for part in parts] == [1024, 1014, 100]
    assert parts[0][:512] == parts[1][:512]
    assert parts[0][512:522] != parts[1][512:522]
    assert parts[2] == parts[0][:100]


def test_the_real_trace_shares_as_much_as_it_says():
    """The ideal hit rate of the published trace, counted in blocks, is the one of its prompts, too."""
    trace = read_trace(shared("data", "traces", "mooncake_conversation.jsonl"), most=60)
    made = take(traced_shapes(trace), 60, vocab=50_000)
    seen, hits, blocks = set(), 0, 0
    named, known = set(), 0
    for request, ask in zip(trace, made, strict=True):
        assert len(ask.prompt) == request.input_tokens
        for at in range(len(ask.prompt) // BLOCK_TOKENS):
            prefix = tuple(ask.prompt[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
            hits += prefix in seen
            known += request.blocks[at] in named
            seen.add(prefix)
            named.add(request.blocks[at])
            blocks += 1
    assert hits == known > 0


def test_a_trace_can_be_cut_short():
    (shape,) = traced_shapes([TracedRequest(0, 5000, 900)], 100, 10)
    assert (shape.input_tokens, shape.output_tokens) == (100, 10)


def test_a_turn_of_an_agent_begins_with_its_turns_before():
    shapes = list(islice(agent_shapes(random.Random(0)), 2 * AGENTS * TURNS))
    made = [ask.prompt for ask in asks(iter(shapes), "tokens", 1000, "0")]
    for place in range(AGENTS, AGENTS * TURNS):
        before = made[place - AGENTS]
        assert made[place][: len(before)] == before
    heads = {tuple(prompt[: HEAD_BLOCKS * BLOCK_TOKENS]) for prompt in made}
    assert len(heads) == 1
    own = {tuple(prompt[HEAD_BLOCKS * BLOCK_TOKENS :][:BLOCK_TOKENS]) for prompt in made}
    assert len(own) == 2 * AGENTS  # after all turns come others


def test_documents_are_long():
    lengths = [s.input_tokens for s in islice(document_shapes(random.Random(0)), 200)]
    assert 8_000 <= min(lengths) < 10_000 < 90_000 < max(lengths) <= 120_000


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_what_requests_ask_for_besides(endpoint):
    (named,) = islice(fields("logprobs", endpoint), 1)
    assert named["top_logprobs" if endpoint == "chat" else "logprobs"] == 5
    (shaped,) = islice(fields("structured", endpoint), 1)
    assert shaped["response_format"]["json_schema"]["schema"] == SCHEMA
    jsonschema.validate({"name": "a", "kind": "place", "year": 3, "tags": []}, SCHEMA)
    assert len({str(one) for one in islice(fields("sampled", endpoint), 9)}) == 5
    assert next(fields("none", endpoint)) == {}

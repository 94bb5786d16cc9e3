"""In the batch-invariant mode not a bit depends on who else is there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import at_rest, greedy, prompt_of, submit, tiny_engine

from cairn.serve.engine.batch_invariant import EMPTY, ROWS, fixed_groups
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.step import Chunk

MINE = prompt_of(41, seed=1)
OTHERS = [prompt_of(n, seed=n) for n in (15, 16, 33, 19)]


def heard(engine, mine: Request) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Tokens and log-probabilities of one request, unrounded."""
    outputs = [out for out in engine.run() if out.request is mine]
    prompt = engine.prompt_logprobs.pop(mine, [])
    return prompt + [(out.tokens, out.logprobs) for out in outputs]


CROWDED = [dict(overlap=True), dict(chunked=True, tight=True), dict(prefix=False, budget=7)]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "gpt2"])
def test_tokens_and_logprobs_are_bitwise_the_same_alone_and_in_any_batch(family):
    ask = dict(logprobs=4, max_tokens=7) | ({"prompt_logprobs": 1} if family == "llama" else {})
    alone = tiny_engine(family, invariant=True)
    (mine,) = submit(alone, [MINE], **ask)
    expected = heard(alone, mine)
    assert mine.outputs == greedy(family, MINE, 7)
    for switches in CROWDED if family == "llama" else CROWDED[1:2]:
        engine = tiny_engine(
            family, invariant=True, pages=7 if "tight" in switches else 64, **switches
        )
        before = submit(engine, [[*MINE[:30], 5], *OTHERS[:2]], max_tokens=12)
        engine.step()
        (again,) = submit(engine, [MINE], **ask)
        behind = submit(engine, OTHERS[2:], temperature=1.0)
        assert heard(engine, again) == expected
        assert "tight" not in switches or any(
            r.ledger.preemptions for r in (*before, again, *behind)
        )
        assert {len(request.outputs) for request in before} == {12}
        at_rest(engine)


def test_the_ordinary_form_is_not_invariant():
    """Else the test above would show nothing. Rounding differs between one row and many."""
    found = set()
    for others in ([], OTHERS):
        engine = tiny_engine("llama")
        submit(engine, others)
        (mine,) = submit(engine, [MINE], logprobs=4, max_tokens=7)
        found.add(str(heard(engine, mine)))
    assert len(found) == 2


requests_of_a_step = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 40), st.booleans()), min_size=1, max_size=8
)


@given(requests_of_a_step)
@settings(max_examples=200)
def test_groups_hold_every_token_once_at_its_row_and_never_before_what_it_reads(rows):
    params = SamplingParams()
    chunks = [
        Chunk(Request(i, [1], params), start, count, 0 if admitted else 3, (), True)
        for i, (start, count, admitted) in enumerate(rows)
    ]
    groups = fixed_groups(chunks)
    group_of = {token: g for g, group in enumerate(groups) for token in group if token != EMPTY}
    assert sorted(group_of) == list(range(sum(chunk.count for chunk in chunks)))
    at, last = 0, 0
    for chunk in chunks:
        mine = [group_of[at + i] for i in range(chunk.count)]
        assert mine == sorted(mine)
        assert all(groups[g][(chunk.start + i) % ROWS] == at + i for i, g in enumerate(mine))
        if chunk.first_page == 0 and chunk.start > 0:
            assert mine[0] >= last  # pages of those before it may be among its own
        at += chunk.count
        last = max(last, *mine)

"""The engine's side of the ledger: stamps in order, totals that add up, whatever happened to a request."""

import tiny_engines
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from cairn.models.cache import cache_bytes_per_token
from cairn.models.presets import preset
from cairn.models.step_cost import SequenceWork, Total, step_cost, total_cost
from cairn.serve.engine.facts import facts_of, stats_of
from cairn.serve.engine.messages import Beat, decode_report, encode
from cairn.serve.engine.page_map import group_map, map_of, page_map
from cairn.serve.engine.request import Ledger
from cairn.serve.engine.step_times import NOTHING, Spent

PROMPTS = [tiny_engines.prompt_of(length, length) for length in (5, 40, 17, 33, 60, 9)]


def ran(**options):
    """An engine after six requests, and what it decided."""
    engine = tiny_engines.tiny_engine("llama", **options)
    steps, schedule = [], engine.scheduler.schedule

    def watched():
        steps.append(schedule())
        return steps[-1]

    engine.scheduler.schedule = watched
    requests = tiny_engines.submit(engine, PROMPTS)
    engine.run()
    return engine, requests, steps


def in_order(ledger):
    stamps = [
        ledger.arrived,
        ledger.admitting,
        ledger.scheduled,
        ledger.first_token,
        ledger.finished,
    ]
    return stamps == sorted(stamps) and stamps[0] > 0


def test_stamps_are_in_order_and_totals_are_those_of_all_steps():
    for overlap in (False, True):
        engine, requests, steps = ran(chunked=True, overlap=overlap)
        assert all(in_order(request.ledger) for request in requests)
        chunks = [chunk for step in steps for chunk in step.chunks]
        spent = engine.spent
        assert spent.tokens == sum(chunk.count for chunk in chunks)
        assert spent.read == sum(chunk.start + chunk.count for chunk in chunks)
        pairs = [range(c.start + 1, c.start + c.count + 1) for c in chunks]
        assert spent.pairs == sum(map(sum, pairs))
        assert spent.sampled == sum(chunk.samples for chunk in chunks)
        assert spent.prefill == sum(map(len, PROMPTS)) - sum(request.cached for request in requests)
        assert spent.steps == sum(bool(step.chunks) for step in steps)
        total = sum(times.total for times in engine.times)
        assert 0 < spent.host + spent.device <= total + 1e-9


def test_a_request_alone_has_all_of_the_engine():
    engine = tiny_engines.tiny_engine("llama", chunked=True)
    (request,) = tiny_engines.submit(engine, [tiny_engines.prompt_of(60, 3)], max_tokens=9)
    engine.run()
    ledger = request.ledger
    assert ledger.prefill.steps == ledger.prefill_chunks == 3  # of 24 tokens at most
    assert ledger.prefill.tokens == 60
    assert ledger.decode.steps == ledger.decode.sampled == 8
    assert ledger.decode.read == sum(range(61, 69))
    assert ledger.pages == -(-68 // tiny_engines.PAGE)
    assert 0 < ledger.allocation < ledger.finished - ledger.arrived
    assert min(ledger.prefill.device, ledger.decode.device) > 0


def test_preemptions_are_counted_and_their_wait_is_measured():
    engine, requests, _ = ran(tight=True)
    hit = [request for request in requests if request.ledger.preemptions]
    assert hit, "the cache was meant to be too small"
    assert stats_of(engine).preempted == sum(request.ledger.preemptions for request in requests)
    for request in requests:
        ledger = request.ledger
        assert in_order(ledger)
        assert (ledger.requeued > 0) == (ledger.preemptions > 0)
        assert ledger.requeued <= ledger.finished - ledger.scheduled


def test_an_aborted_request_has_a_ledger_as_far_as_it_came():
    engine = tiny_engines.tiny_engine("llama", rows=1)
    first, second = tiny_engines.submit(engine, PROMPTS[:2])
    engine.step()
    engine.abort(first.id)
    engine.abort(second.id)
    assert first.ledger.first_token
    assert in_order(first.ledger)
    assert second.ledger.finished
    assert not second.ledger.scheduled
    assert second.ledger.prefill == NOTHING


def test_a_ledger_crosses_the_border_of_a_process():
    engine, requests, _ = ran()
    for request in requests:
        assert msgpack.decode(encode(request.ledger), type=Ledger) == request.ledger
    beat = Beat(stats_of(engine), list(engine.times), map_of(engine.scheduler.blocks))
    assert decode_report(encode(beat)) == beat


def test_facts_are_those_of_the_model():
    engine, _, _ = ran()
    facts, spec = facts_of(engine), engine.runner.model.spec
    assert facts.weights_bytes >= 4 * spec.parameters()
    assert facts.kv_bytes_per_token == cache_bytes_per_token(spec, 4)
    assert (facts.device, facts.dtype, facts.ranks) == ("cpu", "float32", 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), st.integers(1, 20))
def test_every_page_is_in_one_cell_of_the_map(pages, cells):
    """Against a walk that puts page after page into its cell."""
    drawn = page_map(
        [held for held, _ in pages], [b"" if known else None for _, known in pages], cells
    )
    cells = min(cells, len(pages))
    shares = [[] for _ in range(cells)]
    edges = [len(pages) * cell // cells for cell in range(cells)]
    for at, page in enumerate(pages):
        shares[max(cell for cell, edge in enumerate(edges) if edge <= at)].append(page)
    wanted = ""
    for share in shares:
        held = sum(holders > 0 for holders, _ in share) / len(share)
        known = sum(known for _, known in share) / len(share)
        wanted += (
            next(str(d) for d in range(10) if held <= (d + 1) / 10)
            if held
            else "c"
            if known >= 0.5
            else "."
        )
    assert drawn == wanted


def test_the_map_names_the_cache_group_of_held_pages():
    engine = tiny_engines.tiny_engine("gemma3")
    tiny_engines.submit(engine, [tiny_engines.prompt_of(40, 1)])
    engine.step()
    blocks = engine.scheduler.blocks
    drawn = map_of(blocks, cells=blocks.pages - 1)  # a page each
    for group, used in enumerate(blocks.usage().groups):
        assert drawn.groups.count(str(group)) == used > 0
    assert [sign == "." for sign in drawn.groups] == [sign in ".c" for sign in drawn.held]
    assert group_map([1, 1, 0, 2, 0, 0], [0, 1, 1, 1, 1, 1], 2) == "01"
    assert map_of(tiny_engines.tiny_engine("qwen3").scheduler.blocks).groups == ""


def test_a_digit_says_how_much_of_a_cell_is_held():
    nobody = [None] * 100
    assert page_map([1] * 5 + [0] * 95, nobody, 1) == "0"
    assert page_map([1] * 50 + [0] * 50, nobody, 1) == "4"
    assert page_map([1] * 91 + [0] * 9, nobody, 1) == "9"
    assert page_map([0] * 100, [b"x"] * 50 + [None] * 50, 1) == "c"
    assert page_map([0] * 100, [b"x"] * 49 + [None] * 51, 1) == "."


@given(
    st.sampled_from(["tiny-qwen3", "tiny-gpt2"]),
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 90)), min_size=1, max_size=6),
)
def test_the_cost_from_sums_is_the_cost_from_sequences(shape, sequences):
    """For a model that sees everything and has no experts, nothing is lost by adding up first."""
    spec = preset(shape)
    work = [SequenceWork(tokens, cached) for tokens, cached in sequences]
    total = Total(
        steps=1,
        tokens=sum(t for t, _ in sequences),
        logits=len(sequences),
        read=sum(t + c for t, c in sequences),
        pairs=sum(t * c + t * (t + 1) // 2 for t, c in sequences),
    )
    assert total_cost(spec, total, 4, 4) == step_cost(spec, work, 4)


def test_totals_are_differences():
    later, earlier = (
        Spent(5, 50, 20, 9, 400, 900, 2.5, 1.5),
        Spent(2, 30, 20, 3, 100, 300, 1.5, 1.0),
    )
    assert later.since(earlier) == Spent(3, 20, 0, 6, 300, 600, 1.0, 0.5)

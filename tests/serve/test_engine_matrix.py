"""Greedy tokens are those of the plain generator: every family, and every pair of what can be switched on."""

import functools
import itertools
from typing import Any

import pytest
import tiny_checkpoints
from tiny_engines import MOST, at_rest, greedy, prompt_of, submit, tiny_engine

SWITCHES = ("chunked", "prefix", "tight", "overlap", "plain", "invariant")
FAMILIES = [
    "llama",
    "mistral",
    "qwen2-window",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gpt2",
    "gemma2",
    "gemma3",
]
# Its rotation depends on the length of what is computed at once: beyond its context no two ways agree.
NOT_PAGED = "llama-dynamic"
OTHERS = [name for name in tiny_checkpoints.FAMILY_NAMES if name not in (*FAMILIES, NOT_PAGED)]


SHARED = prompt_of(37, seed=1)


Pair = frozenset[tuple[str, Any]]


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of two factors occurs: each time one that adds many."""
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    }
    chosen = []
    while missing:
        row = dict(min(missing, key=str_of))  # at least this one
        for name in factors:
            if name not in row:
                row[name] = max(factors[name], key=functools.partial(added, row, name, missing))
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        chosen.append(row)
    return chosen


def added(row: dict[str, Any], name: str, missing: set[Pair], value: Any) -> int:
    return sum(frozenset({(name, value), item}) in missing for item in row.items())


def str_of(pair: Pair) -> str:
    return str(sorted(pair, key=str))


COMBINATIONS = pairwise({"family": tuple(FAMILIES)} | dict.fromkeys(SWITCHES, (False, True)))


def test_every_pair_is_among_the_combinations():
    for a, b in itertools.combinations(SWITCHES, 2):
        seen = {(row[a], row[b]) for row in COMBINATIONS}
        assert len(seen) == 4
    for switch in SWITCHES:
        assert {(row["family"], row[switch]) for row in COMBINATIONS} == set(
            itertools.product(FAMILIES, (False, True))
        )


def _name(row: dict[str, Any]) -> str:
    return "-".join([row["family"], *(switch for switch in SWITCHES if row[switch])])


@pytest.mark.parametrize("row", COMBINATIONS, ids=_name)
def test_greedy_tokens_are_those_of_the_plain_generator(row):
    switches = {switch: row[switch] for switch in SWITCHES}
    engine = tiny_engine(row["family"], **switches)
    prompts = [
        SHARED,
        prompt_of(5, seed=2),
        [*SHARED, *prompt_of(30, seed=3)],
        SHARED,
        SHARED,  # the same step
        prompt_of(64, seed=4),
        [3],
    ]
    requests = submit(engine, prompts)
    engine.run()
    later = submit(engine, [[*SHARED, *requests[0].outputs, 5], SHARED], max_tokens=4)
    engine.run()
    check(row["family"], requests + later)
    assert [len(r.outputs) for r in requests + later] == [MOST] * len(requests) + [4, 4]
    _check_that_it_happened(switches, requests, later)
    at_rest(engine)


def check(family, requests):
    for request in requests:
        expected = greedy(family, request.prompt)[: len(request.outputs)]
        assert (request.error, request.finish) == (None, "length")
        assert request.outputs == expected


@pytest.mark.parametrize("family", OTHERS)
def test_variants_of_the_families_with_everything_on(family):
    engine = tiny_engine(family, chunked=True, tight=True, overlap=True)
    requests = submit(engine, [SHARED, prompt_of(30, seed=3), SHARED])
    engine.run()
    check(family, requests)
    at_rest(engine)


def _check_that_it_happened(switches, requests, later):
    """What was switched on took place, so that the test is about it."""
    if switches["chunked"]:
        assert max(request.ledger.prefill_chunks for request in requests) > 2
    if switches["tight"]:
        assert sum(request.ledger.preemptions for request in requests) > 0
    hits = [request.cached for request in (*requests[2:4], *later)]
    assert (min(hits) >= 32) == switches["prefix"] or switches["tight"]
    if not switches["prefix"]:
        assert set(hits) == {0}


def test_a_rotation_by_length_agrees_within_the_trained_context():
    engine = tiny_engine(NOT_PAGED, overlap=True)
    prompts = [prompt_of(n, seed=n) for n in (4, 9, 13)]
    requests = submit(engine, prompts, max_tokens=10)
    engine.run()
    assert [r.outputs for r in requests] == [greedy(NOT_PAGED, p, 10) for p in prompts]

"""Can a model be made to answer in a given shape, always, and what does that cost a token?

    grammar + text so far -> mask over the vocabulary -> scores of forbidden tokens become -inf -> sample

The shipped model is a few million parameters and knows no JSON; with the mask every answer parses, without it
none does.
"""

import json
import time
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.serve.engine.loop import Engine
    from cairn.serve.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def answers(engine: "Engine", count: int, grammar: "Grammar | None", first: int) -> list[list[int]]:
    """Sampled at temperature 1, from a prompt that says nothing about JSON."""
    from cairn.serve.engine.request import Request
    from cairn.serve.engine.sampling_params import SamplingParams

    requests = []
    for number in range(count):
        params = SamplingParams(
            max_tokens=24 if grammar is None else 240, temperature=1.0, seed=number
        )
        request = Request(first + number, [5, 9, 12, 7], params, eos_ids=(0, 2))
        request.constraint = None if grammar is None else grammar.start()
        requests.append(request)
        engine.add(request)
    engine.run()
    return [request.outputs for request in requests]


def follows(text: str) -> bool:
    """Is this an object of the schema? By hand, with nothing of what made it."""
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(document, dict)
        and set(document) == {"name", "age", "kind"}
        and isinstance(document["name"], str)
        and isinstance(document["age"], int)
        and 1 <= document["age"] <= 99
        and document["kind"] in ("cat", "dog", "bird")
    )


@one_thread()
def run(bench: Workbench) -> Outcome:
    from cairn.models.runnable import open_model
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.start import start_with
    from cairn.serve.grammar import Grammars
    from cairn.serve.structured_output import Guide

    opened = open_model("cairn-tiny")
    assert opened.tokenizer is not None
    config = EngineConfig(
        model="cairn-tiny", device="cpu", weights="float", num_gpu_blocks_override=256
    )
    engine = start_with(opened, opened.load("cpu", "float32"), config, sole=True).engine
    grammars = Grammars(opened.tokenizer, opened.spec.vocab, opened.eos_ids)
    bench.step("compiling the grammar")
    began = time.perf_counter()
    grammar = grammars.compile(Guide("json_schema", json.dumps(SCHEMA), "lab"))
    compiled = time.perf_counter() - began
    count = bench.pick(8, 3)
    bench.step(f"{count} answers that may say anything")
    free = [opened.tokenizer.decode(ids) for ids in answers(engine, count, None, 0)]
    bench.step(f"{count} answers that follow the schema")
    constrained = [opened.tokenizer.decode(ids) for ids in answers(engine, count, grammar, 1000)]
    one = grammar.start()
    mask = bench.time(one.mask, device="cpu", budget_ms=100).median_s
    grammars.close()
    good = [sum(map(follows, texts)) / count for texts in (free, constrained)]
    rows = [
        ["free", good[0], " ".join(free[0].split())[:60]],
        ["held to the schema", good[1], " ".join(constrained[0].split())[:60]],
    ]
    return Outcome(
        checks=_checks(good, mask),
        table=_table(rows),
        notes=[
            Words(
                f"The grammar compiled in {compiled * 1e3:.0f} ms, the vocabulary's table included, once for all "
                f"requests; a mask takes {mask * 1e6:.0f} us, an engine step of an 8B model 4 ms at least.",
                f"语法编译 {compiled * 1e3:.0f} 毫秒（含词表），所有请求共用；一次掩码 {mask * 1e6:.0f} 微秒，而 8B "
                "模型一步至少 4 毫秒。",
            )
        ],
    )


def _checks(good: list[float], mask: float) -> list[Check]:
    return [
        Check(
            what=Words("answers that follow the schema, held to it", "受约束时符合 schema 的比例"),
            predicted=1.0,
            measured=good[1],
            unit="share",
        ),
        Check(
            what=Words("answers that follow it by themselves", "无约束时恰好符合的比例"),
            predicted=0.0,
            measured=good[0],
            unit="share",
        ),
        Check(
            what=Words("time of a mask", "计算一次掩码的时间"),
            predicted=400.0,  # a tenth of the least step of an 8B model on an H200, 4 ms
            measured=mask * 1e6,
            unit="us",
            kind="at_most",
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("answers", "回答"),
            Words("share that parses", "可解析比例"),
            Words("the first", "第一个"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)

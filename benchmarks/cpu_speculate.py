"""How much faster does a CPU answer with drafts, and are the answers the same?

    python benchmarks/cpu_speculate.py                      # SmolLM2-135M-Instruct from its package
    python benchmarks/cpu_speculate.py --model cairn-tiny --rounds 1 --outputs 32

Prompts ask to repeat or to edit a text, which n-gram drafts are for, for a JSON object of a given schema, which forces
most of its tokens (--speculate grammar drafts nothing else), and for something new. The answer to an edit is begun:
small models else write something of their own. One engine answers all of them with and without drafts in turns,
greedily, to the end of the answer. On a shared machine only the ratios within one run mean something, and that of CPU
time, with OMP_NUM_THREADS=1, most.
"""

import argparse
import time
from typing import Any, NamedTuple

import torch

from cairn.bench.record import add_arguments, record
from cairn.models.hub import default_model
from cairn.models.runnable import OpenModel
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import Started, start
from cairn.serve.grammar import Grammar, grammars_for
from cairn.serve.guide import schema_guide

CODE = """def area_of_rectangle(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    area = width * height
    print("the area of the rectangle is", area)
    return area


def area_of_square(side):
    area = area_of_rectangle(side, side)
    print("the area of the square is", area)
    return area
"""
LETTER = """Dear Ms. Okafor, thank you for your letter of the third of May. We have looked at the two pumps that you \
sent back to us. The first pump works as it should. The second pump has a broken seal, which we have replaced at no \
cost. Both pumps will be sent to your office in Leeds on Monday. Please call us if they have not arrived by Friday."""


class Asked(NamedTuple):
    text: str
    begun: str = ""  # of the answer


TASKS = {
    "repeat": [
        Asked(f"Repeat this text exactly, word for word:\n\n{LETTER}"),
        Asked(f"Repeat this program exactly:\n\n{CODE}"),
    ],
    "edit": [
        Asked(
            f"Rewrite this program, but name the first argument of every function `first`:\n\n{CODE}",
            "def area_of_rectangle(first, height):\n    if first < 0 or height < 0:\n",
        ),
        Asked(
            f"Write this letter again, but to Mr. Tanaka instead of Ms. Okafor:\n\n{LETTER}",
            "Dear Mr. Tanaka, thank you for your letter of the third of May.",
        ),
    ],
    "json": [
        Asked("Describe a cat that lives in Lisbon as a JSON object."),
        Asked("Describe a dog of Oslo as a JSON object."),
    ],
    "new": [
        Asked("Tell me a short story about a lighthouse."),
        Asked("Why is the sky blue? Answer in a few sentences."),
    ],
}
SCHEMA = {
    "type": "object",
    "properties": {
        "animal_kind": {"enum": ["cat", "dog", "bird"]},
        "age_in_years": {"type": "integer", "minimum": 1, "maximum": 20},
        "city_name": {"type": "string", "maxLength": 12},
        "lives_indoors": {"type": "boolean"},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["animal_kind", "age_in_years", "city_name", "lives_indoors", "favourite_colour"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--draft-tokens", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add_arguments(parser)
    options = parser.parse_args()
    drafts = options.draft_tokens
    config = EngineConfig(
        model=options.model or default_model().name,
        device="cpu",
        weights=options.weights,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculate=options.speculate,
        draft_tokens="auto" if drafts == "auto" else int(drafts),
    )
    started = start(config)
    results = {}
    for task in options.tasks:
        grammar = grammar_of(started) if task == "json" else None
        asked = prompts(started.opened, TASKS[task])
        results[task] = compare(started, asked, options, grammar)
        print(task, results[task], flush=True)
    record(
        {"model": config.model, "speculate": config.speculate, "draft_tokens": drafts,
         "threads": torch.get_num_threads()} | results,
        options,
    )  # fmt: skip


def grammar_of(started: Started) -> Grammar:
    grammars = grammars_for(started.opened, started.opened.spec.vocab)
    assert grammars is not None
    return grammars.compile(schema_guide(SCHEMA, "the schema"))


def prompts(opened: OpenModel, many: list[Asked]) -> list[list[int]]:
    tokenizer = opened.tokenizer
    assert tokenizer is not None
    if not tokenizer.templates:
        return [tokenizer.encode(one.text + one.begun) for one in many]
    return [
        tokenizer.encode_chat([{"role": "user", "content": one.text}]) + tokenizer.encode(one.begun)
        for one in many
    ]


class Answered(NamedTuple):
    tokens: list[int]
    seconds: float  # from the first token to the last
    cpu_seconds: float  # of this process, which others on the machine cannot lengthen much


def compare(
    started: Started, asked: list[list[int]], options: argparse.Namespace, grammar: Grammar | None
) -> dict[str, Any]:
    """Of one task: each prompt without and with drafts in turns; decoded tokens per second, prompts not counted."""
    engine, ends = started.engine, started.opened.eos_ids
    speculation = engine.scheduler.speculation
    assert speculation is not None
    found: dict[str, list[Answered]] = {"off": [], "on": []}
    before = (speculation.counts.runs, speculation.counts.accepted)
    for prompt in asked * options.rounds:
        for way in found:
            engine.scheduler.speculation = speculation if way == "on" else None
            constraint = None if grammar is None else grammar.start()
            params = SamplingParams(temperature=0, max_tokens=options.outputs)
            request = Request(
                time.monotonic_ns(), prompt, params, eos_ids=ends, constraint=constraint
            )
            found[way].append(answer(engine, request))
    engine.scheduler.speculation = speculation
    return {
        "tokens_per_s": {way: round(rate(many, "seconds"), 2) for way, many in found.items()},
        "speedup": speedup(found, "seconds"),
        "speedup_in_cpu_time": speedup(found, "cpu_seconds"),
        "length": round(speculation.counts.length_since(*before) or 1.0, 2),
        "equal": [a.tokens for a in found["on"]] == [a.tokens for a in found["off"]],
        "output_tokens": sum(len(one.tokens) for one in found["on"]),
    }


def rate(answers: list[Answered], clock: str) -> float:
    tokens = sum(len(one.tokens) - 1 for one in answers)
    return tokens / sum(getattr(one, clock) for one in answers)


def speedup(found: dict[str, list[Answered]], clock: str) -> float:
    return round(rate(found["on"], clock) / rate(found["off"], clock), 3)


def answer(engine: Engine, request: Request) -> Answered:
    engine.add(request)
    while not request.outputs:
        engine.step()
    began, began_cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
    return Answered(request.outputs, time.perf_counter() - began, time.process_time() - began_cpu)


if __name__ == "__main__":
    main()

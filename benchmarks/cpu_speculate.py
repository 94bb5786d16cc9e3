"""How much faster does a CPU answer with drafts, and are the answers the same?

    python benchmarks/cpu_speculate.py                      # SmolLM2-135M-Instruct from its package
    python benchmarks/cpu_speculate.py --model cairn-tiny --rounds 1 --outputs 32
    python benchmarks/cpu_speculate.py --rows 1 2 4 8 16    # CPU time of a step by its rows, with drafts that all hold

Prompts ask to repeat or to edit a text, which n-gram drafts are for, for a JSON object of a given schema, which
forces most of its tokens (--speculate grammar drafts nothing else), for chat of the kinds that the head of SmolLM2
has learned from (--speculate smollm2-135m-instruct-eagle3), and for something new. The answer to an edit is begun:
small models else write something of their own. SmolLM2-135M does so all the same with the program, of which it
repeats little; of the letter, the settings and the notes it writes most lines again. Two engines answer greedily to
the end of the answer, one with drafts and one without, step by step in turns: whoever has had less time. So both meet
the same load of a shared machine, and the ratios mean something there, that of CPU time with OMP_NUM_THREADS=1 most.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from cairn.bench.record import add_arguments, record
from cairn.models.hub import default_model
from cairn.models.runnable import OpenModel
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.speculate.drafter import Ask
from cairn.serve.engine.start import Started, start
from cairn.serve.grammar import Grammar, grammars_for
from cairn.serve.structured_output import schema_guide

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
SETTINGS = """[server]
host = "127.0.0.1"
port = 8000
workers = 4
timeout_seconds = 30

[database]
host = "db.internal.example.com"
port = 5432
name = "orders"
user = "orders_service"
pool_size = 16

[logging]
level = "info"
file = "/var/log/orders/service.log"
"""
NOTES = """- Monday: Anna opens the shop at nine and counts the stock.
- Tuesday: Ben brings the bread and cleans the front window.
- Wednesday: Anna orders flour, sugar and butter for the week.
- Thursday: Carl repairs the oven and checks the cold room.
- Friday: Ben closes the shop at six and takes the money to the bank.
"""


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
    "edit_lines": [
        Asked(
            f"Set the port of the server to 9090 in this file, and write the whole file:\n\n{SETTINGS}",
            '[server]\nhost = "127.0.0.1"\nport = 9090\n',
        ),
        Asked(
            f"In these notes replace Anna by Dora, and write all of them again:\n\n{NOTES}",
            "- Monday: Dora opens the shop at nine and counts the stock.\n",
        ),
    ],
    "json": [
        Asked("Describe a cat that lives in Lisbon as a JSON object."),
        Asked("Describe a dog of Oslo as a JSON object."),
    ],
    "chat": [
        Asked("List five facts about Volcanoes."),
        Asked(
            "Anna has 12 apples. She gives 5 to Ben and buys 8 more. How many apples does she have now?"
        ),
        Asked("What is the history of Lisbon?"),
        Asked("Give me three questions about Chess."),
    ],
    "new": [
        Asked("Tell me a short story about a lighthouse."),
        Asked("Why is the sky blue? Answer in a few sentences."),
    ],
}
COPYING = ("repeat", "edit", "edit_lines")  # tasks whose answers repeat their prompt
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
    parser.add_argument("--rows", nargs="+", type=int, help="time steps of so many rows instead")
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
    if options.rows:
        record(
            {"model": config.model, "threads": torch.get_num_threads()} | step_ms(config, options),
            options,
        )
        return
    without = msgspec.structs.replace(config, speculate="off", draft_tokens="auto")
    started = {"off": start(without), "on": start(config)}
    results = {}
    for task in options.tasks:
        grammar = grammar_of(started["on"]) if task == "json" else None
        asked = prompts(started["on"].opened, TASKS[task])
        results[task] = compare(started, asked, options, grammar)
        print(task, results[task], flush=True)
    if copying := [results[task]["cpu_s"] for task in COPYING if task in results]:
        off_s, on_s = (sum(cpu_s[way] for cpu_s in copying) for way in ("off", "on"))
        results["copying_speedup_in_cpu_time"] = round(off_s / on_s, 3)  # the answers are equal
    record(
        {
            "model": config.model,
            "speculate": config.speculate,
            "draft_tokens": drafts,
            "threads": torch.get_num_threads(),
        }
        | results,
        options,
    )


class KnowingDrafter:
    """Proposes what a request without drafts was answered."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.drafts = answer, 0

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        starts = [len(ask.request.outputs) + len(ask.hoped) for ask in asks]
        return [self.answer[start : start + self.drafts] for start in starts]

    def finish(self, request: Request) -> None: ...


def step_ms(config: EngineConfig, options: argparse.Namespace) -> dict[str, Any]:
    """The shortest CPU time of steps behind one prompt, by their rows; those of the answer's end are left out."""
    most = max(*options.rows, 2) - 1
    started = start(msgspec.structs.replace(config, speculate="ngram", draft_tokens=most))
    speculation = started.engine.scheduler.speculation
    assert speculation is not None
    speculation.drafter = drafter = KnowingDrafter([])
    (prompt, *_) = prompts(started.opened, TASKS["repeat"])
    found = {}
    for rows in (
        1,
        *options.rows * options.rounds,
    ):  # the first is the answer that drafts are taken from
        drafter.drafts = rows - 1
        answering, times = Answering(started, prompt, options.outputs, None), []
        while answering.engine.has_work:
            before = answering.cpu_seconds
            answering.step()
            times.append(1e3 * (answering.cpu_seconds - before))
        assert drafter.answer in ([], answering.request.outputs)
        drafter.answer = answering.request.outputs
        shortest = round(min(times[: max(len(times) - 1, 1)]), 2)
        found[rows] = min(found.get(rows, shortest), shortest)
    return {
        "prompt_tokens": len(prompt),
        "step_ms": {str(rows): found[rows] for rows in options.rows},
    }


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


class Answering:
    """A request that an engine answers, and the time that its tokens behind the first have taken."""

    def __init__(
        self, started: Started, prompt: list[int], most: int, grammar: Grammar | None
    ) -> None:
        self.engine, self.seconds, self.cpu_seconds = started.engine, 0.0, 0.0
        self.request = Request(
            time.monotonic_ns(),
            prompt,
            SamplingParams(temperature=0, max_tokens=most),
            eos_ids=started.opened.eos_ids,
            constraint=None if grammar is None else grammar.start(),
        )
        self.engine.add(self.request)
        while not self.request.outputs:
            self.engine.step()

    def step(self) -> None:
        began, began_cpu = time.perf_counter(), time.process_time()
        self.engine.step()
        self.seconds += time.perf_counter() - began
        self.cpu_seconds += time.process_time() - began_cpu


def compare(
    started: dict[str, Started],
    asked: list[list[int]],
    options: argparse.Namespace,
    grammar: Grammar | None,
) -> dict[str, Any]:
    """Of one task: decoded tokens per second without and with drafts, prompts not counted."""
    speculation = started["on"].engine.scheduler.speculation
    assert speculation is not None
    before = (speculation.counts.runs, speculation.counts.accepted)
    found: dict[str, list[Answering]] = {way: [] for way in started}
    for prompt in asked * options.rounds:
        for way, one in started.items():
            found[way].append(Answering(one, prompt, options.outputs, grammar))
        both = [many[-1] for many in found.values()]
        while left := [one for one in both if one.engine.has_work]:
            min(left, key=lambda one: one.seconds).step()
    answers = {way: [one.request.outputs for one in many] for way, many in found.items()}
    return {
        "tokens_per_s": {way: round(rate(many, "seconds"), 2) for way, many in found.items()},
        "cpu_s": {
            way: round(sum(one.cpu_seconds for one in many), 2) for way, many in found.items()
        },
        "speedup": speedup(found, "seconds"),
        "speedup_in_cpu_time": speedup(found, "cpu_seconds"),
        "of_each_prompt": [
            speedup({way: many[at :: len(asked)] for way, many in found.items()}, "cpu_seconds")
            for at in range(len(asked))
        ],
        "length": round(speculation.counts.length_since(*before) or 1.0, 2),
        "equal": answers["on"] == answers["off"],
        "output_tokens": sum(map(len, answers["on"])),
    }


def rate(answers: list[Answering], clock: str) -> float:
    tokens = sum(len(one.request.outputs) - 1 for one in answers)
    return tokens / sum(getattr(one, clock) for one in answers)


def speedup(found: dict[str, list[Answering]], clock: str) -> float:
    return round(rate(found["on"], clock) / rate(found["off"], clock), 3)


if __name__ == "__main__":
    main()

"""Asks the teachers, through our own engine: stories by stories15M, answers by SmolLM2-135M-Instruct.

    python sample.py stories --model FOLDER --count 20000 --seconds 60 --out stories.jsonl
    python sample.py answers --model smollm2-135m-instruct --count 12000 --seconds 60 --out answers.jsonl

Writes what was said as it was said, with why it ended; `assemble.py` chooses. Ends after --seconds at the latest,
between two rounds. The same numbers give the same prompts; what is answered depends on the GPU, as sampling does.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from prompts import question, story_opening

from cairn import LLM, SamplingParams

SYSTEM = "You are a helpful assistant. Answer in one to three short and simple sentences."
STORY_START = 1  # the token between two stories in that model's training


def stories(llm: LLM, numbers: range) -> Iterator[dict[str, str]]:
    openings = [story_opening(number) for number in numbers]
    params = [
        SamplingParams(
            temperature=0.85, top_p=0.95, max_tokens=220, stop_token_ids=[STORY_START], seed=number
        )
        for number in numbers
    ]
    for output in llm.generate(openings, params, use_tqdm=False):
        answer = output.outputs[0]
        yield {"text": f"{output.prompt}{answer.text}", "ended": str(answer.finish_reason)}


def answers(llm: LLM, numbers: range) -> Iterator[dict[str, str]]:
    asked = [question(number) for number in numbers]
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in asked
    ]
    params = [
        SamplingParams(temperature=0.35, top_p=0.9, max_tokens=160, seed=number)
        for number in numbers
    ]
    for text, output in zip(asked, llm.chat(chats, params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        yield {"prompt": text, "text": answer.text, "ended": str(answer.finish_reason)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("stories", "answers"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--together", type=int, default=1024, help="requests at once")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ask = stories if options.kind == "stories" else answers
    limit = {} if options.kind == "stories" else {"max_model_len": 512}
    size, written = 2 * options.together, 0
    with (
        LLM(options.model, max_num_seqs=options.together, **limit) as llm,
        options.out.open("w", encoding="utf-8") as file,
    ):
        began = time.perf_counter()
        for start in range(0, options.count, size):
            numbers = range(start, min(start + size, options.count))
            for record in ask(
                llm, range(options.first + numbers.start, options.first + numbers.stop)
            ):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                written += 1
            file.flush()
            took = time.perf_counter() - began
            print(f"{options.kind}: {written} after {took:.1f} s", flush=True)
            if took + took / (start // size + 1) > options.seconds:  # the next round would be late
                break


if __name__ == "__main__":
    main()

"""What the model can do, counted: sums over all sizes, capitals, word problems, and a page of answers to read.

    python evaluate.py MODEL --out evaluation.json [--gsm8k gsm8k_test.jsonl]

Greedy, through the engine and the chat template. Questions are drawn with a seed of their own. Does not know what was
in the training data: `seen.py` counts that.
"""

import argparse
import json
import random
import re
from pathlib import Path

from facts import CAPITALS

from cairn import LLM, SamplingParams

SEED, SUMS, PROBLEMS = 99, 200, 100
NUMBER = re.compile(r"-?\d+")
READ = [
    "Hello!", "Who are you?", "What can you do?", "What is the capital of France?", "Why is the sky blue?",
    "Tell me a short story.", "Tell me a story about a fox and a key.",
    "Tell me a story about a dragon who is afraid of the dark.",
    "Explain gravity in one sentence.", "What is a cairn?", "Name three fruits.", "Is a carrot a vegetable?",
    "Mia has 12 apples and buys 7 more. How many apples does Mia have now?", "What is 47 + 38?", "What is 83 - 27?",
    "How can I sleep better?", "What do you think about music?", "Write a Python function that sorts a list.",
    "Who was Napoleon?", "Thank you!",
]  # fmt: skip


def ask(
    llm: LLM, questions: list[str], most: int, temperature: float = 0.0
) -> list[tuple[str, str]]:
    """The answers, and why each ended."""
    params = SamplingParams(temperature=temperature, max_tokens=most, seed=1)
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [(output.outputs[0].text, str(output.outputs[0].finish_reason)) for output in outputs]


def drawn(sign: str, low: int, high: int) -> list[tuple[int, int]]:
    """The pairs that are asked for; no difference is below zero."""
    dice = random.Random(f"{SEED} {sign} {low} {high}")
    pairs = [(dice.randint(low, high), dice.randint(low, high)) for _ in range(SUMS)]
    return [(max(pair), min(pair)) for pair in pairs] if sign == "-" else pairs


def sums(llm: LLM, sign: str, low: int, high: int) -> float:
    """Share of right last numbers."""
    pairs = drawn(sign, low, high)
    results = [a + b if sign == "+" else a - b if sign == "-" else a * b for a, b in pairs]
    answers = ask(llm, [f"What is {a} {sign} {b}?" for a, b in pairs], 48)
    right = 0
    for (text, _), result in zip(answers, results, strict=True):
        found = NUMBER.findall(text.replace(" - ", " minus "))
        right += bool(found) and int(found[-1]) == result
    return right / SUMS


def word_problems(llm: LLM, path: Path) -> float:
    """Share of the first problems of GSM8K whose last number is right."""
    lines = path.read_text(encoding="utf-8").splitlines()[:PROBLEMS]
    problems = [json.loads(line) for line in lines]
    answers = ask(llm, [problem["question"] for problem in problems], 200)
    right = 0
    for (text, _), problem in zip(answers, problems, strict=True):
        found = NUMBER.findall(text.replace(",", ""))
        wanted = problem["answer"].partition("####")[2].replace(",", "")
        right += bool(found) and int(found[-1]) == int(wanted)
    return right / len(problems)


def capitals(llm: LLM) -> float:
    answers = ask(llm, [f"What is the capital of {country}?" for country in CAPITALS], 32)
    right = [city in text for (text, _), city in zip(answers, CAPITALS.values(), strict=True)]
    return sum(right) / len(right)


def measure(llm: LLM) -> dict[str, object]:
    read = ask(llm, READ, 250)
    again = ask(llm, READ, 250, temperature=0.7)
    return {
        "sums_asked": SUMS,
        "add_two_digits": sums(llm, "+", 10, 99),
        "subtract_two_digits": sums(llm, "-", 10, 99),
        "add_one_digit": sums(llm, "+", 0, 9),
        "add_three_digits": sums(llm, "+", 100, 999),
        "times_up_to_12": sums(llm, "*", 2, 12),
        "capitals_asked": len(CAPITALS),
        "capitals": capitals(llm),
        "answers_that_end": sum(ended == "stop" for _, ended in read) / len(read),
        "answers": [
            {"question": asked, "greedy": one[0], "at_0.7": two[0]}
            for asked, one, two in zip(READ, read, again, strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, help="gsm8k_test.jsonl, which is not trained on")
    options = parser.parse_args()
    with LLM(options.model) as llm:
        found = measure(llm)
        if options.gsm8k is not None:
            found["gsm8k_asked"] = PROBLEMS
            found["gsm8k_test"] = word_problems(llm, options.gsm8k)
    options.out.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, value in found.items():
        if isinstance(value, float):
            print(f"{name} {value:.1%}")


if __name__ == "__main__":
    main()

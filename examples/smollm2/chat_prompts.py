"""Prompts for the chats that a head learns from: questions about titles of Wikipedia, sums in words, small programs.

    python examples/smollm2/chat_prompts.py enwik8.gz gsm8k_train.jsonl mbpp.jsonl > prompts.jsonl

A line has `prompt` and `held_out`. Whether a prompt is held out follows from its subject alone, so no subject is on
both sides. Writes no answers: the model does that itself.
"""

import argparse
import gzip
import json
import random
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

TITLE = re.compile(r"<title>([A-Z][a-z]+(?: [A-Za-z][a-z]+){0,3})</title>")
REDIRECT = "#redirect"
HELD_OUT = 16  # one of so many subjects
FORMS = (
    "What is {}?", "Tell me about {}.", "Explain {} in simple words.", "Write a short story about {}.",
    "List five facts about {}.", "Why is {} important?", "Write a poem about {}.", "Give me three questions about {}.",
    "What do people often get wrong about {}?", "Write a paragraph about {}.", "How would you teach {} to a child?",
    "Write an email to a friend about {}.", "What is the history of {}?", "Summarise {} in one sentence.",
    "I have to give a talk about {}. How should I begin?", "What should I read to learn more about {}?",
)  # fmt: skip


def titles(file: Path) -> Iterator[str]:
    """Of articles that are no redirections."""
    title = ""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            if found := TITLE.search(line):
                title = found.group(1)
            elif title and "<text" in line:
                if REDIRECT not in line.lower():
                    yield title
                title = ""


def field(file: Path, name: str) -> list[str]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)[name] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wikipedia", type=Path)
    parser.add_argument("sums", type=Path)
    parser.add_argument("programs", type=Path)
    parser.add_argument("--most", type=int, default=1500, help="sums and programs, of each")
    options = parser.parse_args()
    dice = random.Random(0)
    asked = [(title, dice.choice(FORMS).format(title)) for title in titles(options.wikipedia)]
    for texts in (field(options.sums, "question"), field(options.programs, "text")):
        asked += [(text, text) for text in dice.sample(texts, min(options.most, len(texts)))]
    dice.shuffle(asked)
    for subject, prompt in asked:
        held_out = zlib.crc32(subject.encode()) % HELD_OUT == 0
        sys.stdout.write(json.dumps({"prompt": prompt, "held_out": held_out}) + "\n")


if __name__ == "__main__":
    main()

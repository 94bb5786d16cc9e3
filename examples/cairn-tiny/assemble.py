"""Chooses from what was sampled, adds what is made by rule, and writes the files that are tokenized.

    python assemble.py --texts texts --stories stories.jsonl --answers answers.jsonl --gsm8k train.jsonl --out corpus

    corpus/text/{sampled,grammar,sums}.jsonl   {"text": ...}         pretraining, beside what clean_text.py wrote
    corpus/chats.jsonl                         {"messages": [...]}   fine-tuning, and a part of pretraining
    corpus/vocabulary.jsonl                    {"text": ...}         a bit of everything, for the tokenizer

Left out: doubles, stories without an end, answers that were cut, that speak of their maker or of being an assistant.
"""

import argparse
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from conversations import Chat, chat
from prompts import ANIMALS, NAMES, THINGS
from sums import Turn, addition, any_problem, bought_or_given, subtraction, times

from cairn.train.data.arithmetic import problem
from cairn.train.data.counter_rng import Dice, mix, words
from cairn.train.data.stories import story as grammar_story

T = TypeVar("T")
SEED = 2026
LONGEST_CHAT = 2400  # characters
GRAMMAR_STORIES, SUM_PAGES, SUMS_PER_PAGE, CHATS = 12_000, 40_000, 12, 90_000
UNWANTED = re.compile(
    r"smollm|hugging ?face|as an ai|language model|i'm sorry|i am sorry|i cannot|i can't|assistant|http|\||#",
    re.I,
)
FRAME = {  # of the questions in prompts.py
    word[:4]
    for word in words(
        "explain one sentence tell interesting fact about why are important what good write you know describe child "
        "how can give tip want find people use for poem short the where and"
    )
}
SENTENCE = re.compile(r"[^.!?]*[.!?][\"')]*(?=\s|$)")
CALCULATION = re.compile(r"<<[^>]*>>")


# -- choosing -------------------------------------------------------------------------------------


def plain(text: str) -> bool:
    return all(character.isascii() or character in "’‘“”–é—" for character in text)


def straight(text: str) -> str:
    """Typographic quotes and dashes as a keyboard has them: fewer tokens to learn."""
    return text.translate(
        str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-"})
    )


def once(texts: Iterable[str], length: int = 14) -> Iterator[str]:
    """Each text whose first words after the opening have not been seen."""
    seen: set[tuple[str, ...]] = set()
    for text in texts:
        key = tuple(text.lower().split()[length : 2 * length])
        if key not in seen:
            seen.add(key)
            yield text


def good_stories(records: Iterable[dict[str, str]]) -> Iterator[str]:
    for record in records:
        text = straight(record["text"].strip())
        whole = record["ended"] == "stop" and text[-1:] in '.!?"'
        if whole and 200 < len(text) < 1600 and plain(text):
            yield text


def good_answer(record: dict[str, str]) -> str | None:
    """The first sentences of an answer, if they stand on their own."""
    text = straight(record["text"].strip())
    is_story = "story" in record["prompt"]
    if is_story and record["ended"] != "stop":
        return None
    first = " ".join(text.split()) if is_story else " ".join(text.split("\n\n")[0].split())
    sentences = [found.strip() for found in SENTENCE.findall(first)]
    kept = " ".join(sentences if is_story else sentences[:3])
    if (
        not 25 <= len(kept) <= 700
        or not plain(kept)
        or UNWANTED.search(kept)
        or kept[-1] not in ".!"
    ):
        return None
    if not is_story and not on_topic(record["prompt"], kept):
        return None
    if re.search(r"\d\.$|[:*]", kept) or len(set(kept.lower().split())) < 0.55 * len(kept.split()):
        return None  # the beginning of a list; words that repeat themselves
    return kept


def on_topic(asked: str, answered: str) -> bool:
    """Whether the answer has a word of the question that is more than its frame."""
    stems = {word[:4] for word in re.findall(r"[a-z]{3,}", asked.lower())} - FRAME
    return bool(stems & {word[:4] for word in re.findall(r"[a-z]{3,}", answered.lower())})


# -- making ---------------------------------------------------------------------------------------


def sums_page(number: int) -> str:
    """Questions with their answers, one below the other, as an exercise book has them."""
    dice = Dice(SEED, number, 21)
    kinds = (
        addition,
        addition,
        addition,
        subtraction,
        subtraction,
        times,
        any_problem,
        bought_or_given,
    )
    turns = [dice.pick(kinds)(dice) for _ in range(SUMS_PER_PAGE)]
    if dice.below(3) == 0:
        return "\n".join(answered.split(" The answer")[0] for _, answered in turns)
    if dice.below(2):
        return "\n\n".join(
            problem(mix(SEED, number, at), 0).text for at in range(SUMS_PER_PAGE // 2)
        )
    return "\n\n".join(f"Question: {asked}\nAnswer: {answered}" for asked, answered in turns)


class StoryTeller:
    """A request that fits a story: it names what comes in its first sentences."""

    def __init__(self, stories: list[str]) -> None:
        self.stories = stories

    def __call__(self, dice: Dice) -> Turn:
        if dice.below(6) == 0:
            text = " ".join(grammar_story(dice.below(1 << 62), 0).split())
        else:
            text = " ".join(dice.pick(self.stories).split())
        start = set(re.findall(r"\w+", text[:220]))
        animals = [name for name in ANIMALS if name in start]
        things = [name for name in THINGS if name in start]
        people = [name for name in NAMES if name in start]
        about = _about(dice, animals, things, people)
        ask = dice.pick(
            (
                "Tell me a story",
                "Tell me a short story",
                "Write a short story",
                "Can you tell me a story",
            )
        )
        end = "?" if ask.startswith("Can") else "."
        return f"{ask}{about}{end}", text


def _about(dice: Dice, animals: list[str], things: list[str], people: list[str]) -> str:
    """What the story is about; sometimes the user does not care."""
    if dice.below(5) == 0:
        return ""
    nouns = [("an " if noun[0] in "aeiou" else "a ") + noun for noun in (*animals[:2], *things[:1])]
    if people and dice.below(3) == 0:
        return f" about {people[0]}"
    if len(nouns) > 1 and dice.below(2):
        return f" about {nouns[0]} and {nouns[1]}"
    if nouns:
        return f" about {nouns[0]}"
    return f" about {people[0]}" if people else ""


def gsm8k_chat(record: dict[str, str]) -> Chat:
    working, _, answer = CALCULATION.sub("", record["answer"]).partition("####")
    steps = [
        line if line[-1] in ".!?" else f"{line}."
        for line in straight(working).split("\n")
        if line.strip()
    ]
    text = f"{' '.join(' '.join(steps).split())} The answer is {answer.strip()}."
    return pair(straight(record["question"]), text)


def pair(asked: str, answered: str) -> Chat:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def vocabulary(texts: Path, stories: list[str], chats: list[Chat]) -> Iterator[dict[str, str]]:
    """Mostly what the model will be asked for: simple words should be one token each."""
    for name, share in (("wiki", 6), ("mdn", 6), ("peps", 6)):
        for record in read(texts / f"{name}.jsonl")[::share]:
            yield {"text": record["text"]}
    for story in stories[:15_000]:
        yield {"text": story}
    for messages in chats[::3]:
        yield {"text": "\n".join(message["content"] for message in messages)}


# -- writing --------------------------------------------------------------------------------------


def many(make: Callable[[int], T], numbers: range) -> list[T]:
    """What is made of each number, on all cores."""
    workers = os.cpu_count() or 1
    with multiprocessing.Pool(workers) as pool:
        return pool.map(make, numbers, chunksize=-(-len(numbers) // workers))


def made_chat(number: int, tell: StoryTeller) -> Chat:
    return chat(SEED, number, tell)


def short(messages: Chat) -> bool:
    """Whether it surely has fewer than the 1024 tokens of a sample."""
    return sum(len(message["content"]) for message in messages) < LONGEST_CHAT


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, records: Iterable[object]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("texts", "stories", "answers", "gsm8k", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument(
        "--share", type=float, default=1.0, help="of what is made by rule, for a trial"
    )
    options = parser.parse_args()
    text = options.out / "text"
    text.mkdir(parents=True, exist_ok=True)
    asked, told = read(options.answers), read(options.stories)
    stories = list(once(good_stories(told)))
    answered = [(record["prompt"], kept) for record in asked if (kept := good_answer(record))]
    gsm8k = [gsm8k_chat(record) for record in read(options.gsm8k)]
    tell = StoryTeller(stories)

    def some(count: int) -> range:
        return range(max(1, round(count * options.share)))

    counts = {
        "stories sampled": len(told),
        "stories kept": write(text / "sampled.jsonl", ({"text": one} for one in stories)),
        "stories by grammar": write(
            text / "grammar.jsonl",
            ({"text": grammar_story(SEED, n)} for n in some(GRAMMAR_STORIES)),
        ),
        "pages of sums": write(
            text / "sums.jsonl", ({"text": one} for one in many(sums_page, some(SUM_PAGES)))
        ),
        "answers sampled": len(asked),
        "answers kept": len(answered),
        "gsm8k": len(gsm8k),
    }
    chats = [
        *many(partial(made_chat, tell=tell), some(CHATS)),
        *(pair(*one) for one in answered),
        *gsm8k,
    ]
    chats = [one for one in chats if short(one)]
    counts["chats"] = write(options.out / "chats.jsonl", ({"messages": one} for one in chats))
    write(options.out / "vocabulary.jsonl", vocabulary(options.texts, stories, chats))
    (options.out / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

"""Small conversations made by rule: endless, seeded, chat `number` is a pure function of its number.

Greetings, sums, stories, opposites, colours, counting and spelling, one to three questions long, some with a
system message. The answers are right by construction. Messages have the form that chat templates read.

    {"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "3 + 4 = 7. ..."}
"""

from collections.abc import Callable

from cairn.train.data.arithmetic import problem
from cairn.train.data.counter_rng import Dice, words
from cairn.train.data.stories import story

Chat = list[dict[str, str]]
Turn = tuple[str, str]  # what the user asks, what the assistant answers

NAME = "Cairn"

_SYSTEM = [
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in full sentences.",
]
_OPPOSITES = [
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("old", "young"),
    ("happy", "sad"),
    ("open", "closed"),
    ("light", "dark"),
    ("high", "low"),
    ("full", "empty"),
    ("loud", "quiet"),
    ("early", "late"),
    ("wet", "dry"),
    ("hard", "soft"),
    ("strong", "weak"),
    ("left", "right"),
]
_COLOURS = [
    ("the sky", "blue"),
    ("grass", "green"),
    ("snow", "white"),
    ("a ripe tomato", "red"),
    ("a lemon", "yellow"),
    ("coal", "black"),
    ("a carrot", "orange"),
    ("chocolate", "brown"),
]
_SOUNDS = [
    ("a dog", "barks"),
    ("a cat", "meows"),
    ("a cow", "moos"),
    ("a duck", "quacks"),
    ("a sheep", "bleats"),
    ("a horse", "neighs"),
    ("a frog", "croaks"),
    ("a bee", "buzzes"),
]
_WORDS = words("stone river house apple garden window bread horse music table letter cloud forest")
_DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def chat(seed: int, number: int) -> Chat:
    """Conversation `number` of the endless book `seed`."""
    dice = Dice(seed, number, 3)
    messages: Chat = []
    if dice.below(4) == 0:
        messages.append({"role": "system", "content": dice.pick(_SYSTEM)})
    for _ in range(dice.pick((1, 1, 2, 3))):
        question, answer = dice.pick(_TURNS)(dice)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _sum(dice: Dice) -> Turn:
    sampled = problem(dice.below(1 << 62), 0)
    return sampled.question, sampled.solution


def _story(dice: Dice) -> Turn:
    question = dice.pick(
        (
            "Tell me a story.",
            "Tell me a short story.",
            "Can you tell me a story, please?",
            "I would like to hear a story.",
            "Write a short story.",
        )
    )
    return question, story(dice.below(1 << 62), 0)


def _greeting(dice: Dice) -> Turn:
    question = dice.pick(("Hello!", "Hi!", "Hello, how are you?", "Good morning!", "Hi there."))
    answer = dice.pick(
        ("Hello! How can I help you?", "Hi! What can I do for you?", "Hello! I am glad to help.")
    )
    return question, answer


def _who(dice: Dice) -> Turn:
    question = dice.pick(("Who are you?", "What is your name?", "What can you do?"))
    return question, (
        f"I am {NAME}, a very small language model. I can tell short stories and work out simple sums."
    )


def _opposite(dice: Dice) -> Turn:
    pair = dice.pick(_OPPOSITES)
    one, other = pair if dice.below(2) else pair[::-1]
    return f"What is the opposite of {one}?", f"The opposite of {one} is {other}."


def _colour(dice: Dice) -> Turn:
    thing, colour = dice.pick(_COLOURS)
    return f"What colour is {thing}?", f"{thing[0].upper() + thing[1:]} is {colour}."


def _sound(dice: Dice) -> Turn:
    animal, sound = dice.pick(_SOUNDS)
    return f"What sound does {animal} make?", f"{animal[0].upper() + animal[1:]} {sound}."


def _count(dice: Dice) -> Turn:
    first = dice.between(1, 50)
    last = first + dice.between(2, 9)
    counted = ", ".join(map(str, range(first, last + 1)))
    return f"Count from {first} to {last}.", f"{counted}."


def _spell(dice: Dice) -> Turn:
    word = dice.pick(_WORDS)
    return f"Spell the word {word}.", f"The word {word} is spelled {'-'.join(word.upper())}."


def _day(dice: Dice) -> Turn:
    at = dice.below(7)
    day, after = _DAYS[at], _DAYS[(at + 1) % 7]
    return f"Which day comes after {day}?", f"The day after {day} is {after}."


def _thanks(dice: Dice) -> Turn:
    return dice.pick(("Thank you!", "Thanks a lot.")), dice.pick(
        ("You are welcome!", "You are welcome. Is there anything else?")
    )


_TURNS: tuple[Callable[[Dice], Turn], ...] = (
    _sum,
    _sum,
    _sum,
    _story,
    _story,
    _greeting,
    _who,
    _opposite,
    _colour,
    _sound,
    _count,
    _spell,
    _day,
    _thanks,
)

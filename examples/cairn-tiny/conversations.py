"""Chats by rule, for fine-tuning: sums, small facts, stories on demand, talk about itself.

    chat(seed, number, tell) -> [{"role": "user", ...}, {"role": "assistant", ...}, ...]

Chat `number` is a pure function of its number and of the list of stories. Answers are whole sentences, and right by
construction; half of the questions are typed as people type: no capital, no question mark.
"""

from collections.abc import Callable, Sequence

from facts import (
    ABOUT,
    CAPITALS,
    CITIES,
    COLOURS,
    EATS,
    HOMES,
    JOKES,
    KINDS,
    LEGS,
    MEANINGS,
    OPPOSITES,
    QUESTIONS,
    SOUNDS,
    YOUNG,
    lines,
    pairs,
)
from sums import (
    NAMES,
    Turn,
    addition,
    any_problem,
    bought_or_given,
    count,
    larger,
    next_number,
    subtraction,
    times,
)

from cairn.train.data.counter_rng import Dice, words

Chat = list[dict[str, str]]
Teller = Callable[[Dice], Turn]  # a request for a story, and the story

SYSTEM = [
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in full sentences.",
    "You are Cairn Tiny, a small language model.",
]
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
NUMBERS = words("zero one two three four five six seven eight nine ten eleven twelve")
SPELLED = words(
    "stone river house apple garden window bread horse music table letter cloud forest cat dog tree water "
    "school friend happy green summer winter paper bridge"
)


def chat(seed: int, number: int, tell: Teller) -> Chat:
    """Conversation `number`: one to three questions, sometimes with a system message."""
    dice = Dice(seed, number, 7)
    messages: Chat = []
    if dice.below(6) == 0:
        messages.append({"role": "system", "content": dice.pick(SYSTEM)})
    for _ in range(dice.pick((1, 1, 1, 2, 2, 3))):
        kind = dice.pick(TURNS)
        turns = (
            _name_is_kept(dice) if kind is None else [tell(dice) if kind is story else kind(dice)]
        )
        for asked, answered in turns:
            messages.append({"role": "user", "content": as_typed(dice, asked)})
            messages.append({"role": "assistant", "content": answered})
    return messages


def as_typed(dice: Dice, asked: str) -> str:
    """As it stands, or in one of the ways in which people are in a hurry."""
    hurry = dice.below(6)
    if hurry == 0:
        return asked[0].lower() + asked[1:]
    if hurry == 1:
        return asked.rstrip("?.!")
    if hurry == 2:
        return asked.lower().rstrip("?.!")
    return asked


# -- facts ----------------------------------------------------------------------------------------


def capital(dice: Dice) -> Turn:
    country = dice.pick(sorted(CAPITALS))
    city = CAPITALS[country]
    asked = dice.pick(
        (
            f"What is the capital of {country}?",
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Tell me the capital of {country}.",
            f"What's the capital city of {country}?",
            f"Capital of {country}?",
            f"Do you know the capital of {country}?",
        )
    )
    return asked, f"The capital of {country} is {city}."


def city(dice: Dice) -> Turn:
    name = dice.pick(sorted(CITIES))
    asked = dice.pick((f"Where is {name}?", f"In which country is {name}?", f"What is {name}?"))
    return asked, f"{name} is the capital of {CITIES[name]}."


def opposite(dice: Dice) -> Turn:
    pair = dice.pick(pairs(OPPOSITES))
    one, other = pair if dice.below(2) else pair[::-1]
    return f"What is the opposite of {one}?", f"The opposite of {one} is {other}."


def colour(dice: Dice) -> Turn:
    thing, shade = dice.pick(pairs(COLOURS))
    spelling = dice.pick(("colour", "color"))
    return f"What {spelling} is {thing}?", f"{thing[0].upper() + thing[1:]} is {shade}."


def about_an_animal(dice: Dice) -> Turn:
    form = dice.below(5)
    animal, answer = dice.pick(pairs((SOUNDS, YOUNG, LEGS, HOMES, EATS)[form]))
    the = ("An " if animal[0] in "aeiou" else "A ") + animal
    low = the[0].lower() + the[1:]
    if form == 0:
        return f"What sound does {low} make?", f"{the} {answer}."
    if form == 1:
        return f"What is a young {animal} called?", f"A young {animal} is called a {answer}."
    if form == 2:
        return f"How many legs does {low} have?", f"{the} has {answer} legs."
    if form == 3:
        return f"Where does {low} live?", f"{the} lives {answer}."
    return f"What does {low} eat?", f"{the} eats {answer}."


def name_some(dice: Dice) -> Turn:
    kind, members = dice.pick(pairs(KINDS))
    known = members.split(", ")
    many = dice.between(2, 4)
    start = dice.below(len(known))
    chosen = [known[(start + at) % len(known)] for at in range(many)]
    plural = {"country": "countries", "fish": "fish"}.get(kind, kind + "s")
    listed = ", ".join(chosen[:-1]) + " and " + chosen[-1]
    number = NUMBERS[many]
    asked = dice.pick(
        (
            f"Name {number} {plural}.",
            f"Can you name {number} {plural}?",
            f"Tell me {number} {plural}.",
        )
    )
    return asked, f"{number.capitalize()} {plural} are {listed}."


def is_it(dice: Dice) -> Turn:
    kinds = dict(pairs(KINDS))
    plain = (
        "fruit",
        "vegetable",
        "bird",
        "insect",
        "tree",
        "flower",
        "tool",
        "metal",
        "instrument",
        "sport",
    )
    kind, other = dice.pick(plain), dice.pick(plain)
    thing = dice.pick(kinds[kind].split(", "))
    a = "" if kind in ("metal", "sport") else ("an " if thing[0] in "aeiou" else "a ")
    start = (a + thing)[0].upper() + (a + thing)[1:]
    article = {one: ("an " if one[0] in "aeiou" else "a ") + one for one in plain}
    if dice.below(2) or kind == other or thing in kinds[other]:
        return f"Is {a}{thing} {article[kind]}?", f"Yes, {a}{thing} is {article[kind]}."
    return (
        f"Is {a}{thing} {article[other]}?",
        f"No. {start} is {article[kind]}, not {article[other]}.",
    )


def meaning(dice: Dice) -> Turn:
    thing, sentence = dice.pick(lines(MEANINGS, ":"))
    first = sentence.split()[0]
    low = f"{first.lower()} {thing}" if first in ("A", "An", "The") else thing
    asked = dice.pick(
        (f"What is {low}?", f"What is {low}?", f"Explain what {low} is.", f"Explain {thing} in one sentence.",
         f"What does {thing} mean?", f"Can you explain what {low} is?", f"Tell me what {low} is.")
    )  # fmt: skip
    return asked, sentence


def question(dice: Dice) -> Turn:
    return dice.pick(lines(QUESTIONS, ";"))


def about_itself(dice: Dice) -> Turn:
    return dice.pick(lines(ABOUT, ";"))


def calendar(dice: Dice) -> Turn:
    ring, what = dice.pick(((DAYS, "day"), (MONTHS, "month")))
    at = dice.below(len(ring))
    if dice.below(2):
        return (
            f"Which {what} comes after {ring[at]}?",
            f"{ring[(at + 1) % len(ring)]} comes after {ring[at]}.",
        )
    return f"Which {what} comes before {ring[at]}?", f"{ring[at - 1]} comes before {ring[at]}."


def spelling(dice: Dice) -> Turn:
    word = dice.pick(SPELLED)
    form = dice.below(3)
    if form == 0:
        return f"Spell the word {word}.", f"The word {word} is spelled {'-'.join(word.upper())}."
    if form == 1:
        return (
            f"What is the first letter of {word}?",
            f"The first letter of {word} is {word[0].upper()}.",
        )
    return (
        f"How many letters does the word {word} have?",
        f"The word {word} has {NUMBERS[len(word)]} letters.",
    )


# -- talk -----------------------------------------------------------------------------------------


def greeting(dice: Dice) -> Turn:
    asked = dice.pick(
        ("Hello!", "Hi!", "Hello", "Hi there.", "Good morning!", "Good evening!", "Hey", "Hello, how are you?",
         "How are you?", "Hi, how are you today?", "How is it going?")
    )  # fmt: skip
    if "how" in asked.lower():
        return asked, dice.pick(
            (
                "I am fine, thank you. How can I help you?",
                "I am well, thank you! What can I do for you?",
            )
        )
    return asked, dice.pick(
        ("Hello! How can I help you?", "Hi! What can I do for you?", "Hello! I am glad to help.")
    )


def thanks(dice: Dice) -> Turn:
    asked = dice.pick(
        (
            "Thank you!",
            "Thanks a lot.",
            "Thanks!",
            "Great, thank you.",
            "Goodbye!",
            "Bye",
            "See you later.",
        )
    )
    if asked[0] in "BS" or asked == "Goodbye!":
        return asked, dice.pick(("Goodbye! Have a nice day.", "Goodbye, and come back soon!"))
    return asked, dice.pick(("You are welcome!", "You are welcome. Is there anything else?"))


def joke(dice: Dice) -> Turn:
    asked = dice.pick(
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Can you tell me a joke?")
    )
    return asked, dice.pick(JOKES.splitlines())


def not_known(dice: Dice) -> Turn:
    asked = dice.pick(
        ("What is the weather like today?", "What time is it?", "What is the date today?", "Who is the president?",
         "What happened in the news today?", "What is my name?", "Where do I live?", "What is the price of gold?",
         "Who won the game yesterday?", "What am I thinking?")
    )  # fmt: skip
    return asked, dice.pick(("I do not know that.", "I am sorry, I do not know that."))


def story(dice: Dice) -> Turn:
    """Stands for a request for a story; `chat` replaces it by its teller."""
    raise NotImplementedError


def _name_is_kept(dice: Dice) -> list[Turn]:
    """What was said a moment ago is still known."""
    name, thing = dice.pick(NAMES), dice.pick(("blue", "red", "green", "yellow", "purple"))
    if dice.below(2):
        told = dice.pick((f"My name is {name}.", f"Hi, I am {name}.", f"Hello, my name is {name}."))
        return [
            (told, f"Hello {name}! How can I help you?"),
            ("What is my name?", f"Your name is {name}."),
        ]
    told = f"My favourite colour is {thing}."
    return [
        (told, f"{thing.capitalize()} is a nice colour."),
        ("What is my favourite colour?", f"Your favourite colour is {thing}."),
    ]


TURNS: Sequence[Callable[[Dice], Turn] | None] = (
    *[addition] * 9, *[subtraction] * 5, *[times] * 2, *[any_problem] * 3, *[bought_or_given] * 4, larger, count,
    next_number, *[capital] * 5, city, *[opposite] * 2, *[colour] * 2, *[about_an_animal] * 3, *[name_some] * 2,
    *[is_it] * 2, *[meaning] * 5, *[question] * 4, *[about_itself] * 3, calendar, spelling, *[greeting] * 2, thanks,
    joke, not_known, *[story] * 7, None,
)  # fmt: skip

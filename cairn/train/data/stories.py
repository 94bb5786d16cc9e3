"""Short stories from a grammar: endless, seeded, story `number` is a pure function of its number.

For training without any download: the language is simple, the people keep their names and pronouns, and what is
lost at the beginning is found at the end, so that there is something to learn beyond single words.

    opening -> wish or trouble -> an attempt -> help -> ending, sometimes a moral
"""

from typing import NamedTuple

from cairn.train.data.counter_rng import Dice, words

_GIRLS = words("Mia Lily Anna Zoe Emma Nora Ruby Ida Clara Maya Sara Lucy Ella Rosa Tess Jane")
_BOYS = words("Tom Ben Max Leo Sam Finn Jack Otto Paul Tim Hugo Noah Adam Luke Oscar Theo")
_ANIMALS = words("fox bear rabbit mouse duck cat dog frog owl horse hedgehog squirrel goat turtle")
_TRAITS = words("little kind brave clever quiet curious shy cheerful young gentle")
_COLOURS = words("red blue green yellow white black brown purple silver golden")
_THINGS = words("ball kite hat boat drum book key lamp bell box cup stone shell ring scarf basket")
_PLACES = [
    "in the forest",
    "by the river",
    "at the lake",
    "in the garden",
    "on the hill",
    "near the sea",
    "behind the old barn",
    "in the park",
    "under the bridge",
    "at the market",
    "in the meadow",
]
_HIDING = [
    "under a bush",
    "behind a big tree",
    "in the tall grass",
    "between two rocks",
    "in a small hole",
    "under a bench",
    "next to the well",
    "at the end of the path",
    "on top of a wall",
]
_WEATHER = [
    "The sun was warm.",
    "It was a windy day.",
    "A soft rain was falling.",
    "Snow lay on the ground.",
    "The sky was clear and blue.",
    "There were clouds in the sky.",
    "It was early in the morning.",
]
_FOOD = [
    "an apple",
    "some bread",
    "a cake",
    "warm soup",
    "a pear",
    "sweet berries",
    "a cookie",
]
_MORALS = [
    "It is good to ask for help.",
    "Friends help each other.",
    "Sharing makes everyone happy.",
    "Being kind is never wrong.",
    "Those who look carefully will find.",
    "It is fine to be afraid.",
    "Small ones can do big things.",
]


class Person(NamedTuple):
    name: str  # "Mia", "the fox"
    intro: str  # "a kind girl named Mia", "a clever fox"
    he: str
    him: str
    his: str

    @property
    def start(self) -> str:
        """The name as it begins a sentence."""
        return self.name[0].upper() + self.name[1:]


def story(seed: int, number: int) -> str:
    """Story `number` of the endless book `seed`."""
    dice = Dice(seed, number, 1)
    hero, friend = _person(dice), _person(dice)
    while friend.name == hero.name:
        friend = _person(dice)
    middle = dice.pick((_lost_thing, _wish_to_learn, _hungry_stranger, _broken_thing))
    parts = [_opening(dice, hero), middle(dice, hero, friend), _ending(dice, hero, friend)]
    if dice.below(3) == 0:
        parts.append(dice.pick(_MORALS))
    gap = "\n\n" if dice.below(2) else " "
    return gap.join(parts)


def _person(dice: Dice) -> Person:
    trait = dice.pick(_TRAITS)
    article = "an" if trait[0] in "aeiou" else "a"
    kind = dice.below(3)
    if kind == 0:
        animal = dice.pick(_ANIMALS)
        return Person(f"the {animal}", f"{article} {trait} {animal}", "it", "it", "its")
    if kind == 1:
        name = dice.pick(_GIRLS)
        return Person(name, f"{article} {trait} girl named {name}", "she", "her", "her")
    name = dice.pick(_BOYS)
    return Person(name, f"{article} {trait} boy named {name}", "he", "him", "his")


def _opening(dice: Dice, hero: Person) -> str:
    place = dice.pick(_PLACES)
    first = dice.pick(
        (
            f"Once upon a time there was {hero.intro}.",
            f"One day {hero.intro} went for a walk {place}.",
            f"There was once {hero.intro} who lived {place}.",
            f"Long ago, {place}, there lived {hero.intro}.",
        )
    )
    return f"{first} {dice.pick(_WEATHER)}" if dice.below(2) else first


def _lost_thing(dice: Dice, hero: Person, friend: Person) -> str:
    thing = f"{dice.pick(_COLOURS)} {dice.pick(_THINGS)}"
    hiding = dice.pick(_HIDING)
    feeling = dice.pick(("sad", "worried", "very upset"))
    return (
        f"{hero.start} had a {thing} and loved it very much. But one morning the {thing} was gone. "
        f"{hero.start} was {feeling}. {hero.he.capitalize()} looked everywhere but could not find it. "
        f'Then {hero.he} met {friend.intro}. "Why are you sad?" asked {friend.name}. '
        f'"I have lost my {thing}," said {hero.name}. "Let us look together," said {friend.name}. '
        f"They looked for a long time. At last they found the {thing} {hiding}."
    )


def _wish_to_learn(dice: Dice, hero: Person, friend: Person) -> str:
    skill = dice.pick(
        ("swim", "sing", "dance", "climb a tree", "whistle", "read", "paint", "ride a bike")
    )
    days = dice.pick(("two", "three", "four", "five", "six", "seven"))
    return (
        f"{hero.start} wanted to learn to {skill}. {hero.he.capitalize()} tried, but it was too hard. "
        f'Then {friend.intro} came along. "I can show you," said {friend.name}. '
        f"Every day they practised together. After {days} days {hero.name} could {skill}. "
        f'"Look at me!" {hero.he} called. {friend.start} laughed and was proud of {hero.him}.'
    )


def _hungry_stranger(dice: Dice, hero: Person, friend: Person) -> str:
    food = dice.pick(_FOOD)
    place = dice.pick(_PLACES)
    return (
        f"{hero.start} had {food} for lunch. {place[0].upper() + place[1:]} {hero.he} saw "
        f'{friend.intro}. "I am so hungry," said {friend.name}. {hero.start} thought for a moment. '
        f'"You can have half of my lunch," said {hero.name}. They sat down and ate {food} together. '
        f'"Thank you," said {friend.name}. "You are very kind."'
    )


def _broken_thing(dice: Dice, hero: Person, friend: Person) -> str:
    thing = f"{dice.pick(_COLOURS)} {dice.pick(_THINGS)}"
    tool = dice.pick(("some glue", "a piece of string", "a bit of tape", "a needle and thread"))
    return (
        f"{hero.start} made a {thing} for {friend.name}. On the way it fell down and broke. "
        f'"Oh no!" cried {hero.name}. {hero.he.capitalize()} went home and took {tool}. '
        f"{hero.he.capitalize()} worked all evening until the {thing} was whole again. "
        f'In the morning {hero.he} gave it to {friend.name}. "This is the best {thing} in the world," '
        f"said {friend.name}."
    )


def _ending(dice: Dice, hero: Person, friend: Person) -> str:
    return dice.pick(
        (
            f"{hero.start} and {friend.name} were happy and went home.",
            f"From that day on {hero.name} and {friend.name} were friends.",
            f"{hero.start} smiled. It had been a good day.",
            f"When the moon came up, {hero.name} fell asleep with a smile.",
            f"{hero.start} never forgot {friend.name}.",
        )
    )

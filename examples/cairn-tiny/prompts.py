"""What the two teachers are asked: beginnings of stories for one, simple questions for the other.

    story_opening(7)  -> 'Once upon a time, there was a shy fox named Ida.'
    question(7)       -> 'Why is sleep important?'

Prompt `number` is a pure function of its number. All of it is made of our own words.
"""

from cairn.train.data.counter_rng import Dice, words

NAMES = words(
    "Mia Lily Anna Zoe Emma Nora Ruby Ida Clara Maya Sara Lucy Ella Rosa Tess Jane Tom Ben Max Leo Sam Finn Jack "
    "Otto Paul Tim Hugo Noah Adam Luke Oscar Theo Amy Sue Jill Bob Kim Fred Mark Anne Rose Dan"
)
ANIMALS = words(
    "fox bear rabbit mouse duck cat dog frog owl horse hedgehog squirrel goat turtle lion elephant bird bee fish cow "
    "sheep pig hen monkey tiger butterfly ant spider whale penguin puppy kitten wolf deer crow snail dragon"
)
TRAITS = words(
    "little kind brave clever quiet curious shy cheerful young gentle lazy hungry sad happy grumpy proud"
)
THINGS = words(
    "ball kite hat boat drum book key lamp bell box cup stone shell ring scarf basket tree flower cake apple door "
    "bridge river cloud star moon mirror coat bicycle train map robot garden snowman umbrella treasure candle"
)
PLACES = [
    "the park",
    "the forest",
    "the beach",
    "the market",
    "the lake",
    "the farm",
    "the zoo",
    "school",
    "the garden",
]
TOPICS = words(
    "sleep exercise water reading friendship honesty music art sport school history science mathematics "
    "language cooking gardening nature weather rain snow wind thunder fire light sound colour time money work "
    "travel trains bridges cities farms forests rivers oceans mountains deserts islands volcanoes earthquakes "
    "planets stars gravity electricity magnets computers robots programs books libraries teachers doctors "
    "farmers families children pets dogs cats horses birds fish insects bees butterflies spiders whales "
    "elephants lions trees flowers seeds fruit vegetables bread milk cheese honey salt sugar tea coffee "
    "breakfast health teeth eyes ears hands the~heart the~brain bones blood dreams games chess football "
    "swimming cycling dancing singing painting poetry stories maps clocks boats aeroplanes cars bicycles roads "
    "houses windows chairs shoes clothes paper glass metal wood stone plastic recycling energy the~sun the~moon "
    "the~earth air oxygen ice clouds rainbows seasons winter summer spring autumn holidays birthdays letters "
    "telephones the~internet photographs films newspapers patience courage kindness teamwork curiosity practice "
    "mistakes learning habits laughter silence"
)
GOALS = [
    "learn a new language", "make a new friend", "save money", "sleep better", "plant a tree", "bake bread",
    "make a cup of tea", "clean my room", "ride a bicycle", "write a letter", "read more books", "draw a cat",
    "stay healthy", "be a good friend", "wake up early", "take care of a dog", "take care of a plant",
    "cross a road safely", "study for a test", "build a snowman", "fly a kite", "tie my shoes", "boil an egg",
    "cook rice", "wash my hands", "learn to swim", "calm down", "say sorry", "make a sandwich", "remember names",
]  # fmt: skip


def story_opening(number: int) -> str:
    dice = Dice(11, number)
    name, other = dice.pick(NAMES), dice.pick(NAMES)
    animal, friend, trait = dice.pick(ANIMALS), dice.pick(ANIMALS), dice.pick(TRAITS)
    thing, place = dice.pick(THINGS), dice.pick(PLACES)
    a = "an" if trait[0] in "aeiou" else "a"
    an = "an" if animal[0] in "aeiou" else "a"
    return dice.pick(
        (
            f"Once upon a time, there was {a} {trait} {animal} named {name}.",
            f"Once upon a time, there was {a} {trait} {animal}. One day, the {animal} found a {thing}.",
            f"Once upon a time, there was {a} {trait} {animal} who lived near {place}.",
            f"One day, {an} {animal} met a {friend} in {place}.",
            f"One day, {name} and {other} went to {place}.",
            f"{name} had a {thing}. {name} loved the {thing} very much.",
            f"Once upon a time, there was {a} {trait} girl named {name} who wanted a {thing}.",
            f"Once upon a time, there was {a} {trait} boy named {name}. He had a pet {animal}.",
            f"{name} and {other} were best friends. They liked to play with a {thing}.",
            f"Once upon a time, in {place}, there lived {a} {trait} {animal} and a {friend}.",
            f"There was once {a} {trait} {animal} that wanted to be friends with a {friend}.",
            "Once upon a time",
        )
    )


def question(number: int) -> str:
    dice = Dice(12, number)
    topic = dice.pick(TOPICS).replace("~", " ")
    animal, thing = dice.pick(ANIMALS), dice.pick(THINGS)
    an = "an" if animal[0] in "aeiou" else "a"
    forms = (
        f"Explain {topic} in one sentence.", f"Tell me one interesting fact about {topic}.",
        f"Why is {topic} important?" if topic[-1] != "s" else f"Why are {topic} important?",
        f"What is good about {topic}?", f"Write one sentence about {topic}.", f"What do you know about {topic}?",
        f"Describe {topic} to a child.", f"How can I {dice.pick(GOALS)}?",
        f"Give me a tip: I want to {dice.pick(GOALS)}.",
        f"How do I {dice.pick(GOALS)}?", f"Tell me about {topic}.", f"Describe {an} {animal}.",
        f"What is {an} {animal}?",
        f"Where do we find {topic}?", f"Write a short poem about {topic}.", f"What do people use {topic} for?",
        f"Tell me a very short story about {an} {animal} and a {thing}.",
    )  # fmt: skip
    return dice.pick(forms)

"""The fixed texts, and what is asked about them. Pure Python.

    prose, code, numbers    short texts of several kinds: every token is scored
    long                    only for models with a window: longer than the window, scored behind it
    chat                    two messages through the chat template: the answer is scored

Texts never change: a record of last year is compared with one of today. A new text gets a new name.
"""

from typing import NamedTuple

TOP = 5  # log-probabilities asked for at each place: what OpenAI's completions allow
ANSWER = 12  # tokens that are generated and scored after a text and in the chat
LONG_ANSWER = (
    48  # after a text whose own tokens a server does not score: fewer say too little about it
)

TEXTS = {
    "prose": (
        "The harbour lay quiet in the early light, and the fishing boats had not yet come back. An old man sat on "
        "the wall with his net across his knees. He mended it as his father had taught him, knot by knot, without "
        "looking at his hands. When the first sail appeared behind the lighthouse, he folded the net, stood up "
        "slowly, and walked down the stone steps to the water, where his granddaughter was already waiting."
    ),
    "code": (
        "def moving_average(values, width):\n"
        '    """The mean of each window of `width` values."""\n'
        "    if width < 1:\n"
        '        raise ValueError(f"width is {width}, and it has to be at least 1")\n'
        "    total = sum(values[:width])\n"
        "    means = [total / width]\n"
        "    for old, new in zip(values, values[width:]):\n"
        "        total += new - old\n"
        "        means.append(total / width)\n"
        "    return means\n"
    ),
    "numbers": (
        "In 1998 the town had 4,213 inhabitants; by 2008 there were 5,087, and in 2018 it counted 6,140. That is a "
        "growth of 45.7 percent in twenty years. Die Stadt liegt am Fluss. La ville est au bord de la rivière. "
        "小镇在河边。 The river is 312 km long, 3 m deep in summer and 7 m deep in spring."
    ),
}
CHAT = [
    {"role": "user", "content": "Name the capital of France, and one river that flows through it."}
]
LONG = "long"
CHAT_PROBE = "chat"
LONG_TAIL = 96  # tokens behind the window
LONGEST = 4096 + LONG_TAIL  # tokens of the long text: a wider window is not tried


class VerifyProbe(NamedTuple):
    """Tokens to score from `first` on; then `answer` tokens are generated greedily and scored, too."""

    name: str
    text: str  # as a server is given it
    ids: list[int]  # as the tokenizer of the model reads it
    first: int = 1
    answer: int = ANSWER


def long_text(characters: int) -> str:
    """The texts again and again, in an order that does not repeat, up to about so many characters."""
    parts = list(TEXTS.values())
    text, turn = "", 0
    while len(text) < characters:
        text += parts[turn % len(parts)] + "\n\n"
        turn += 1 + (turn % 7 == 0)
    return text[:characters]

"""Prompts and answer lengths of a load test, made without a tokenizer and without a corpus.

    random          prompts of one length, answers of one length, nothing shared
    sharegpt-like   lengths as people chat: log-normal, on average 161 tokens in and 338 out (arXiv:2309.06180)
    agents          turns of 8 agents behind the same 6,144 tokens; a turn has all of its agent's turns before it
    long            documents of 8,000 to 120,000 tokens, log-uniform, 128 out
    trace           lengths of a trace; where it names blocks of tokens, equal names become equal tokens

A prompt is made of token ids, each 0 <= id < vocab, which /v1/completions takes as they are; or of short English words
where a server wants text (chat): about one token each, and the server's own count is what gets recorded. The same seed
makes the same prompts. Pure.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from cairn.bench.arrival_traces import BLOCK_TOKENS, TracedRequest

Form = Literal["tokens", "text"]

LARGEST_VOCAB = 10_000  # every model of interest has that many ids
INPUT_TOKENS = 128
OUTPUT_TOKENS = 64
LONGEST = 4096  # of a drawn conversation, either way

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
AGENTS, TURNS = 8, 6
HEAD_BLOCKS = 12  # of instructions and tools, the same for every agent
DOCUMENT = (8_000, 120_000)  # tokens

# exp(mu + sigma^2 / 2) is the mean of a log-normal distribution.
_INPUT = (math.log(161) - 1.2**2 / 2, 1.2)
_OUTPUT = (math.log(338) - 0.9**2 / 2, 0.9)

# Short, frequent, and one token with a space before them in every vocabulary of interest.
_WORDS = """
    the of and to in is that it was for on are as with his they at be this from have or by one had not but
    what all were when we there can an your which their said if do will each about how up out them then she
    many some so these would other into has more her two like him see time could no make than first been its
    who now people my made over did down only way find use may water long little very after words called just
    where most know get through back much go good new write our me man too any day same right look think also
    around another came come work three must because does part even place well such here take why help put
    different away again off went old number great tell men say small every found still between name should
    home big give air line set own under read last never us left end along while might next sound below saw
    something thought both few those always show large often together
""".split()  # noqa: SIM905  as a list it would be a page long


class LoadRequest(NamedTuple):
    """A request: its prompt and its maximum number of output tokens."""

    prompt: str | list[int]
    output_tokens: int
    fields: Mapping[str, Any] = NO_FIELDS  # more of the body


class PromptShape(NamedTuple):
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def random_shapes(input_tokens: int, output_tokens: int) -> Iterator[PromptShape]:
    while True:
        yield PromptShape(input_tokens, output_tokens)


def chat_shapes(
    generator: random.Random, most_in: int = LONGEST, most_out: int = LONGEST
) -> Iterator[PromptShape]:
    while True:
        read, written = (generator.lognormvariate(*curve) for curve in (_INPUT, _OUTPUT))
        yield PromptShape(_within(read, most_in), _within(written, most_out))


def agent_shapes(
    generator: random.Random, most_in: int | None = None, most_out: int | None = None
) -> Iterator[PromptShape]:
    """All agents take a turn, then all take the next; after TURNS of them others take their place."""
    head = tuple(range(HEAD_BLOCKS))
    for group in itertools.count():
        for turn, agent in itertools.product(range(1, TURNS + 1), range(AGENTS)):
            first = HEAD_BLOCKS + (group * AGENTS + agent) * TURNS
            blocks = (*head, *range(first, first + turn))
            written = _within(generator.randint(40, 160), most_out)
            yield PromptShape(_within(BLOCK_TOKENS * len(blocks), most_in), written, blocks)


def document_shapes(
    generator: random.Random, most_in: int | None = None, most_out: int | None = None
) -> Iterator[PromptShape]:
    low, high = map(math.log, DOCUMENT)
    while True:
        read = math.exp(generator.uniform(low, high))
        yield PromptShape(_within(read, most_in), _within(128, most_out))


def traced_shapes(
    trace: list[TracedRequest], most_in: int | None = None, most_out: int | None = None
) -> Iterator[PromptShape]:
    for request in trace:
        yield PromptShape(
            _within(request.input_tokens, most_in),
            _within(request.output_tokens, most_out),
            request.blocks,
        )


def asks(shapes: Iterator[PromptShape], form: Form, vocab: int, seed: str) -> Iterator[LoadRequest]:
    """A prompt for each shape; no two are alike but for the blocks that a trace shares."""
    generator = random.Random(f"prompts {seed}")
    make = _tokens(vocab) if form == "tokens" else _text
    for shape in shapes:
        if shape.blocks:
            pieces = [
                make(random.Random(f"block {seed} {name}"), BLOCK_TOKENS) for name in shape.blocks
            ]
        else:
            pieces = [make(generator, shape.input_tokens)]
        kept = list(itertools.chain.from_iterable(pieces))[: shape.input_tokens]
        yield LoadRequest(" ".join(kept) if form == "text" else kept, shape.output_tokens)


def _within(length: float, most: int | None) -> int:
    whole = max(1, round(length))
    return whole if most is None else min(whole, most)


def _tokens(vocab: int) -> Callable[[random.Random, int], list[Any]]:
    ids = range(vocab)
    return lambda generator, count: generator.choices(ids, k=count)


def _text(generator: random.Random, count: int) -> list[Any]:
    return generator.choices(_WORDS, k=count)

"""Answers of several turns: the model writes, a tool answers, the model goes on.

    prompt   "compute 7 * 8 + 5"
    model    "<calc>7 * 8 + 5</calc>"
    tool     "<result>61</result>"            read by the model, not learnt
    model    "61"                             the end: the task judges it

An environment has `reset` and `step`, over texts. `ToolEnvironment` has tools that compute: a calculator, and Python
in a sandbox. `run_episodes` plays many at a time.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from cairn.align.policy import Policy, Sampled
from cairn.align.sandbox import run_python
from cairn.align.tasks import RESULT, Problem, worked_out
from cairn.models.tokenizer import Tokenizer
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.train.data.counter_rng import mix

LONGEST_RESULT = 200  # characters
WORKERS = 4  # tools that run at a time


class Environment(Protocol):
    """The other side of an answer."""

    @property
    def stops(self) -> Sequence[str]:
        """Texts behind which it is the environment's turn."""
        ...

    def reset(self, problem: Problem) -> str:
        """Start an episode and return the prompt."""
        ...

    def step(self, answer: str) -> str | None:
        """Return the next input of the model, or None at the end of the episode."""
        ...


def calculate(expression: str) -> str:
    value = worked_out(expression.strip())
    return "error" if value is None else str(value)


class ToolEnvironment:
    """Tools by name, each from text to text."""

    def __init__(self, tools: dict[str, Callable[[str], str]]) -> None:
        self.tools = tools
        self.stops = [f"</{name}>" for name in tools]

    def reset(self, problem: Problem) -> str:
        return problem.prompt

    def step(self, answer: str) -> str | None:
        """The result of the call at the end of the answer."""
        names = "|".join(map(re.escape, self.tools))
        call = re.search(rf"(?s)<({names})>((?:(?!<(?:{names})>).)*)</\1>\s*$", answer)
        if call is None:
            return None
        result = self.tools[call.group(1)](call.group(2))
        return RESULT.format(result.strip()[:LONGEST_RESULT])


ENVIRONMENTS: dict[str, ToolEnvironment] = {
    "calculator": ToolEnvironment({"calc": calculate}),
    "python": ToolEnvironment({"python": run_python}),
}


class Limits(NamedTuple):
    tokens: int  # of an answer, with what tools say
    turns: int  # calls of tools


class _Episode:
    """An answer so far."""

    def __init__(self, prompt: list[int], seed: int) -> None:
        self.prompt, self.seed = prompt, seed
        self.sampled = Sampled([], [], 0, False, own=[])
        self.open = True

    def wrote(self, one: Sampled) -> None:
        self.sampled.tokens.extend(one.tokens)
        self.sampled.logp.extend(one.logp)
        self.sampled.own.extend([True] * len(one.tokens))
        self.sampled = self.sampled._replace(version=one.version, stopped=one.stopped)

    def reads(self, tokens: list[int], most: int) -> None:
        """Append the output of a tool, truncated if no room for an answer remains."""
        self.sampled.tokens.extend(tokens)
        self.sampled.logp.extend([0.0] * len(tokens))
        self.sampled.own.extend([False] * len(tokens))
        self.open = len(self.sampled.tokens) < most
        self.sampled = self.sampled._replace(stopped=False)


def run_episodes(
    policy: Policy,
    environment: Environment,
    prompts: Sequence[list[int]],
    limits: Limits,
    seeds: Sequence[int],
) -> list[Sampled]:
    """An answer to each prompt. Every turn is one continuous batch of those that go on; tools run side by side."""
    episodes = [_Episode(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    for turn in range(limits.turns + 1):
        ongoing = [one for one in episodes if one.open]
        if not ongoing:
            break
        stops = environment.stops if turn < limits.turns else ()
        requests = [
            (one.prompt + one.sampled.tokens, _params(one, limits, turn)) for one in ongoing
        ]
        samples = policy.generate(requests, [stops] * len(ongoing))
        for one, sampled in zip(ongoing, samples, strict=True):
            one.wrote(sampled)
        _answer(policy.tokenizer, environment, ongoing, limits if stops else None)
    return [_cut(one.sampled, limits.tokens) for one in episodes]


def _params(one: _Episode, limits: Limits, turn: int) -> SamplingParams:
    left = limits.tokens - len(one.sampled.tokens)
    seed = mix(one.seed, turn) >> 1
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=left, logprobs=0)


def _answer(
    tokenizer: Tokenizer, environment: Environment, ongoing: list[_Episode], limits: Limits | None
) -> None:
    """The environment's turn; None: it has no more."""
    for one in ongoing:
        one.open = False
    if limits is None:
        return
    with ThreadPoolExecutor(WORKERS) as pool:
        texts = [tokenizer.decode(one.sampled.tokens) for one in ongoing]
        for one, read in zip(ongoing, pool.map(environment.step, texts), strict=True):
            if read is not None:
                one.reads(tokenizer.encode(read, False), limits.tokens)


def _cut(sampled: Sampled, most: int) -> Sampled:
    if len(sampled.tokens) <= most:
        return sampled
    parts = dict(tokens=sampled.tokens[:most], logp=sampled.logp[:most], own=sampled.own[:most])
    return sampled._replace(stopped=False, **parts)

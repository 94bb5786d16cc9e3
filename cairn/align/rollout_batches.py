"""Training batches from rollouts that the run's engine has just sampled.

    warm-up      written answers of the task, to imitate
    then         roll out -> rewards -> `updates` steps learn from it -> the engine goes on with the new weights

Each round of rollouts is a line of rollouts.jsonl: rewards, lengths, mismatch, where the time went, some answers.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from cairn.align.config import Align
from cairn.align.consistent import scored
from cairn.align.objective import PolicyObjective
from cairn.align.policy import Policy
from cairn.align.rollout import (
    Trajectory,
    answers_to,
    batches_of,
    document,
    documents_of,
    judged,
    prompt_of,
    roll_out,
    shares_prompts,
    written,
)
from cairn.align.saved_documents import as_text, from_text
from cairn.align.tasks import make_problem
from cairn.align.value_head import VALUE, ValueHead, with_credit
from cairn.train.data.batch import Batch, Document
from cairn.train.data.counter_rng import Dice, mix
from cairn.train.state import TrainState

FILE = "rollouts.jsonl"
LOOK_EVERY = 10  # steps of the warm-up between two looks at what is sampled
LOOKED_AT = 64  # answers
SHOWN = 3  # answers of each round that are kept
MISTAKES, HELD_OUT_DRAWS = 11, 1 << 40  # streams of chance of their own


class Shown(msgspec.Struct, frozen=True):
    prompt: str
    answer: str
    reward: float


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A round of rollouts."""

    step: int
    reward: float  # mean over all answers
    groups: int
    informative: int  # groups whose answers are not all alike
    tokens: float  # of an answer, mean
    stopped: float  # share of answers that ended by themselves
    seconds: float  # of the rollouts
    tokens_per_s: float
    # Mean |trainer - engine| of the log-probabilities in the round before.
    mismatch: float | None = None
    largest: float | None = None
    held_out: float | None = None  # reward of answers to problems that are not trained on
    shown: list[Shown] = []


class RolloutBatches:
    """A `NextBatches` whose data the model makes itself. What it asks next follows from the samples seen so far."""

    may_be_empty = True

    def __init__(
        self,
        config: Align,
        policy: Policy,
        objective: PolicyObjective,
        log_line: Callable[[str], None],
        between_steps: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`between_steps`: called with the step that comes, while the engine is idle."""
        self.between_steps = between_steps
        self.config, self.policy, self.objective, self.log_line = (
            config,
            policy,
            objective,
            log_line,
        )
        self.file: Path = config.folder / FILE
        tokenizer = policy.tokenizer
        pad = tokenizer.pad_id
        self.pad_id = pad if pad is not None else (*tokenizer.eos_ids, 0)[0]
        self._left: list[list[Document]] = []  # of the present round, for the steps that come
        # The step at which rollouts began, and that of the last round.
        self._warm_at: int | None = None if config.warm_up else 0
        self._round_at: int | None = None

    @property
    def fingerprint(self) -> str:
        return f"rollouts of {self.config.task.kind}, seed {self.config.seed}"

    def close(self) -> None:
        pass

    def next_batches(self, state: TrainState) -> list[Batch]:
        config = self.config
        if self.objective.value is not None:
            # On a GPU the watch has not seen the last step yet; gradients that are not finite are left out anyway.
            vetoed = state.watch.in_a_row > 0
            self.objective.value.step(config.optim.max_norm, state.scale, vetoed)
        self.between_steps(state.step)
        self.objective.watch.on = False
        state.lr_scale = 1.0
        if not self._is_warm(state):
            state.lr_scale = config.warm_up_lr / config.optim.lr
            documents = self._written_answers(state.samples)
        else:
            fresh = not self._left
            if fresh:
                self._roll_out(state)
                self.objective.watch.on = True
            documents = self._left.pop(0) if self._left else []
            if config.rollout.consistent and documents:
                if not fresh:  # steps before have learnt from this round, too
                    self.policy.updated(state.step)
                documents = scored(self.policy, documents, fresh)
        if not documents:  # the loop takes no step then
            state.samples += config.data.sequences
            return []
        shared = shares_prompts(config, state.spec)
        batches = batches_of(documents, config.data.microbatch, self.pad_id, state.samples, shared)
        return [batch.to(state.device) for batch in batches]

    def state_dict(self) -> dict[str, Any]:
        value = self.objective.value
        return {
            "warm_at": self._warm_at,
            "round_at": self._round_at,
            "value": value.state_dict() if value else None,
            "left": [as_text(documents) for documents in self._left],
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        self._warm_at = states[0]["warm_at"]
        self._left = [from_text(documents) for documents in states[0].get("left", ())]
        self._round_at = states[0].get("round_at")
        if self.objective.value is not None and states[0].get("value"):
            self.objective.value.load_state_dict(states[0]["value"])

    def _is_warm(self, state: TrainState) -> bool:
        """Return whether sampled answers are good enough to learn from, or the warm-up has had its steps."""
        config, step = self.config, state.step
        if self._warm_at is None and (step % LOOK_EVERY == 0 or step >= config.warm_up):
            self.policy.updated(step)
            groups = roll_out(
                self.policy, config, state.samples, max(1, LOOKED_AT // config.rollout.group)
            )
            reward = sum(one.reward for group in groups for one in group) / sum(map(len, groups))
            if reward >= config.warm_up_until or step >= config.warm_up:
                self._warm_at = step
                self.log_line(
                    f"step {step}: warm-up ended, sampled answers have reward {reward:.3f}"
                )
        return self._warm_at is not None

    def _written_answers(self, first: int) -> list[Document]:
        tokenizer, config = self.policy.tokenizer, self.config
        documents = []
        for at in range(config.data.sequences):
            problem = make_problem(config.task, config.seed, first + at)
            wrong = (
                Dice(config.seed, first + at, MISTAKES).below(1000) < 1000 * config.warm_up_mistakes
            )
            answer, own = written(tokenizer, problem.mistake if wrong else problem.solution)
            unknown, weight = [float("nan")] * len(answer), 1.0 / sum(own)
            documents.append(
                document(prompt_of(tokenizer, problem), answer, unknown, 1.0, weight, own)
            )
        return documents

    def _roll_out(self, state: TrainState) -> None:
        config, updates = self.config, self.config.rollout.updates
        self.policy.updated(state.step)
        began = time.perf_counter()
        answers = config.data.sequences * updates
        groups = roll_out(self.policy, config, state.samples, answers // config.rollout.group)
        seconds = time.perf_counter() - began
        each = len(groups) // updates
        steps = [documents_of(groups[at : at + each], config) for at in range(0, len(groups), each)]
        if self.objective.value is not None:
            documents = [document for step in steps for document in step]
            documents = self._credited(state, documents, groups, self.objective.value)
            size = config.data.sequences
            steps = [documents[at : at + size] for at in range(0, len(documents), size)]
        self._left = sorted(steps, key=lambda step: not step)  # those without a gradient come last
        self._write(state.step, groups, seconds)

    def _credited(
        self,
        state: TrainState,
        documents: list[Document],
        groups: list[list[Trajectory]],
        head: ValueHead,
    ) -> list[Document]:
        """Add the values of PPO's value head to each token."""
        batches = batches_of(documents, self.config.data.microbatch, self.pad_id, 0)
        values_B = state.parallel.forward([batch.to(state.device) for batch in batches], head)
        values = [
            own_T
            for batch, of_batch in zip(batches, values_B, strict=True)
            for own_T in of_batch[VALUE].split(batch.lengths)[: len(batch.ids)]  # without padding
        ]
        rewards = [one.reward for group in groups for one in group]
        lam = self.config.algorithm.gae_lambda
        return with_credit(documents, rewards, values, lam)

    def _write(self, step: int, groups: list[list[Trajectory]], seconds: float) -> None:
        all_of_them = [one for group in groups for one in group]
        tokens = sum(one.sampled.written for one in all_of_them)
        mean, largest = self.objective.watch.read()
        held_out = self.held_out() if self._is_due(step) else None
        self._round_at = step
        summary = Round(
            step=step,
            reward=sum(one.reward for one in all_of_them) / len(all_of_them),
            groups=len(groups),
            informative=sum(len({one.reward for one in group}) > 1 for group in groups),
            tokens=tokens / len(all_of_them),
            stopped=sum(one.sampled.stopped for one in all_of_them) / len(all_of_them),
            seconds=seconds,
            tokens_per_s=tokens / max(seconds, 1e-9),
            mismatch=mean,
            largest=largest,
            held_out=held_out,
            shown=[Shown(one.problem.prompt, one.text, one.reward) for one in all_of_them[:SHOWN]],
        )
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(summary) + b"\n")
        self.log_line(in_words(summary))

    def _is_due(self, step: int) -> bool:
        """Return whether a multiple of `task.every` lies behind the round before: a round may have several steps."""
        every, began = self.config.task.every, self._warm_at or 0
        if step == began or not every:
            return step == began
        before = step - 1 if self._round_at is None else self._round_at
        return (step - began) // every > (before - began) // every

    def held_out(self) -> float:
        """Mean reward of the policy's answers to problems that are never trained on; always the same draws."""
        config, tokenizer = self.config, self.policy.tokenizer
        count = config.task.held_out
        problems = [make_problem(config.task, config.seed, n, held_out=True) for n in range(count)]
        prompts = [prompt_of(tokenizer, problem) for problem in problems]
        seeds = [mix(config.seed, HELD_OUT_DRAWS, at) >> 1 for at in range(count)]
        sampled = answers_to(self.policy, config, prompts, seeds)
        rewards = [
            judged(tokenizer, config, *one).reward
            for one in zip(problems, prompts, sampled, strict=True)
        ]
        return sum(rewards) / count


def in_words(summary: Round) -> str:
    parts = [
        f"step {summary.step}: reward {summary.reward:.3f}",
        f"{summary.informative} of {summary.groups} groups differ",
        f"{summary.tokens:.1f} tokens an answer",
    ]
    if summary.mismatch is not None:
        parts.append(f"mismatch {summary.mismatch:.1e} (largest {summary.largest:.1e})")
    if summary.held_out is not None:
        parts.append(f"held out {summary.held_out:.3f}")
    return ", ".join(parts)


def read_rounds(folder: Path) -> list[Round]:
    """Read the rounds of a run; a resumed run may contain steps twice, of which the last counts."""
    file = folder / FILE
    if not file.is_file():
        return []
    decoder, rounds = msgspec.json.Decoder(Round), dict[int, Round]()
    for line in file.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):  # cut off by the end of its writer
            one = decoder.decode(line)
            rounds[one.step] = one
    return [rounds[step] for step in sorted(rounds)]

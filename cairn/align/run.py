"""A run of reinforcement learning, from a recipe to a model with a report: the training loop over rollouts.

recipe -> model, tokenizer -> policy (trainer and engine on one copy) -> loop -> held-out reward -> export, page
"""

from collections.abc import Callable
from contextlib import closing, nullcontext

import msgspec
import torch

from cairn.align.chat_server import ChatServer
from cairn.align.config import Align
from cairn.align.consistent import check_covered
from cairn.align.objective import PolicyObjective
from cairn.align.policy import Policy
from cairn.align.remote import RemotePolicy
from cairn.align.report import render, write_page
from cairn.align.rollout_batches import RolloutBatches, read_rounds
from cairn.align.tasks import make_problem
from cairn.core.errors import ConfigError
from cairn.models.checkpoint import (
    Checkpoint,
    check_device,
    default_device,
    open_checkpoint,
)
from cairn.models.hub import resolve
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.models.transformer import Transformer
from cairn.serve.engine.cpu_threads import one_thread
from cairn.train.corpus import Corpus
from cairn.train.data.tokenizer_identity import id_limit
from cairn.train.data.tokenizer_trainer import MIN_VOCAB, train_tokenizer
from cairn.train.describe import shape_of
from cairn.train.heads import TargetLogProbs
from cairn.train.metrics_log import Record, check_sinks
from cairn.train.next_batches import NextBatches
from cairn.train.precision import dtype_of
from cairn.train.prepare import Prepared, assemble
from cairn.train.random_tokens import RandomTokens
from cairn.train.reference import ReferredBatches
from cairn.train.run import Finished, carry_out
from cairn.train.run_checks import TOKENIZER, check_balance, check_folder
from cairn.train.run_lock import check_free, exclusive_run

TEXTS = 2000  # of the task, for the tokenizer of a model that begins with random weights
VOCABULARY = 512
SMALL = 2_000_000  # parameters, up to which several threads wait longer than they compute


class Aligned(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run."""

    finished: Finished
    first: float | None  # held-out reward before and after
    last: float
    page: str


def align(
    config: Align,
    log_line: Callable[[str], None] = print,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Aligned:
    check_folder(config)
    check_free(config.folder)
    prepared = prepare(config)
    config.folder.mkdir(parents=True, exist_ok=True)
    state = prepared.state
    alone = state.device.type == "cpu" and state.spec.parameters() <= SMALL
    with (
        exclusive_run(config.folder),
        closing(_policy(config, prepared)) as policy,
        one_thread() if alone else nullcontext(),
    ):
        return _align(config, prepared, policy, log_line, on_record)


def _policy(config: Align, prepared: Prepared) -> Policy:
    state, tokenizer = prepared.state, prepared.corpus.tokenizer
    assert tokenizer is not None
    if config.rollout.engines:
        return RemotePolicy(state, tokenizer, config)
    answers = config.data.sequences * config.rollout.updates
    rows, consistent = min(answers, 256), config.rollout.consistent
    return Policy(state, tokenizer, rows, config.data.sequence, consistent)


def _align(
    config: Align,
    prepared: Prepared,
    policy: Policy,
    log_line: Callable[[str], None],
    on_record: Callable[[Record], None],
) -> Aligned:
    state = prepared.state
    objective = PolicyObjective(state.spec, config, prepared.fused, state.device)
    state.loss = objective
    talk = _talk(config, policy, log_line) if config.talk else None
    between = talk.answer if talk is not None else lambda step: None
    rollouts = RolloutBatches(config, policy, objective, log_line, between)
    source: NextBatches = rollouts
    if config.algorithm.kl:
        head = TargetLogProbs(state.spec, fused=prepared.fused)
        source = ReferredBatches(rollouts, head, _reference(config, str(state.device)))
    try:
        finished = carry_out(config, prepared, source, log_line=log_line, on_record=on_record)
    finally:
        if talk is not None:
            talk.close()
    policy.updated(state.step)
    last = rollouts.held_out()
    rounds = read_rounds(config.folder)
    page = write_page(config, rounds, last)
    first = next((one.held_out for one in rounds if one.held_out is not None), None)
    return Aligned(finished=finished, first=first, last=last, page=str(page))


def _talk(config: Align, policy: Policy, log_line: Callable[[str], None]) -> ChatServer:
    def page() -> str:
        rounds = read_rounds(config.folder)
        return render(config, rounds, rounds[-1].held_out if rounds else None)

    talk = ChatServer(policy, config.folder.name, config.data.sequence, page, config.talk)
    log_line(f"talk to it while it learns: {talk.address}/v1 (model {config.folder.name})")
    return talk


def prepare(config: Align) -> Prepared:
    """The model, on its device, and the tokenizer that its tasks are written with."""
    name = default_device() if config.device == "auto" else config.device
    check_device(name)
    check_sinks(config.log)
    start = None
    if config.model.checkpoint is not None:
        start = open_checkpoint(resolve(str(config.model.checkpoint)))
    tokenizer = _tokenizer(config, start)
    spec = _spec(config, start, tokenizer)
    check_balance(config, spec)
    if config.rollout.consistent:
        check_covered(spec, name, config.adapter.rank)
    # A token is drawn behind what is scored.
    longest = spec.context - config.rollout.consistent
    if config.data.sequence > longest:
        raise ConfigError(
            f"data.sequence {config.data.sequence} is longer than the model's context {spec.context}"
            + (" less the token behind what is scored" if config.rollout.consistent else ""),
            hint=f"use data.sequence {longest} at most",
        )
    unused = RandomTokens(spec.vocab, config.data.sequence, config.seed)
    corpus = Corpus(unused, tokenizer, id_limit(tokenizer))
    return assemble(config, torch.device(name), corpus, spec, start)


def _tokenizer(config: Align, start: Checkpoint | None) -> Tokenizer:
    """Tokenizer of the weights, or a small one that is trained on the task."""
    if start is not None:
        return start.tokenizer()
    kept = config.folder / TOKENIZER
    if kept.is_dir():
        return tokenizer_from_folder(kept)
    problems = (make_problem(config.task, config.seed, number) for number in range(TEXTS))
    texts = (f"user\n{one.prompt} assistant\n{one.solution}" for one in problems)
    return train_tokenizer(texts, max(VOCABULARY, MIN_VOCAB), fewer=True)


def _spec(config: Align, start: Checkpoint | None, tokenizer: Tokenizer) -> ModelSpec:
    if start is not None:
        return start.spec
    eos = tuple(sorted(tokenizer.eos_ids))
    vocab = id_limit(tokenizer)
    return msgspec.structs.replace(shape_of(config.model), vocab=vocab, eos_ids=eos, bos_id=None)


def _reference(config: Align, device: str) -> Transformer | None:
    """Reference model of the policy; None if it is the base of its adapter."""
    if config.adapter.rank:
        return None
    opened = open_checkpoint(resolve(str(config.model.checkpoint)))
    return opened.load(device, dtype_of(config.precision)).eval().requires_grad_(False)

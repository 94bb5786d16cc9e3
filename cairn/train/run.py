"""A whole run, from a recipe to a model that can be served: what each process of it does.

    prepare -> resume -> steps -> last checkpoint -> export -> report

Called once in each process; only rank 0 speaks, logs, exports and writes the report.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import msgspec

from cairn.comm.watchdog import watching
from cairn.core.config import to_toml
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import TOKENIZER_FILES
from cairn.models.hub import resolve
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.train.checkpoint.export import export_adapter, export_newest
from cairn.train.config import Train
from cairn.train.corpus import Corpus
from cairn.train.data.source import Source
from cairn.train.data.tokenizer_identity import tokenizer_hash
from cairn.train.distill import TaughtBatches, open_teacher
from cairn.train.loop import Loop, Outcome
from cairn.train.memory import predict
from cairn.train.metrics_log import Record
from cairn.train.next_batches import NextBatches, SourceBatches
from cairn.train.pair_objective import PairObjective
from cairn.train.precision import dtype_of
from cairn.train.prepare import Prepared, prepare
from cairn.train.qat import export_quantized, grid_of
from cairn.train.reference import ReferredBatches
from cairn.train.report import write_report
from cairn.train.run_checks import ADAPTER, MODEL, RECIPE, TOKENIZER
from cairn.train.run_lock import check_free, exclusive_run
from cairn.train.validation import Validation


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run."""

    outcome: Outcome
    folder: str
    model: str | None = None  # exported, if it was
    report: str | None = None


def run(
    config: Train,
    rank: int = 0,
    log_line: Callable[[str], None] = print,
    on_record: Callable[[Record], None] = lambda record: None,
    make_loop: Callable[..., Loop] = Loop,
) -> Finished:
    """`make_loop`: another loop around the same steps; a run with recovery has its own."""
    # With recovery the folder is held by the process that starts the ranks again (`local_driver`, `launched`).
    locked = rank == 0 and not config.recovery.on
    if locked:
        check_free(config.folder)
    prepared = prepare(config)
    if rank == 0:
        config.folder.mkdir(parents=True, exist_ok=True)
    with exclusive_run(config.folder) if locked else nullcontext():
        source = _source(prepared)
        return carry_out(config, prepared, source, rank, log_line, on_record, make_loop)


def carry_out(
    config: Train,
    prepared: Prepared,
    source: Source | NextBatches,
    rank: int = 0,
    log_line: Callable[[str], None] = print,
    on_record: Callable[[Record], None] = lambda record: None,
    make_loop: Callable[..., Loop] = Loop,
) -> Finished:
    """All steps of a run whose model is there, and what it leaves behind."""
    world, folder, state = config.parallel.world(), config.folder, prepared.state
    memory = predict(state.spec, state.config, prepared.fused, prepared.frozen)
    if rank == 0:
        is_later_life = config.recovery.on and (folder / RECIPE).exists()
        (folder / RECIPE).write_text(to_toml(config), encoding="utf-8")
        if not is_later_life:  # before the recipe is there the command would train another model
            again = config.resume_command
            log_line(f"folder {folder}; after an interruption go on with: {again}")
        keep_tokenizer(prepared.corpus, config, folder / TOKENIZER)
        for note in prepared.notes:
            log_line(note)
    with watching(rank, world, log_line):
        loop = make_loop(state, source, world, rank, log_line, on_record)
        loop.validation = make_validation(prepared)
        outcome = loop.run()
    if rank != 0:
        return Finished(outcome=outcome, folder=str(folder))
    model = None
    if config.adapter.rank:
        export_adapter(folder, folder / ADAPTER)
        log_line(f"{folder / ADAPTER}: the adapter, as PEFT reads it")
        if config.model.checkpoint is not None:
            log_line(
                f"beside its base: cairn serve {config.model.checkpoint} --adapters {folder / ADAPTER}"
            )
    if config.checkpoint.export and (config.adapter.merge or not config.adapter.rank):
        tokenizer = folder / TOKENIZER
        export_newest(folder, folder / MODEL, tokenizer if tokenizer.exists() else None)
        model = str(folder / MODEL)
        grid = grid_of(config, state.spec)
        if grid is not None:
            rounded = folder / f"{MODEL}-{config.qat.scheme}"
            shutil.rmtree(rounded, ignore_errors=True)
            export_quantized(folder / MODEL, rounded, grid)
            log_line(f"{rounded}: the model in {config.qat.scheme}, as it was trained")
    report = write_report(config, state.spec, memory, prepared.notes)
    return Finished(outcome=outcome, folder=str(folder), model=model, report=str(report))


def _source(prepared: Prepared) -> Source | NextBatches:
    """The data of the run, with what a teacher or a reference model says about it if there is one."""
    state, source = prepared.state, prepared.corpus.source
    config, parallel, loss = state.config, state.parallel, state.loss
    refers = isinstance(loss, PairObjective) and loss.rule.needs_reference
    if not config.distill.teacher and not refers:
        return source
    batches = SourceBatches(source, config, parallel.data_rank, parallel.data_ranks, state.device)
    if isinstance(loss, PairObjective):
        frozen = None
        if not config.adapter.rank:
            opened = open_checkpoint(resolve(str(config.model.checkpoint)))
            frozen = opened.load(str(state.device), dtype_of(config.precision))
            frozen.eval().requires_grad_(False)
        return ReferredBatches(batches, loss.head, frozen)
    settings = config.distill
    teacher = open_teacher(settings, state.spec, prepared.corpus.tokenizer, str(state.device))
    return TaughtBatches(batches, teacher, settings.teacher)


def _is_same(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return whether the folder contains this tokenizer with the same chat templates."""
    kept = tokenizer_from_folder(folder)
    same = tokenizer_hash(kept) == tokenizer_hash(tokenizer)
    return same and kept.templates.sources == tokenizer.templates.sources


def make_validation(prepared: Prepared) -> Validation | None:
    """Validation of a run; None if the recipe has no held-out data and no prompts."""
    if not prepared.state.config.validation.on:
        return None
    corpus = prepared.corpus
    return Validation(prepared.state, corpus.held_out, corpus.tokenizer, prepared.fused)


def keep_tokenizer(corpus: Corpus, config: Train, folder: Path) -> None:
    """The tokenizer beside the checkpoints: without it they could not be used."""
    if corpus.tokenizer is None:
        return
    if folder.is_dir():
        if _is_same(folder, corpus.tokenizer):
            return
        shutil.rmtree(folder)  # of a run that ended before its first checkpoint
    configured = config.data.tokenizer
    if configured is not None and configured.is_dir() and _is_same(configured, corpus.tokenizer):
        fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        for name in TOKENIZER_FILES:
            if (configured / name).is_file():
                shutil.copyfile(configured / name, fresh / name)
        fresh.rename(folder)
        return
    from cairn.train.data.tokenizer_trainer import save_tokenizer

    save_tokenizer(corpus.tokenizer, folder)

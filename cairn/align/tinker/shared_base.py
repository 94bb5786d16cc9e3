"""A base model shared by any number of training runs; each run has the values of a low-rank adapter.

    run A: adapter, optimizer, gradients  ┐
    run B: adapter, optimizer, gradients  ├── one of them lies in the model's adapter ──  trainer and engine read it
    saved weights of A after step 7       ┘

Work for another run copies its adapter in; a run alone never pays for that. The adapter in the model has the largest
rank that is served; a run of a smaller one has zeros in the other rows, which get no gradient. All adapters count the
same (32 / largest rank), so that a learning rate does not depend on the rank. Not for several threads.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from cairn.align.policy import Policy, Sampled
from cairn.align.tinker.losses import AT, TinkerRule
from cairn.align.tinker.pass_batches import documents_of, microbatches
from cairn.align.tinker.saved_runs import (
    About,
    Tensors,
    about_of,
    has_optimizer,
    load_optimizer,
    read_values,
    save_run,
)
from cairn.align.tinker.wire import AdamParams, LoraConfig, Pass, Passed
from cairn.core.errors import ConfigError, RequestError
from cairn.models.adapter.lora import LoRA
from cairn.models.checkpoint import check_device, default_device, open_checkpoint
from cairn.models.hub import resolve
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.train.config import Adapter, Checkpoint, Data, Model, Optim, Train
from cairn.train.corpus import Corpus
from cairn.train.data.batch import Batch
from cairn.train.data.tokenizer_identity import id_limit
from cairn.train.data.tokenizer_trainer import save_tokenizer
from cairn.train.heads import TargetLogProbs
from cairn.train.objective import Objective
from cairn.train.optim.adamw import AdamW
from cairn.train.prepare import assemble
from cairn.train.random_tokens import RandomTokens
from cairn.train.step import clip_factor
from cairn.train.trainable import adapter_of

ALPHA = 32.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the server."""

    model: str
    out: Path
    device: str = "auto"
    max_rank: int = 32
    max_model_len: int = 2048
    max_num_seqs: int = 32


class Weights(NamedTuple):
    """Values of the adapter that do not change any more."""

    tensors: Tensors
    version: int  # the same for the same values


class Run:
    """A model in training."""

    def __init__(self, lora: LoraConfig, tensors: Tensors, version: int) -> None:
        self.lora, self.version, self.steps = lora, version, 0
        self.tensors = tensors  # out of date while they lie in the model
        self.gradients: Tensors = {}
        self.optimizer: AdamW | None = None  # from its first step on


class SharedBase:
    """A base model with one adapter, whose values are those of the run that is worked for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        name = default_device() if settings.device == "auto" else settings.device
        check_device(name)
        start = open_checkpoint(resolve(settings.model))
        if start.vision is not None:
            raise ConfigError(
                f"{settings.model} sees pictures, and only text is trained here",
                hint="serve a text model",
            )
        self.spec, self.tokenizer = start.spec, start.tokenizer()
        self.length = min(settings.max_model_len, self.spec.context)
        config = self._recipe(name)
        corpus = Corpus(
            RandomTokens(self.spec.vocab, self.length, 0), self.tokenizer, id_limit(self.tokenizer)
        )
        prepared = assemble(config, torch.device(name), corpus, self.spec, start)
        self.state, self.fused = prepared.state, prepared.fused
        self.parallel, self.device = self.state.parallel, self.state.device
        self.adapter = adapter_of(config)
        self.policy = Policy(self.state, self.tokenizer, settings.max_num_seqs, self.length)
        self.parameters = self.parallel.parameters()
        self._versions = itertools.count(1)
        self.blank = Weights({n: torch.zeros_like(p) for n, p in self._now().items()}, 0)
        self._here: Run | Weights | None = None  # whose values lie in the model

    def _recipe(self, device: str) -> Train:
        return Train(
            steps=1,
            device=device,
            model=Model(checkpoint=Path(self.settings.model)),
            data=Data(sequence=self.length, sequences=1, microbatch=1),
            adapter=Adapter(rank=self.settings.max_rank, alpha=ALPHA),
            checkpoint=Checkpoint(every=0, export=False),
            out=self.settings.out,
        )

    # -- runs -----------------------------------------------------------------------------------

    def create(self, lora: LoraConfig) -> Run:
        if not 1 <= lora.rank <= self.settings.max_rank:
            raise RequestError(
                f"rank {lora.rank}, and this server has adapters up to rank {self.settings.max_rank}",
                hint="ask for a smaller one, or start the server with --max-rank",
            )
        return Run(lora, self._drawn(lora), next(self._versions))

    def _drawn(self, lora: LoraConfig) -> Tensors:
        """A new adapter: its first matrices as torch draws those of a linear map, its second ones 0."""
        chance = torch.Generator().manual_seed(lora.seed if lora.seed is not None else 0)
        if lora.seed is None:
            chance.seed()
        values = {name: torch.zeros_like(p) for name, p in self._now().items()}
        for name, module in self._adapters().items():
            a_RK = values[f"{name}.a_RK"]
            start, bound = 0, 1 / math.sqrt(a_RK.shape[1])
            for part in module.parts:
                rows = (min(lora.rank, part.rank), a_RK.shape[1])
                drawn = torch.empty(rows).uniform_(-bound, bound, generator=chance)
                a_RK[start : start + len(drawn)] = drawn.to(a_RK)
                start += part.rank
        return values

    def _adapters(self) -> dict[str, LoRA]:
        """Adapters by the path of their parameters."""
        modules = {}
        for name in self.parameters:
            if name.endswith(".a_RK"):
                path = name.removesuffix(".a_RK")
                module = self.policy.model.get_submodule(path)
                assert isinstance(module, LoRA)
                modules[path] = module
        return modules

    def frozen(self, run: Run, name: str) -> bool:
        """Return whether a run was asked to leave this part alone."""
        if ".attention." in name:
            return not run.lora.train_attn
        return not run.lora.train_mlp if name.startswith("layers.") else not run.lora.train_unembed

    def weights_of(self, run: Run) -> Weights:
        """Copy of the current weights."""
        tensors = self._now() if self._here is run else run.tensors
        return Weights({name: one.clone() for name, one in tensors.items()}, run.version)

    # -- training -------------------------------------------------------------------------------

    def run_pass(self, run: Run, request: Pass) -> Passed:
        """Gradients are added to those of the run's passes since its last step, unless it is forward only."""
        documents = documents_of(request, self.length, self.spec.vocab)
        lengths = [len(one.tokens_T) for one in documents]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rule = TinkerRule(request.loss, request.settings, int(starts[-1]))
        pad_id = self.tokenizer.pad_id or 0
        batches = [one.to(self.device) for one in microbatches(documents, starts, pad_id)]
        self._put(run)
        objective = Objective(self.spec, rule, self.fused)
        if request.forward_only:
            loss = self._forward(batches, rule)
        else:
            loss = self._backward(run, batches, objective)
        logp_T = rule.logp_T.numpy()
        parts = [logp_T[starts[at] : starts[at + 1]] for at in range(len(documents))]
        return Passed(parts, {"loss:sum": loss})

    def _backward(self, run: Run, batches: list[Batch], objective: Objective) -> float:
        one = torch.ones((), device=self.device)
        try:
            loss = float(self.parallel.forward_backward(batches, objective, one))
            for name, gradient in self.parallel.gradients().items():
                before = run.gradients.get(name)
                now = gradient.detach().float()
                run.gradients[name] = now.clone() if before is None else before + now
        finally:
            self.parallel.zero_grad()  # also of a pass that failed: the next one may be another run's
        return loss

    def _forward(self, batches: list[Batch], rule: TinkerRule) -> float:
        head, total = TargetLogProbs(self.spec, fused=self.fused), 0.0
        for batch, values in zip(batches, self.parallel.forward(batches, head), strict=True):
            counts_T = batch.extra[AT] >= 0
            loss_T, _ = rule(values["logp"], batch.extra)
            total += float(loss_T.where(counts_T, 0.0).sum())
        return total

    def step(self, run: Run, params: AdamParams) -> dict[str, float]:
        """Apply the accumulated gradients."""
        self._put(run)
        gradients = {name: one for name, one in run.gradients.items() if not self.frozen(run, name)}
        settings = Optim(
            lr=params.learning_rate
            or 1e-30,  # a recipe wants one above 0; the update takes its own
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_norm=max(params.grad_clip_norm, 0.0),
        )
        if run.optimizer is None:
            run.optimizer = AdamW(self.parameters, settings, masters=True)
        run.optimizer.settings = settings
        norm = torch.stack([one.square().sum() for one in gradients.values()] or [torch.zeros(())])
        norm = norm.sum().sqrt().to(self.device)
        factor = clip_factor(norm, settings.max_norm)
        cast = {n: one.to(self.parameters[n].dtype) for n, one in gradients.items()}
        run.optimizer.update(cast, run.steps + 1, params.learning_rate, factor)
        run.gradients = {}
        if not bool(norm.isfinite()):
            raise RequestError(
                f"the gradients have norm {float(norm)}: the step changed nothing",
                hint="look at the weights, advantages and log-probabilities of the data",
            )
        run.steps += 1
        run.version = next(self._versions)
        self.policy.engine.weights_changed(run.version)
        return {"grad_norm:mean": float(norm)}

    # -- sampling -------------------------------------------------------------------------------

    def sample(
        self, weights: Weights, prompts: Sequence[tuple[list[int], SamplingParams]], stop: list
    ) -> list[Sampled]:
        self._put(weights)
        return self.policy.generate(prompts, stop)

    # -- files ---------------------------------------------------------------------------

    def tokenizer_folder(self) -> Path:
        """Folder with the tokenizer in transformers' format, for local clients."""
        folder = self.settings.out / "tokenizer"
        if not folder.is_dir():
            save_tokenizer(self.tokenizer, folder)
        return folder.resolve()

    def save(self, run: Run, folder: Path, with_optimizer: bool) -> None:
        """A PEFT adapter of the largest rank, and beside it what a run needs to go on."""
        self._put(run)
        assert self.adapter is not None
        about = About(self.settings.model, run.lora, run.steps)
        optimizer = run.optimizer if with_optimizer else None
        save_run(self.policy.model, self.adapter, about, optimizer, folder)

    def read(self, folder: Path) -> tuple[About, Weights]:
        """Saved weights; also those that another program has saved, if they fit."""
        tensors = read_values(self.policy.model, self._now(), folder)
        return about_of(folder), Weights(tensors, next(self._versions))

    def load(self, run: Run, folder: Path, with_optimizer: bool) -> None:
        about, weights = self.read(folder)
        if about.lora.rank > run.lora.rank:
            raise RequestError(f"{folder} has rank {about.lora.rank}, the model {run.lora.rank}")
        run.tensors, run.version, run.gradients = weights.tensors, weights.version, {}
        run.optimizer, run.steps = None, 0
        if self._here is run:  # what lies in the model is out of date
            self._here = None
        if with_optimizer and has_optimizer(folder):
            self._put(run)
            run.optimizer, run.steps = AdamW(self.parameters, Optim(), masters=True), about.steps
            load_optimizer(run.optimizer, folder)

    # -- what lies in the model -----------------------------------------------------------------

    def _now(self) -> Tensors:
        return {name: one.detach() for name, one in self.parameters.items()}

    @torch.no_grad()
    def _put(self, wanted: Run | Weights) -> None:
        """The trainer and the engine read these values from now on."""
        if self._here is wanted or (
            isinstance(wanted, Weights)
            and self._here is not None
            and self._here.version == wanted.version
        ):
            return
        if isinstance(self._here, Run):
            self._here.tensors = {name: one.clone() for name, one in self._now().items()}
        for name, parameter in self.parameters.items():
            parameter.copy_(wanted.tensors[name])
        self._here = wanted
        self.policy.engine.weights_changed(wanted.version)

"""New weights for a model that serves: all of them are read and checked first, then they replace the old ones.

    source --stage--> a second model in the host's memory --all ranks have theirs?--> the model's own tensors

What fails, fails before the first tensor changes, so the old weights go on serving. On a GPU the numbers are copied
where the old ones lie, because CUDA graphs keep addresses. On a CPU the model takes the new tensors as they are, which
may be views of a mapped file. Copies in another layout follow: by columns they are made again, and packed in few bits
they are refused, since what they were packed from is gone.
"""

import uuid

import msgspec
import torch

from cairn.comm.transfer.choose_transport import make_transport
from cairn.comm.transfer.weight_sync import WeightSink
from cairn.core.errors import CairnError, ConfigError
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import Checkpoint, open_checkpoint
from cairn.models.experts import ExpertLayer
from cairn.models.hub import resolve
from cairn.models.linear.maps import linears
from cairn.models.linear.transposed import TransposedForm
from cairn.models.rope_scaling import stretched
from cairn.models.transformer import Transformer
from cairn.models.weight_shards import held_by_rows, read_shares, wanted_by
from cairn.models.weights import fill_shares, load_model
from cairn.serve.engine.ranks import all_or_none
from cairn.serve.engine.weight_sources import SyncedWeights, WeightsFrom


@torch.no_grad()
def replace_weights(model: Transformer, version: int, source: WeightsFrom) -> None:
    """A CairnError: nothing has changed. With several ranks all of them call it, and all fail if one does."""
    problem: CairnError | None = None
    staged: Transformer | None = None
    try:
        _check_forms(model)
        staged = _stage(model, version, source)
    except CairnError as error:
        problem = error
    all_or_none(model.build.shards, problem, f"another rank could not load weights {version}")
    assert staged is not None
    fresh = dict(staged.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.is_cuda:
            parameter.copy_(fresh[name])
        else:
            parameter.data = fresh[name].data
    for part in linears(model):
        if isinstance(part.form, TransposedForm):
            part.take(TransposedForm(part.joined()))


def check_source(model: Transformer, source: WeightsFrom | None) -> None:
    """A CairnError: weights that are dropped could not be read again."""
    _check_forms(model)
    if not isinstance(source, str):
        why = "were made up" if source is None else "came from the ranks of a trainer"
        raise ConfigError(
            f"the weights {why}, and cannot be read again", hint="use level 1, which keeps them"
        )
    _open_same(model, source)


@torch.no_grad()
def drop_weights(model: Transformer) -> None:
    """Give the memory of the weights back; `replace_weights` reads them again. First see `check_source`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)
    for part in linears(model):
        if isinstance(part.form, TransposedForm):
            part.form.weight_NK = part.form.weight_NK.new_empty(0)


def _check_forms(model: Transformer) -> None:
    """Refuse forms of weights that cannot follow."""
    forms = {type(part.form).__name__ for part in linears(model)} - {"NoneType", "TransposedForm"}
    experts = [part for part in model.modules() if isinstance(part, ExpertLayer)]
    forms |= {type(one).__name__ for part in experts for one in part.forms or ()}
    if forms:
        raise ConfigError(
            f"the weights of this engine were packed when it started ({', '.join(sorted(forms))}), and cannot be "
            "replaced while it runs",
            hint="start it with weights='float' (--weights float), which also dequantises a quantised checkpoint",
        )


def _stage(model: Transformer, version: int, source: WeightsFrom) -> Transformer:
    """The new weights in the host's memory, in the layout that the model has."""
    build = model.build._replace(device="cpu", dtype=model.embedding.weight.dtype)
    if isinstance(source, SyncedWeights):
        return _pull(model, version, source, build)
    return load_model(model.spec, _open_same(model, source).tensors, build)


def _open_same(model: Transformer, source: str) -> Checkpoint:
    """The checkpoint, if it is of the model that is served, whose context may have been stretched."""
    checkpoint = open_checkpoint(resolve(source))
    spec, context = checkpoint.spec, model.spec.context
    different = _differences(model, spec if spec.context == context else stretched(spec, context))
    if different:
        raise ConfigError(
            f"{source} is another model than the one that is served: {different}",
            hint="only weights of the same shape can be loaded in place; start another engine for this one",
        )
    return checkpoint


def _differences(model: Transformer, spec: msgspec.Struct) -> str:
    """Describe the fields in which two specs differ, ignoring the EOS ids."""
    ours, theirs = msgspec.structs.asdict(model.spec), msgspec.structs.asdict(spec)
    fields = [name for name in ours if name != "eos_ids" and ours[name] != theirs[name]]
    return ", ".join(f"{name} {theirs[name]} and not {ours[name]}" for name in fields[:3])


def _pull(
    model: Transformer, version: int, source: SyncedWeights, build: ModelBuild
) -> Transformer:
    """Pull weights from the ranks of a trainer when all of them have published this version."""
    dtype, ranks = model.embedding.weight.dtype, len(source.addresses)
    offered = [held_by_rows(model.spec, dtype, rank, ranks) for rank in range(ranks)]
    needed = wanted_by(model)
    end = make_transport(source.transport, f"weights-{uuid.uuid4().hex[:12]}")
    try:
        sink = WeightSink(end, needed, offered, source.addresses, source.timeout_s)
        sink.pull(version, source.timeout_s)
        staged = Transformer(model.spec, build._replace(device="meta"))
        shares = {
            name: share.clone() for name, share in read_shares(sink.memory, needed, dtype).items()
        }
        fill_shares(staged, shares, "cpu")
    finally:
        end.close()
    return staged

"""A text encoder that takes requests: the `Serving` of a model that embeds and scores, and generates nothing."""

from collections.abc import Sequence

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.models.encoder.open import OpenEncoder
from cairn.models.encoder.pooling_rules import read_pooling_rules
from cairn.models.linear.maps import held_bytes
from cairn.serve.config import EngineConfig
from cairn.serve.encoder_thread import EncoderThread
from cairn.serve.engine.facts import device_name, gpu_uuids
from cairn.serve.engine.messages import Facts
from cairn.serve.engine.request import Limits
from cairn.serve.serving import Serving

# Tokens of a batch of texts: on a CPU what stays in its caches, on a GPU what fills it.
STEP_TOKENS = {"cpu": 2048, "cuda": 32768}
ROWS = 256  # requests of a batch, unless told


def open_encoder_serving(
    opened: OpenEncoder, config: EngineConfig, names: Sequence[str] = ()
) -> Serving:
    """A text encoder in a thread of this process: it has no cache, and one pass over a text is all."""
    context = _encoder_context(opened, config)
    model, why = opened.load_encoder(config.device, config.dtype, config.plain)
    weight = next(model.parameters())
    budget = config.max_num_batched_tokens or STEP_TOKENS[weight.device.type]
    rows = config.max_num_seqs or ROWS
    limits = Limits(
        rows=rows,
        step_tokens=budget,
        context=context,
        pages=2,
        page_size=context,
        vocabulary=opened.spec.vocab,
        answers="vectors",
    )
    facts = Facts(
        device=str(weight.device),
        device_name=device_name(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        weights_bytes=held_bytes(model),
        uuids=gpu_uuids(weight.device, 1),
    )
    engine = EncoderThread(model, weight.device, budget, rows, config.plain, context)
    serving = Serving(opened, limits, engine, (), facts, names)
    serving.notes = encoder_notes(serving, why)
    return serving


def _encoder_context(opened: OpenEncoder, config: EngineConfig) -> int:
    """The longest text: what was asked for, what the files beside the model say, what it has positions for."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and a text encoder runs on one device",
            hint="start several servers behind a router",
        )
    positions, context = opened.spec.context, config.max_model_len
    if isinstance(context, int):
        if context > positions:
            raise ConfigError(
                f"max_model_len is {context}, and {opened.name} has {positions} positions"
            )
        return context
    stated = read_pooling_rules(opened.folder).context
    return min(stated or positions, positions)


def encoder_notes(serving: Serving, why: str) -> list[str]:
    """Startup log lines of an encoder: the choices and their reasons."""
    facts, rules, limits = serving.facts, serving.vectors.rules, serving.limits
    size = format_bytes(facts.weights_bytes, "decimal")
    family = serving.opened.spec.family
    pooling = f"{rules.pooling} pooling" + (", length one" if rules.normalize else "")
    source = "as its files say" if rules.described else "the default"
    notes = [
        f"{serving.name}: {family} text encoder, {size} in {facts.dtype} on {facts.device} ({why})",
        f"embeddings of {serving.vectors.width} numbers, {pooling} ({source}); texts of up to {limits.context} "
        f"tokens, {limits.step_tokens} tokens in a batch",
    ]
    if (classifier := serving.vectors.classifier) is not None:
        notes.append(
            f"a head with {len(classifier.labels)} labels: /classify, and pairs if it is one"
        )
    return notes

"""Pairs of values of a recipe that cannot work together: refused before anything is loaded. Pure."""

from typing import TYPE_CHECKING

from cairn.core.errors import ConfigError

if TYPE_CHECKING:
    from cairn.train.config import Train

LARGEST = 1e9  # of any setting: an infinite one would only be found out by the first loss


def check_settings(config: "Train") -> None:
    """A ConfigError with the values and what to do; the rest of what can be wrong needs the model and its data."""
    _check_data(config)
    _check_prompts(config)
    _check_adapter(config)
    _check_objective(config)
    _check_offload(config)
    _check_precision(config)


def _check_data(config: "Train") -> None:
    """Whole microbatches on every rank, and a weight for every source."""
    data, layout = config.data, config.parallel
    per_round = layout.data_ranks() * data.microbatch
    if per_round < 1 or data.sequences % per_round:
        raise ConfigError(
            f"data.sequences {data.sequences} % (dp {layout.dp} * fsdp {layout.fsdp} * data.microbatch "
            f"{data.microbatch}) = {data.sequences % max(per_round, 1)}",
            hint=_whole_rounds(data.sequences, layout.data_ranks(), per_round),
        )
    if data.weights and len(data.weights) != len(data.sources):
        raise ConfigError(
            f"{len(data.weights)} data.weights for {len(data.sources)} data.sources",
            hint="give one weight per source, or none",
        )
    if not all(0 < weight <= LARGEST for weight in data.weights):
        raise ConfigError(
            f"data.weights are numbers above 0, got {data.weights}",
            hint="leave out a source instead of giving it weight 0",
        )
    if not data.sources:
        raise ConfigError("data.sources is empty", hint='name one, such as "stories"')
    for key, names in (("data", data.sources), ("validation", config.validation.sources)):
        if "" in names:
            raise ConfigError(
                f"{key}.sources has an empty name: {names}",
                hint="name files or folders; stories, arithmetic and chats are made up",
            )


def _whole_rounds(sequences: int, ranks: int, per_round: int) -> str:
    """Hint for settings with which all ranks compute equally many whole microbatches."""
    if ranks < 1 or sequences % ranks:
        return f"make data.sequences a multiple of {max(per_round, 1)}, or dp * fsdp a divisor of {sequences}"
    share = sequences // ranks  # of one rank
    fits = max(
        size for size in range(1, share + 1) if share % size == 0 and size * ranks <= per_round
    )
    return f"use data.microbatch {fits}, or make data.sequences a multiple of {per_round}"


def _check_adapter(config: "Train") -> None:
    """An adapter is the only thing that its run trains."""
    if config.adapter.rank and config.model.frozen:
        raise ConfigError(
            "model.frozen with an adapter: all weights of the model are frozen then",
            hint="leave model.frozen out, and choose maps with adapter.targets",
        )
    if config.adapter.rank and config.qat.scheme != "none":
        raise ConfigError(
            f"qat.scheme {config.qat.scheme} with an adapter", hint="leave one of them out"
        )
    cut = config.parallel.tp * config.parallel.fsdp
    if config.adapter.rank and config.adapter.base == "nf4" and (config.adapter.dora or cut > 1):
        raise ConfigError(
            "adapter.base nf4 with dora, tp or fsdp: rows of 4-bit weights are neither measured nor cut",
            hint="leave them out, or use adapter.base float",
        )
    if config.adapter.rank and not config.adapter.targets:
        raise ConfigError("adapter.targets is empty", hint='use ["all-linear"]')


def _check_offload(config: "Train") -> None:
    """Activations that wait on the host are those of one microbatch, and of layers that keep some."""
    precision, pp = config.precision, config.parallel.pp
    if not precision.offload_activations and precision.offload_layers:
        raise ConfigError(
            f"precision.offload_layers {precision.offload_layers} without offload_activations",
            hint="set precision.offload_activations to true",
        )
    if precision.offload_activations and precision.recompute == "full":
        raise ConfigError(
            "precision.offload_activations with recompute full: no layer keeps anything to move",
            hint="use recompute selective or auto, or leave offload_activations out",
        )
    if precision.offload_activations and pp > 1:
        raise ConfigError(
            f"precision.offload_activations with pp {pp}: a stage has several microbatches at a time",
            hint="use recompute in place of it, or fsdp in place of pp",
        )


def _check_objective(config: "Train") -> None:
    """Preferences are whole sequences, and come from files."""
    kind = config.objective.kind
    if kind == "sft":
        return
    if config.parallel.cp > 1:
        raise ConfigError(
            f"objective {kind} with cp {config.parallel.cp}: it needs the sum over a whole answer",
            hint="leave cp out",
        )
    if config.distill.teacher or config.qat.scheme != "none":
        raise ConfigError(
            f"objective {kind} with distillation or qat", hint="leave one of them out"
        )
    if config.validation.share or config.validation.sources:
        raise ConfigError(
            f"objective {kind} with held-out data",
            hint="leave it out: --validation.share 0, and no validation.sources",
        )
    needs = kind in ("dpo", "ipo", "kto")
    if needs and not config.adapter.rank and config.model.checkpoint is None:
        raise ConfigError(
            f"objective {kind} needs a reference model", hint="begin with a model.checkpoint"
        )


def _check_prompts(config: "Train") -> None:
    """Sample texts are continued within one sample."""
    validation, sequence = config.validation, config.data.sequence
    if "" in validation.prompts:
        raise ConfigError(
            "validation.prompts has an empty text, which has no token to go on from",
            hint="give it a beginning, or leave it out",
        )
    if validation.prompts and validation.tokens >= sequence:
        raise ConfigError(
            f"validation.tokens {validation.tokens} with data.sequence {sequence} leaves no room for a prompt",
            hint=f"use validation.tokens {max(1, sequence // 2)} or fewer",
        )
    if validation.prompts and "random" in config.data.sources:
        raise ConfigError(
            "validation.prompts are text, and the source random has no tokenizer",
            hint="leave validation.prompts out",
        )


def _check_precision(config: "Train") -> None:
    """Check that the optimizer states fit the precision of the weights."""
    precision, optim = config.precision, config.optim
    if precision.kind == "float16" and not precision.masters:
        raise ConfigError(
            "float16 weights without float32 masters lose small updates",
            hint="set precision.masters to true, or precision.kind to bfloat16",
        )
    if optim.states == "bfloat16" and precision.kind == "float32":
        raise ConfigError(
            "optim.states bfloat16 with float32 weights saves little and rounds much",
            hint="set precision.kind to bfloat16 and precision.masters to false",
        )
    if optim.states == "bfloat16" and precision.masters:
        raise ConfigError(
            "optim.states bfloat16 goes with weights that are rounded at random, without masters",
            hint="set precision.masters to false",
        )
    if optim.states == "float32" and precision.kind == "bfloat16" and not precision.masters:
        raise ConfigError(
            "bfloat16 weights without masters need optim.states bfloat16 or int8, which round at random",
            hint="set optim.states to bfloat16, or precision.masters to true",
        )

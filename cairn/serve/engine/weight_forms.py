"""Weight formats: validation of the requested one, conversion at load, packing for CPUs."""

from typing import cast

from cairn.core.errors import ConfigError
from cairn.models.linear.convert import convert_head, convert_weights
from cairn.models.linear.registry import CONVERTED, PACKED
from cairn.models.runnable import Runnable
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine.cpu_layout import transpose_weights
from cairn.serve.engine.cpu_weights import Choice, pack_weights, packed


def check_form(config: EngineConfig, on_gpu: bool) -> None:
    """A form of the weights that was asked for, and does not go with the rest."""
    if config.weights in PACKED and on_gpu:
        raise ConfigError(
            f"weights is {config.weights}, which is for a CPU",
            hint=f"use --weights {' or '.join(CONVERTED)}, or leave it out",
        )
    invariant_too = (
        on_gpu and config.weights in CONVERTED
    )  # which have one tile for any number of rows
    exact = config.plain or (config.batch_invariant and not invariant_too)
    if config.weights in (*PACKED, *CONVERTED) and exact:
        mode = "plain" if config.plain else "batch_invariant"
        raise ConfigError(
            f"weights is {config.weights}, and {mode} computes with the weights as they are",
            hint=f"leave out --weights, or --{mode.replace('_', '-')}",
        )


def convert(model: Transformer, config: EngineConfig, sole: bool) -> list[str]:
    """Into the forms that were asked for; what was done."""
    converted = []
    if config.weights in CONVERTED:
        converted.append(convert_weights(model, config.weights, release=sole))
    if config.head == "8bit":
        converted.append(convert_head(model, release=sole))
    return converted


def arrange_weights(runnable: Runnable, config: EngineConfig, sole: bool) -> list[str]:
    """Arrange weights on a CPU: packed, transposed or unchanged; returns log lines with the reasons."""
    exact = config.plain or config.batch_invariant
    choice = cast(Choice, "float" if exact else config.weights)
    bits, head_bits = runnable.bits, runnable.head_bits
    notes = [pack_weights(runnable.model, choice, bits, head_bits, release=sole)]
    if not exact and not packed(runnable.model):
        notes.append(transpose_weights(runnable.model))
    return notes

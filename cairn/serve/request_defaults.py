"""Default sampling parameters of requests: the model's, or the API's (generation_config=vllm)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cairn.core.errors import ConfigError, RequestError
from cairn.models.sampling_defaults import Defaults
from cairn.serve.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cairn.models.runnable import OpenModel


def checked_defaults(opened: "OpenModel", generation_config: str = "auto") -> Defaults:
    """Validated defaults of a model; none with generation_config `vllm`."""
    if generation_config == "vllm":
        return {}
    try:
        SamplingParams(**opened.sampling)
    except RequestError as error:
        file = "general.sampling" if is_gguf(opened) else "generation_config.json"
        raise ConfigError(
            f"{file} of {opened.name}: {error.message}",
            hint=error.hint or "use --generation-config vllm, which does not read it",
        ) from None
    return opened.sampling


def said(opened: "OpenModel", defaults: Defaults) -> str:
    """The defaults in a line of the log, with where they come from."""
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    source = (
        " (the file's general.sampling over llama.cpp's defaults; --generation-config vllm: the API's own)"
        if is_gguf(opened)
        else ""
    )
    return f"requests that do not say how they are sampled: {values}{source}"


def is_gguf(opened: "OpenModel") -> bool:
    checkpoint = getattr(opened, "checkpoint", None)  # a text encoder has none
    return checkpoint is not None and checkpoint.metadata is not None


def with_defaults(defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a request's fields over the defaults. Several answers at temperature 0 would be equal, so a
    request gets that only if it asks for it."""
    merged = {**defaults}
    if fields.get("n", 1) > 1 and not merged.get("temperature", 1):
        del merged["temperature"]
    return merged | dict(fields)

"""Cairn: the AI-infrastructure stack in one codebase. This file holds the version and imports nothing.

`from cairn import LLM, SamplingParams` loads the engine then, and not before.
"""

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "LLM": "cairn.serve.llm",
    "SamplingParams": "cairn.serve.engine.sampling_params",
    "StructuredOutputs": "cairn.serve.structured_output",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)

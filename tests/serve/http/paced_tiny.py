"""A server over an engine that only keeps time, with the tokenizer of the tiny model, for tests that load it."""

from typing import Any

from cairn.bench.paced_server import PacedServer
from cairn.models.runnable import open_model
from cairn.serve.engine.request import Limits

PAGE = 16


def paced(folder: Any, rows: int, step_s: float = 0.0, context: int = 512, **settings: Any) -> Any:
    opened = open_model(str(folder))
    limits = Limits(
        rows=rows,
        step_tokens=1024,
        context=context,
        pages=1 + rows * (context // PAGE + 1),
        page_size=PAGE,
        vocabulary=opened.spec.vocab,
    )
    return PacedServer(opened, limits, lambda step: step_s, **settings)

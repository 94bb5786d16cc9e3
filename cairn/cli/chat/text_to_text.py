"""`cairn generate` with a T5: the prompt is read by the encoder, the answer is written by the decoder, greedily."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.core.errors import UsageError

if TYPE_CHECKING:
    from cairn.cli.chat.generate import Generate

MOST_TOKENS = 256


def check_text_to_text(options: "Generate") -> None:
    """Refuse what only decoders do."""
    sampled = options.temperature != 0 or options.top_p != 1 or options.top_k != 0
    asked = {
        "--chat": options.chat,
        "--image": bool(options.image),
        "--temperature, --top-p or --top-k": sampled,
        "--context": options.context is not None,
        "--speculate": options.speculate != "off",
        "--weights": options.weights not in ("auto", "float"),
    }
    for name, given in asked.items():
        if given:
            raise UsageError(
                f"{name} is given, and {options.model} is an encoder with a decoder",
                hint="leave it out: T5 takes a text, and answers with the likeliest tokens",
            )


def complete(options: "Generate", folder: Path) -> int:
    """Read the prompt, write the answer."""
    from cairn.cli.chat.generate import Ran, Shown, prompt_text, report
    from cairn.models.checkpoint import check_device, default_device
    from cairn.models.runnable import DTYPES
    from cairn.models.text_to_text.load import load_t5
    from cairn.models.text_to_text.model import answer
    from cairn.models.tokenizer_folder import tokenizer_from_folder

    check_text_to_text(options)
    tokenizer = tokenizer_from_folder(folder)
    prompt = options.token_ids or tokenizer.encode(prompt_text(options))
    device = default_device() if options.device == "auto" else options.device
    check_device(device)
    dtype = "float32" if options.dtype == "auto" else options.dtype
    began = time.perf_counter()
    model = load_t5(folder, device, DTYPES[dtype])
    load_s = time.perf_counter() - began
    show, most = Shown(tokenizer, prompt, options.json), options.max_tokens or MOST_TOKENS
    show.begin()
    for token in answer(model, prompt, most):
        show.push(token)
    show.end()
    finish = "length" if len(show.tokens) == most else "stop"
    report(options, show, Ran(finish, device, dtype, load_s, 0.0))
    return 0

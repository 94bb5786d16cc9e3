"""A chat template for a model that has none: a base model that is taught to answer.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n            ChatML

The two marks are special tokens: those of the vocabulary, or new ones where the embedding has rows to spare. A model
with neither gets the same template with <|im_start|> as plain text, and its own end-of-text token ends a message.
"""

import tokenizers

from cairn.core.errors import TokenizerError
from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.train.data.tokenizer_identity import id_limit
from cairn.train.data.tokenizer_trainer import CHAT_TEMPLATE, IM_END, IM_START


def with_chat_template(tokenizer: Tokenizer, rows: int | None) -> Tokenizer:
    """The tokenizer itself if it has a template. `rows`: of the model's embedding; None: as many as are needed."""
    if tokenizer.templates:
        return tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = tokenizer.backend.encode_special_tokens
    missing = [mark for mark in (IM_START, IM_END) if backend.token_to_id(mark) is None]
    if rows is None or id_limit(tokenizer) + len(missing) <= rows:
        backend.add_special_tokens([IM_START, IM_END])
        return _made(tokenizer, backend, CHAT_TEMPLATE, backend.token_to_id(IM_END))
    if not tokenizer.eos_ids:
        raise TokenizerError(
            f"{tokenizer.source} has no chat template, no end-of-text token and no room for new tokens",
            hint="use a model with an end-of-text token, or write a chat_template.jinja beside it",
        )
    end = tokenizer.token(tokenizer.eos_ids[0])
    return _made(tokenizer, backend, CHAT_TEMPLATE.replace(IM_END, end), tokenizer.eos_ids[0])


def _made(
    base: Tokenizer, backend: tokenizers.Tokenizer, template: str, end_id: int | None
) -> Tokenizer:
    ends = (end_id,) if end_id is not None and end_id not in base.eos_ids else ()
    special = SpecialTokens(
        named=base.special.named,
        bos_id=base.bos_id,
        eos_ids=(*base.eos_ids, *ends),
        pad_id=base.pad_id,
    )
    return Tokenizer(backend, special, {"default": template}, base.source)

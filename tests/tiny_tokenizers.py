"""Tiny tokenizers of the two kinds that language models use, trained on the spot: they need no data."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock,  isn't it?\n\n\tYes.",
    "Größe, naïve café, Ελλάδα, Привет мир, 日本語のテキスト, 한국어, emoji 😀🎉 and more words here.",
    "Once upon a time there was a little girl; she loved to play outside in the park, the park.",
] * 4


def byte_level(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """Like GPT-2: every byte is a token, so every text has ids."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("｜é｜", normalized=False)]
    )
    return backend


def sentencepiece(strip: bool = True) -> tokenizers.Tokenizer:
    """Like Llama 2: ▁ for a space, byte tokens for what has no token , a space in front."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=40,
        show_progress=False,
    )
    trained.train_from_iterator([text.replace("\n", " ") for text in TEXT], trainer)
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    model = models.BPE(state["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
        spaces.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """A model folder with tokenizer.json and, if it has any content, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder

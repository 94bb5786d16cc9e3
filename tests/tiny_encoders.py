"""Tiny text encoders of each family with random weights, as transformers saves them, with a WordPiece tokenizer."""

import json
from pathlib import Path
from typing import Any

import tiny_tokenizers
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=66,
)
MODERN = dict(local_attention=8, pad_token_id=0, bos_token_id=2, cls_token_id=2)
GEMMA = dict(head_dim=8, num_key_value_heads=2, sliding_window=9, use_bidirectional_attention=True)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("XLMRoberta", {"pad_token_id": 1}),
    "modernbert": ("ModernBert", dict(**MODERN, sep_token_id=3, eos_token_id=3)),
    "gemma": ("Gemma3Text", dict(**GEMMA, pad_token_id=0, eos_token_id=3, bos_token_id=2)),
}


def word_pieces() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(tiny_tokenizers.TEXT, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return backend


def reference(family: str, kind: str = "Model", **changes: Any) -> Any:
    """transformers' model, with weights large enough that every part of it counts."""
    torch.manual_seed(5)
    name, more = CONFIGS[family]
    sizes = SIZES | {"vocab_size": word_pieces().get_vocab_size()} | more | changes
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}{kind}")(config)
    for parameter in model.parameters():
        matrix = parameter.dim() > 1
        torch.nn.init.normal_(parameter, 0.0 if matrix else 0.4, 0.5 if matrix else 0.2)
    return model.eval()


def save(folder: Path, model: Any, **files: Any) -> Path:
    """`files`: further JSON, "1_Pooling/config" for 1_Pooling/config.json."""
    model.save_pretrained(folder)
    tiny_tokenizers.save(folder, word_pieces(), cls_token="[CLS]", sep_token="[SEP]")
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, str]]:
    """A chain of sentence-transformers' modules: the first one is the model itself."""
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds[1:], start=1))]
    return [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in zip(paths, kinds, strict=True)
    ]

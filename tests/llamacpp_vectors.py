"""Texts with their expected ids for real vocabularies, as llama.cpp keeps them for its own tests."""

from shared_data import unpacked

_SEPARATOR = "\n__ggml_vocab_test__\n"


def vectors(vocabulary: str) -> list[tuple[str, list[int]]]:
    """(text, ids without BOS) pairs of one vocabulary, such as llama-bpe."""
    folder = (
        unpacked("data", "tokenizers", "llamacpp_vectors_and_templates.tar.xz") / "llamacpp_vec"
    )
    stem = f"ggml-vocab-{vocabulary}.gguf"
    texts = (folder / f"{stem}.inp").read_bytes().decode().split(_SEPARATOR)
    lines = (folder / f"{stem}.out").read_text().split("\n")
    return [
        (text, [int(id) for id in line.split()]) for text, line in zip(texts, lines, strict=False)
    ]


def texts() -> list[str]:
    """All different texts of the vectors: unicode, digits, spaces, code, other scripts, decomposed accents."""
    known = ("gpt-2", "qwen35", "gemma-4", "llama-spm")
    return sorted({text for vocabulary in known for text, _ in vectors(vocabulary)})

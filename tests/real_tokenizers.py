"""The tokenizers of real models, each read once for all tests of a run."""

import functools
from pathlib import Path

from shared_data import model_folder, unpacked

from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder


def folder_of(name: str) -> Path:
    if name.startswith("stories"):
        return model_folder(name)
    return unpacked("data", "tokenizers", "hf_tokenizers.tar.xz") / name


@functools.cache
def load(name: str) -> Tokenizer:
    return tokenizer_from_folder(folder_of(name))

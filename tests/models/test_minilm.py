"""all-MiniLM-L6-v2, as its package ships it: vectors of real texts equal transformers', and mean what they should."""

import numpy as np
import pytest
import torch
import transformers

from cairn import LLM
from cairn.core.errors import ModelNotFound
from cairn.models.hub import PACKAGED, resolve

NAME = "all-minilm-l6-v2"
WORDS = ["river", "stone", "bread", "music", "code", "winter", "engine", "garden", "paper", "light"]


@pytest.fixture(scope="module")
def folder():
    try:
        return resolve(NAME)
    except ModelNotFound:
        pytest.skip(f"needs a package: {PACKAGED[NAME].install}")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), device="cpu") as made:
        yield made


def texts(count):
    """Of many lengths, with numbers and other alphabets among them."""
    made = []
    for at in range(count):
        words = [WORDS[(at * 7 + k * k) % len(WORDS)] for k in range(1 + at % 37)]
        made.append(f"{' '.join(words)} {at} café Привет" if at % 3 else " ".join(words))
    return made


@pytest.fixture(scope="module")
def expected(folder):
    """Of the 200 texts, at length one."""
    given = texts(200)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    found = []
    with torch.inference_mode():
        for start in range(0, len(given), 40):
            batch = tokenizer(given[start : start + 40], padding=True, return_tensors="pt")
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            found.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1).numpy()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cosine_to_transformers_on_200_texts(folder, expected, dtype):
    with LLM(str(folder), device="cpu", dtype=dtype) as llm:
        found = np.array(llm.embed(texts(200)))
    assert (found * expected).sum(-1).min() >= 0.99999
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, atol=1e-6)


def test_near_texts_rank_first_and_the_files_are_followed(llm):
    documents = [
        "The stock market fell sharply today.",
        "A dog is playing with a ball in the park.",
        "Bread is baked from flour and water.",
    ]
    ranked = llm.rank("a puppy plays outside", documents)
    assert ranked[0][0] == 1
    assert ranked[0][1] > 0.4 > ranked[1][1]
    assert llm.serving.limits.context == 256
    assert len(llm.embed("word " * 500, truncate=True, dimensions=64)[0]) == 64

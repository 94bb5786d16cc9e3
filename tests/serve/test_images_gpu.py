"""Pictures through the graphs and kernels of a GPU engine, held against the lean form on the CPU in float32.

How far bfloat16 may be off is shown by the plain form in bfloat16 for the same tokens, as in `test_families_gpu`. What
is compared are log-probabilities of the prompt (spans seen both ways, rows and columns of pictures) and of the answer.
"""

import os

import pytest
import torch

pytest.importorskip("PIL", reason="pictures are decoded by Pillow")
import tiny_vision as tiny

from cairn import LLM, SamplingParams
from cairn.serve.prompts import Prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
DEVICE = os.environ.get("CAIRN_TEST_DEVICE", "cuda")  # "cpu": does the test itself run?
MOST = 12
SLACK = 0.02  # nats: where bfloat16 happens to err little
FAMILIES = ("llava", "gemma3", "paligemma", "qwen2-vl", "qwen2.5-vl", "qwen3-vl")
ASKED = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": tiny.photograph(61, 40, 0)},
            {"type": "text", "text": "and"},
            {"type": "image", "image": tiny.photograph(33, 97, 1)},
            {"type": "text", "text": "What is this?"},
        ],
    }
]


def engine(name: str, device: str, dtype: str, **options) -> LLM:
    sizes = dict(block_size=16, num_gpu_blocks_override=96, max_num_seqs=8, load_in_advance=False)
    return LLM(str(tiny.folder(name)), device=device, dtype=dtype, **sizes, **options)


def params(most: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=most, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )


def logprobs_of(prompt: list[int], found: list) -> list[float]:
    return [one[token].logprob for token, one in zip(prompt[1:], found[1:], strict=True)]


def answered(name: str, **options) -> tuple[list[int], int, torch.Tensor]:
    """All tokens, how many are the prompt's, and log-probabilities of all but the first."""
    with engine(name, DEVICE, "bfloat16", **options) as llm:
        made = llm.chat(ASKED, params(MOST), use_tqdm=False)[0]
    prompt, answer = made.prompt_token_ids, made.outputs[0]
    found = logprobs_of(prompt, made.prompt_logprobs)
    found += [one[t].logprob for t, one in zip(answer.token_ids, answer.logprobs, strict=True)]
    return [*prompt, *answer.token_ids], len(prompt), torch.tensor(found)


def scored(name: str, tokens: list[int], device: str, dtype: str) -> torch.Tensor:
    """The same by another engine, for which all of it is a prompt."""
    with engine(name, device, dtype, plain=True) as llm:
        pictures = llm._read_chat(ASKED, None, True, None).pictures
        asked = Prompt(None, tokens, pictures=pictures)
        made = llm._answer([asked], [params(1)], False, [0])[0]
    return torch.tensor(logprobs_of(tokens, made.prompt_logprobs))


@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_on_a_gpu_err_no_more_than_bfloat16_does(name):
    tokens, prompt, ours = answered(name)
    if name == "paligemma":  # of which all of a prompt sees all of it
        tokens, ours = tokens[:prompt], ours[: prompt - 1]
    truth = scored(name, tokens, "cpu", "float32")
    natural = (scored(name, tokens, DEVICE, "bfloat16") - truth).abs().mean()
    error = (ours - truth).abs().mean()
    assert error <= 2 * natural + SLACK, (float(error), float(natural))


def test_chunks_of_a_prompt_with_pictures_are_its_whole():
    """Several steps, the later ones over pages, with rows and columns of pictures in graphs of few tokens."""
    tokens, _, whole = answered("qwen3-vl")
    again, _, chunked = answered("qwen3-vl", max_num_batched_tokens=24)
    pairs = enumerate(zip(tokens, again, strict=True))
    same = next((at for at, (one, other) in pairs if one != other), len(tokens))
    assert (whole - chunked)[: same - 1].abs().mean() < 0.1

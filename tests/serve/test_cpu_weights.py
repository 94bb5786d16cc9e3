"""Serving on a CPU with packed weights: the default model answers, errs little, and its exact form not at all.

The exact form is held against transformers on the dequantised weights, the packed one against the same in float64.
"""

import math
from pathlib import Path

import pytest
import shared_data
import tiny_checkpoints
import torch
import transformers

from cairn import LLM, SamplingParams
from cairn.core.errors import ConfigError
from cairn.kernels.cpu import compiled
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.linear.blocks import RoundedRows
from cairn.models.linear.maps import held_bytes, linears
from cairn.models.linear.packed import Int4, Int8
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine.cpu_threads import allowed_threads, few_tokens
from cairn.serve.engine.cpu_weights import pack_weights, packed
from cairn.serve.engine.start import start_with

TEXT = (
    "The capital of France is Paris. It lies on the river Seine, and two million people live there."
)
STORY = """\
A lighthouse keeper has more to do than watch a lamp. In the morning he cleans the glass,
because salt from the spray dries on it overnight and takes away a part of the light. Then he
writes down the weather: the wind, the height of the waves, the clouds, and whether ships were
seen. On calm days there is time to mend a net, to paint a door, or to read a book that the
supply boat brought in the spring. When a storm comes, nothing of this matters. He stays awake
until the wind has gone, and counts the seconds between two flashes, as sailors do who look for
the shore.

Most towers stand on rock, where the sea is dangerous and the ground is firm. The oldest ones
burned wood and coal; later ones burned oil, and a lens of many rings gathered the light into a
beam that could be seen from twenty miles away. Today a small electric lamp does the same work,
and a computer in a distant office knows when it fails. Many people think that this is a pity.
The keepers themselves are less sure. They remember the cold rooms, the long stairs, and the
winters in which no letter came for weeks.

Water is heaviest at four degrees above freezing. This is the reason why a lake freezes from the
top, and why fish survive under the ice. If ice were heavier than water, it would sink to the
bottom, and in a cold winter the whole lake would become solid.
"""
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
MOST_CHANGE = 0.02  # of the mean negative log-likelihood of a text; seen: 0.003
# Of a log-probability among the likeliest five; seen: 0.03 and 0.3.
MEAN_ERROR, MOST_ERROR = 0.25, 2.0


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def smollm2() -> str:
    return str(shared_data.packaged_chat_model())


@pytest.fixture(scope="module")
def exact(smollm2) -> Transformer:
    return open_model(smollm2).load("cpu", "float32").model


@pytest.fixture(scope="module")
def serving(smollm2):
    """The form that serves; skips where this CPU has no packed product."""
    with engine(smollm2) as llm:
        said = "\n".join(llm.notes)
        if "weights as they are" in said:
            pytest.skip(said)
        yield llm


def engine(model: str, **options) -> LLM:
    return LLM(model, device="cpu", max_num_seqs=8, max_model_len=256, num_gpu_blocks_override=64,
               **options)  # fmt: skip


def prompt_errors(llm: LLM, reference_TV: torch.Tensor) -> list[float]:
    """Of the likeliest five after each token of TEXT, how far their log-probabilities are from the reference's."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    (found,) = llm.generate(TEXT, params, use_tqdm=False)
    return [
        abs(entry.logprob - float(reference_TV[place - 1, token]))
        for place, row in enumerate(found.prompt_logprobs or [])
        if row
        for token, entry in row.items()
    ]


def chat(llm: LLM) -> str:
    params = SamplingParams(temperature=0, max_tokens=12)
    return llm.chat(ASKED, params, use_tqdm=False)[0].outputs[0].text


def test_the_exact_form_is_what_transformers_computes(smollm2, exact, tmp_path):
    export(exact, tmp_path)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with engine(smollm2, weights="float") as llm:
        tokens = llm.tokenizer.encode(TEXT)
        with torch.inference_mode():
            reference_TV = peer(torch.tensor([tokens])).logits[0].log_softmax(-1)
        errors = prompt_errors(llm, reference_TV)
        assert len(errors) >= 5 * (len(tokens) - 1)
        assert max(errors) < 1e-3
        assert "Paris" in chat(llm)


def log_probabilities(model: Transformer, tokens: list[int]) -> torch.Tensor:
    attend = PackedDocuments([len(tokens)])
    with torch.inference_mode():
        hidden_TD = model(torch.tensor(tokens), attend.positions_T(), attend)
        return model.logits(hidden_TD).log_softmax(-1)


def test_the_form_that_serves_says_paris_and_errs_little(smollm2, serving):
    assert "exact: --weights float" in "\n".join(serving.notes)
    wide = open_model(smollm2).load("cpu", "float32").model.double()
    errors = prompt_errors(serving, log_probabilities(wide, serving.tokenizer.encode(TEXT)))
    assert sum(errors) / len(errors) < MEAN_ERROR
    assert max(errors) < MOST_ERROR
    assert max(errors) > 1e-4, "this is the exact form"
    assert "Paris" in chat(serving)
    model = serving.serving.engine.engine.runner.model
    if compiled.obstacle() is None:  # mapped as the file has them
        assert held_bytes(model) < 1.1 * Path(smollm2).stat().st_size
    else:  # 8-bit rows and the embedding
        whole = model.embedding.weight.nbytes
        assert held_bytes(model) < whole + 2.5 * sum(map(math.prod, shapes(model)))


def shapes(model: Transformer) -> list[tuple[int, int]]:
    return [part.shape_NK() for part in linears(model)]


def test_a_page_of_english_is_as_likely_in_the_form_that_serves(serving, exact):
    tokens = serving.tokenizer.encode(STORY)[:250]
    assert len(tokens) == 250
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (found,) = serving.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    rows = (found.prompt_logprobs or [])[1:]
    ours = [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True) if row]
    assert len(ours) == len(tokens) - 1
    next_T1 = torch.tensor(tokens[1:])[:, None]
    theirs = log_probabilities(exact, tokens)[:-1].gather(1, next_T1)
    assert sum(ours) / len(ours) == pytest.approx(float(theirs.mean()), rel=MOST_CHANGE)


def test_an_answer_is_the_same_cold_warm_in_chunks_and_beside_others(smollm2, serving):
    """At temperature 0: with its prefix computed, cached or in parts, alone and among eight."""
    params = SamplingParams(temperature=0, max_tokens=8)
    others = ["What is the capital of Italy?", "What do cows eat?"]
    asked = [*ASKED, *({"role": "user", "content": text} for text in others)]

    def answers(llm: LLM, some: list) -> list[list[int]]:
        found = llm.chat([[one] for one in some], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    def alone(llm: LLM) -> list[list[int]]:
        return [answers(llm, [one])[0] for one in asked]

    cold, warm = alone(serving), alone(serving)
    assert "Paris" in serving.tokenizer.decode(cold[0])
    assert warm == cold
    assert answers(serving, asked) == cold
    with engine(smollm2, max_num_batched_tokens=8, enable_prefix_caching=False) as llm:
        assert alone(llm) == cold


def tiny(family: str = "qwen3") -> Transformer:
    return open_checkpoint(tiny_checkpoints.folder(family)).load("cpu", torch.float32)


def test_a_checkpoint_in_floating_point_stays_as_it_is():
    model = tiny()
    assert "as they are" in pack_weights(model, "auto", 16.0)
    assert "as they are" in pack_weights(model, "packed", 16.0)  # of a GGUF file without blocks
    assert not packed(model)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_form_that_was_asked_for_is_given_and_taken_back(form):
    if Int8.obstacle(8, 64):
        pytest.skip("this CPU has no packed product")
    model = tiny()
    tokens, attend = torch.arange(1, 20), PackedDocuments([19])
    with torch.inference_mode():
        before = model.logits(model(tokens, attend.positions_T(), attend))
        assert "as fast as float32" in pack_weights(model, form, 16.0)
        assert packed(model)
        assert isinstance(next(linears(model)).form, Int4 | Int8 | RoundedRows)
        during = model.logits(model(tokens, attend.positions_T(), attend))
        pack_weights(model, "float", 16.0)
        after = model.logits(model(tokens, attend.positions_T(), attend))
    assert torch.equal(before, after)
    assert not torch.equal(before, during)
    assert (during - before).norm() < 0.5 * before.norm()


def test_an_engine_with_fp8_weights_answers_and_errs_little():
    """A form that needs no more than its file and its registration."""
    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(1, 30))}
    found = {}
    for weights in ("float", "fp8"):
        with engine("random:tiny-llama", weights=weights) as llm:
            (answer,) = llm.generate(prompt, params, use_tqdm=False)
            found[weights] = answer
            assert ("float8 rows" in "\n".join(llm.notes)) == (weights == "fp8")
    assert len(found["fp8"].outputs[0].token_ids) == 6
    exact, near = (
        torch.tensor(
            [row[token].logprob for row, token in zip(rows[1:], range(2, 30), strict=True)]
        )
        for rows in (found["float"].prompt_logprobs, found["fp8"].prompt_logprobs)
    )
    assert not torch.equal(exact, near)
    assert (exact - near).abs().max() < 0.3


@pytest.mark.parametrize("mode", ["batch_invariant", "plain"])
def test_modes_that_promise_exactness_do_not_round(mode):
    def start(weights: str):
        model = tiny()
        config = EngineConfig(model="tiny", device="cpu", max_num_seqs=4, num_gpu_blocks_override=16,
                              weights=weights, **{mode: True})  # fmt: skip
        runnable = Runnable("tiny", model, "a test", bits=4.5)
        start_with(OpenModel("tiny", model.spec, None, (), None), runnable, config)
        return packed(model)

    assert not start("auto")
    with pytest.raises(ConfigError, match=f"weights is int8, and {mode}"):
        start("int8")


@pytest.mark.parametrize(
    ("usable", "quota", "now", "threads"),
    [
        (8, None, 8, 8),
        (8, 2.0, 8, 2),
        (8, 0.5, 8, 1),
        (4, 6.5, 8, 4),
        (None, 3.9, 64, 3),
        (8, 16.0, 2, 2),
    ],
)
def test_threads_stay_within_the_quota_of_the_container(usable, quota, now, threads):
    assert allowed_threads(usable, quota, now) == threads


def test_only_steps_of_small_products_run_on_one_thread():
    """By FLOPs: twice as large a matrix is multiplied with half as many tokens; one that no cache holds with none."""
    assert few_tokens([200_000, 300_000]) == 2 * few_tokens([500_000]) == 16
    assert few_tokens([2**20]) == few_tokens([]) == 0


def test_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match="weights is int3"):
        EngineConfig(model="tiny", weights="int3")


def test_bits_of_a_file_are_those_of_its_layers_and_of_its_head():
    packaged = open_checkpoint(shared_data.packaged_chat_model())
    assert (packaged.stored_bits(), packaged.head_bits()) == (5.0, 8.5)  # Q4_1, Q8_0
    tiny = open_checkpoint(tiny_checkpoints.folder("qwen3"))
    assert tiny.stored_bits() == tiny.head_bits() >= 16

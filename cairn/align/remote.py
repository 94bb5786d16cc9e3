"""The policy sampled by engines in other processes or on other machines; the weights are sent to them.

    trainer                                              cairn serve MODEL --admin-endpoints --weights float
    updated(step): publish -- POST /update_weights -->   reads them between two steps     (comm.transfer.weight_sync)
                   wait until all have them       <--    answers 200
    generate: prompts in turns -- POST /v1/completions (token ids) --> tokens and their log-probabilities

`updated` is the fence: it returns when every server computes with the new weights and none reads the trainer's copy any
more, so an answer has one version. Each publication has a number that no run has used before, because servers name
their cached pages by it.
"""

import http.client
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cairn.align.config import Align
from cairn.align.policy import Policy, Sampled, engine_view
from cairn.comm.transfer.choose import make_transport
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.weight_sync import WeightSource
from cairn.core.errors import ConfigError, RequestError
from cairn.models.tokenizer import Tokenizer
from cairn.models.weight_shards import held_by_rows, write_shards
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.train.parallel.model import ParallelModel
from cairn.train.state import TrainState

KEY = "CAIRN_API_KEY"  # of the servers, where they ask for one
THREADS = 64  # answers that are waited for at once, of each server
LOOK_S = 0.2  # between two looks at whether a server has refused
STEPS = 24  # bits of a version that count steps; those above tell runs apart
SENT = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "seed", "max_tokens", "logprobs")  # fmt: skip


class RemotePolicy(Policy):
    """The model that learns here and answers there."""

    def __init__(self, state: TrainState, tokenizer: Tokenizer, config: Align) -> None:
        assert isinstance(state.parallel, ParallelModel)
        rollout = config.rollout
        self.model = engine_view(state.parallel.stages[0])
        self.tokenizer, self.eos_ids = tokenizer, tuple(sorted(tokenizer.eos_ids))
        self.urls, self.listen, self.timeout_s = rollout.engines, rollout.listen, rollout.timeout_s
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ConfigError(
                    f"rollout.engines has {url!r}", hint="it has to be http://HOST:PORT"
                )
        self.version: int | None = None
        self._run = int(time.time()) << STEPS
        self._threads = ThreadPoolExecutor(THREADS * len(self.urls), "cairn rollouts")

    def updated(self, version: int) -> None:
        """The servers answer with the weights as they are now."""
        if version == self.version:
            return
        dtype = self.model.embedding.weight.dtype
        end = make_transport("tcp", f"trainer-{uuid.uuid4().hex[:12]}", host=self.listen)
        try:
            source = WeightSource(end, held_by_rows(self.model.spec, dtype, 0, 1))
            write_shards(source.memory, source.held, self.model)
            number = self._run + version + 1
            source.publish(number)
            self._told(source, number)
        finally:
            end.close()
        self.version = version

    def _told(self, source: WeightSource, number: int) -> None:
        """Waits until every server has taken what was published and says so."""
        where = {"addresses": [source.address], "timeout_s": self.timeout_s}
        body = {"version": number, "source": where}
        told = [self._threads.submit(self._post, url, "/update_weights", body) for url in self.urls]
        deadline = time.monotonic() + self.timeout_s
        while not all(one.done() for one in told):
            _raise_first(told)
            try:
                source.until_taken(number, len(self.urls), LOOK_S)
            except TransferError:
                if time.monotonic() > deadline:
                    raise
        _raise_first(told)

    def generate(
        self, asked: Sequence[tuple[list[int], SamplingParams]], stop: Sequence[Sequence[str]] = ()
    ) -> list[Sampled]:
        """An answer to each; servers take turns."""
        futures = [
            self._threads.submit(
                self._answer,
                self.urls[at % len(self.urls)],
                prompt,
                params,
                stop[at] if stop else (),
            )
            for at, (prompt, params) in enumerate(asked)
        ]
        try:
            return [one.result() for one in futures]
        finally:
            for one in futures:
                one.cancel()

    def _answer(
        self, url: str, prompt: list[int], params: SamplingParams, stop: Sequence[str]
    ) -> Sampled:
        body = {name: value for name in SENT if (value := getattr(params, name)) is not None}
        body |= {"prompt": prompt, "return_token_ids": True, "stop_token_ids": self.eos_ids}
        if stop:
            body |= {"stop": stop, "include_stop_str_in_output": True}
        choice = self._post(url, "/v1/completions", body)["choices"][0]
        scores = choice["logprobs"]["token_logprobs"] if choice.get("logprobs") else []
        ended = choice["finish_reason"] == "stop"
        return Sampled(choice["token_ids"], scores, self.version or 0, ended)

    def _post(self, url: str, path: str, body: dict[str, Any]) -> Any:
        parts, key = urlsplit(url), os.environ.get(KEY)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        try:
            connection.request(
                "POST", parts.path.rstrip("/") + path, msgspec.json.encode(body), headers
            )
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(
                f"the engine at {url} does not answer: {type(error).__name__} {error}",
                hint="start it with: cairn serve MODEL --admin-endpoints --weights float",
            ) from None
        finally:
            connection.close()
        if response.status != 200:
            said = content[:400].decode(errors="replace")
            raise RequestError(f"the engine at {url} refuses {path}: {response.status} {said}")
        return msgspec.json.decode(content)


def _raise_first(told: Sequence[Future[Any]]) -> None:
    for one in told:
        if one.done():
            one.result()

"""The policy sampled by engines in other processes or on other machines; the weights are sent to them.

    trainer                                              cairn serve MODEL --admin-endpoints --weights float
    updated(step): publish -- POST /update_weights -->   reads them between two steps     (comm.transfer.weight_sync)
                   wait until all have them       <--    answers 200
    generate: prompts in turns -- POST /v1/completions (token ids) --> tokens, their log-probabilities, weights version

`updated` is the fence: it returns when every server computes with the new weights and none reads the trainer's copy any
more. Each publication has a number that no publication of any run had before, because servers name their cached pages
by it; an answer that was computed with another one (the engine of a server has restarted since) is refused.
"""

import http.client
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from cairn.align.config import Align
from cairn.align.policy import Policy, Sampled, engine_view
from cairn.comm.transfer.choose_transport import make_transport
from cairn.comm.transfer.weight_sync import WeightSource
from cairn.core.errors import RequestError
from cairn.models.tokenizer import Tokenizer
from cairn.models.weight_shards import held_by_rows, write_shards
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.train.parallel.model import ParallelModel
from cairn.train.state import TrainState

KEYS = ("CAIRN_ADMIN_KEY", "CAIRN_API_KEY")  # of the servers, where they ask for one
THREADS = 64  # answers that are waited for at once, of each server
LOOK_S = 0.02  # between two looks at who has come to fetch weights
COUNT_BITS = 24  # of a weights version: they count publications, those above tell runs apart
SENT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "logprobs",
)


class Scores(msgspec.Struct):
    token_logprobs: list[float]


class Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: Scores | None = None


class Completion(msgspec.Struct):
    """Fields of a /v1/completions response that are read."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]
    weights_version: int


class Updated(msgspec.Struct):
    """Fields of an /update_weights response that are read."""

    version: int


Read = TypeVar("Read", Completion, Updated)


class RemotePolicy(Policy):
    """The model that learns here and answers there."""

    def __init__(self, state: TrainState, tokenizer: Tokenizer, config: Align) -> None:
        assert isinstance(state.parallel, ParallelModel)
        rollout = config.rollout
        self.state, self.model = state, engine_view(state.parallel.stages[0])
        self.tokenizer, self.eos_ids = tokenizer, tuple(sorted(tokenizer.eos_ids))
        self.urls, self.listen, self.timeout_s = rollout.engines, rollout.listen, rollout.timeout_s
        self.version = 0
        self._sent: tuple[int, int] | None = None  # step and samples whose weights servers have
        self._number = int(time.time()) << COUNT_BITS  # of the last publication
        self._threads = ThreadPoolExecutor(THREADS * len(self.urls), "cairn rollouts")

    def updated(self, version: int) -> None:
        """The servers answer with the weights as they are now."""
        # Not the step alone: after a rewind it comes again with other weights, and samples only go up.
        now = (version, self.state.samples)
        if now == self._sent:
            return
        dtype = self.model.embedding.weight.dtype
        self._number += 1
        end = make_transport("tcp", f"trainer-{uuid.uuid4().hex[:12]}", host=self.listen)
        try:
            source = WeightSource(end, held_by_rows(self.model.spec, dtype, 0, 1))
            write_shards(source.memory, source.held, self.model)
            source.publish(self._number)
            self._wait_for_servers(source)
        finally:
            end.close()
        self.version, self._sent = version, now

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _wait_for_servers(self, source: WeightSource) -> None:
        """Until every server has said that it computes with what was published. Its answer has to come in time."""
        where = {"addresses": [source.address], "timeout_s": self.timeout_s}
        body = {"version": self._number, "source": where}
        updates = [
            self._threads.submit(self._post, url, "/update_weights", body, Updated)
            for url in self.urls
        ]
        pending = True
        while pending:
            source.attend()
            done, pending = wait(updates, LOOK_S, FIRST_EXCEPTION)
            for one in done:
                one.result()

    def generate(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        stop: Sequence[Sequence[str]] = (),
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
            for at, (prompt, params) in enumerate(prompts)
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
        answer = self._post(url, "/v1/completions", body, Completion)
        if answer.weights_version != self._number:
            self._sent = None
            raise RequestError(
                f"the engine at {url} has answered with weights {answer.weights_version}, and not {self._number}",
                hint="has it restarted, or does another run send weights to it? Start this run again: it resumes",
            )
        choice = answer.choices[0]
        scores = choice.logprobs.token_logprobs if choice.logprobs else []
        return Sampled(choice.token_ids, scores, self.version, choice.finish_reason == "stop")

    def _post(self, url: str, path: str, body: dict[str, Any], kind: type[Read]) -> Read:
        parts, key = urlsplit(url), next(filter(None, map(os.environ.get, KEYS)), None)
        secure = parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        connection = connect(parts.hostname or "", parts.port, timeout=self.timeout_s)
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
        excerpt = content[:400].decode(errors="replace")
        if response.status != 200:
            raise RequestError(f"the engine at {url} refuses {path}: {response.status} {excerpt}")
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(
                f"{url} answers {path} with something else than an engine does ({error}): {excerpt}",
                hint="is it a server of cairn serve, and of the same release?",
            ) from None

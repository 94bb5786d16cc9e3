"""Tinker's REST calls: sessions, models, saved weights and sampling sessions over a `Service`.

Sessions, models and sampling sessions are names of this process; weights that were saved lie in a folder and outlive
it. `tinker://MODEL/weights/NAME` and `tinker://MODEL/sampler_weights/NAME` are folders of that name. A call takes the
bytes of a body and returns what becomes JSON; `routes` gives them their paths.
"""

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.responses import JSONResponse, Response

from cairn.align.tinker import wire
from cairn.align.tinker.samplers import SAMPLING, Samplers
from cairn.align.tinker.saved_runs import about_of
from cairn.align.tinker.service import Failure, Future, Service
from cairn.align.tinker.shared_base import Run
from cairn.core.errors import RequestError

POLL_S = 20.0  # how long a question for a result is held open
SILENT_S = 3600.0  # after which a client will not come back
LOAD_S = 600.0  # for weights of a sampler, behind work that waits already
NAME = re.compile(r"[\w.-]{1,128}")
PATH = re.compile(r"tinker://([\w.-]+)/(weights|sampler_weights)/([\w.-]+)")
CONFIG = {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": True}
T = TypeVar("T")


class Frontend:
    """Sessions, models and sampling sessions of clients."""

    def __init__(
        self, service: Service, api_key: str | None = None, sampling: Path | None = None
    ) -> None:
        self.service, self.base, self.api_key = service, service.base, api_key
        self.sessions: dict[str, float] = {}  # when each was heard of last
        self.runs: dict[str, Run] = {}
        self.samplers = Samplers(sampling or self.base.settings.out / SAMPLING)
        self.models: dict[str, Future] = {}  # of each model: a request that comes twice creates one

    # -- sessions -------------------------------------------------------------------------------

    async def create_session(self, body: bytes) -> dict:
        session = f"session-{uuid.uuid4().hex[:12]}"
        self._forget_silent()
        self.sessions[session] = time.monotonic()
        return {"type": "create_session", "session_id": session}

    async def heartbeat(self, body: bytes) -> dict:
        session = read(body, wire.SessionOnly).session_id
        self._check_session(session)
        self.sessions[session] = time.monotonic()
        return {"type": "session_heartbeat"}

    async def capabilities(self, body: bytes) -> dict:
        name, length = self.base.settings.model, self.base.length
        card = {"model_name": name, "max_context_length": length}
        return {"supported_models": [{**card, "trainable": True, "sampleable": True}]}

    async def config(self, body: bytes) -> dict:
        return CONFIG

    async def nothing(self, body: bytes) -> dict:
        return {"status": "ok"}

    async def telemetry(self, body: bytes) -> dict:
        """Nothing of it is kept. The SDK reports an answer of another word as an error."""
        return {"status": "accepted"}

    # -- models ---------------------------------------------------------------------------------

    async def create_model(self, body: bytes) -> dict:
        request = read(body, wire.CreateModel)
        self._check_session(request.session_id)
        self._check_base(request.base_model)
        kind = request.optimizer_config.get("type", "adamw")
        if kind != "adamw":
            raise RequestError(f"the optimizer {kind!r}", hint="adamw is what there is here")
        if request.lora_config is None:
            raise RequestError("a model without lora_config", hint="low-rank adapters are trained")
        lora, model = request.lora_config, f"{request.session_id}-model-{request.model_seq_id}"
        if model not in self.models:

            def work() -> dict:
                self.runs[model] = self.base.create(lora)
                return {"type": "create_model", "model_id": model}

            self.models[model] = self.service.now(work)
        return future_of(self.models[model], model)

    async def get_info(self, body: bytes) -> dict:
        model = read(body, wire.ModelOnly).model_id
        run = self._run(model)
        about = {"arch": self.base.spec.family, "model_name": self.base.settings.model}
        about["tokenizer_id"] = str(self.base.tokenizer_folder())
        return {
            "type": "get_info",
            "model_data": about,
            "model_id": model,
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "model_name": self.base.settings.model,
        }

    async def forward_backward(self, body: bytes) -> dict:
        model, number = wire.read_turn(body)
        run = self._run(model)
        return self._submit(
            model, number, lambda: wire.write_passed(self.base.run_pass(run, wire.read_pass(body)))
        )

    async def optim_step(self, body: bytes) -> dict:
        turn = read(body, wire.Turn)
        run = self._run(turn.model_id)

        def work() -> dict:
            request = read(body, wire.OptimStep)
            if request.adam_params is None:
                raise RequestError(
                    "an optim_step without adam_params", hint="AdamW is what we have"
                )
            return {"metrics": self.base.step(run, request.adam_params)}

        return self._submit(turn.model_id, turn.seq_id, work)

    # -- weights --------------------------------------------------------------------------------

    async def save_weights(self, body: bytes) -> dict:
        turn = read(body, wire.Turn)
        run = self._run(turn.model_id)

        def work() -> dict:
            request = read(body, wire.SaveWeights)
            name = request.path or f"step-{request.seq_id}"
            path, folder = self._place(request.model_id, "weights", name)
            if folder.exists() and not request.overwrite:
                raise RequestError(f"{path} exists", hint="choose another name, or overwrite=True")
            self.base.save(run, folder, with_optimizer=True)
            return {"type": "save_weights", "path": path}

        return self._submit(turn.model_id, turn.seq_id, work)

    async def save_for_sampler(self, body: bytes) -> dict:
        """Under a name it is written; without one it is a sampling session of this process."""
        turn = read(body, wire.Turn)
        run, model = self._run(turn.model_id), turn.model_id

        def work() -> dict:
            request = read(body, wire.SaveWeights)
            kind = {"type": "save_weights_for_sampler"}
            if request.path is None:
                sampler = f"{model}-sampler-{request.sampling_session_seq_id}"
                self.samplers.put(sampler, self.base.weights_of(run))
                return {**kind, "sampling_session_id": sampler}
            path, folder = self._place(model, "sampler_weights", request.path)
            self.base.save(run, folder, with_optimizer=False)
            return {**kind, "path": path}

        return self._submit(model, turn.seq_id, work)

    async def load_weights(self, body: bytes) -> dict:
        turn = read(body, wire.Turn)
        run = self._run(turn.model_id)

        def work() -> dict:
            request = read(body, wire.LoadWeights)
            self.base.load(run, self._saved(request.path), request.optimizer)
            return {"type": "load_weights", "path": request.path}

        return self._submit(turn.model_id, turn.seq_id, work)

    async def weights_info(self, body: bytes) -> dict:
        about = about_of(self._saved(read(body, wire.WeightsInfo).tinker_path))
        flags = {name: getattr(about.lora, name) for name in ("train_unembed", "train_mlp")}
        known = {"base_model": about.base_model, "is_lora": True, "lora_rank": about.lora.rank}
        return {**known, **flags, "train_attn": about.lora.train_attn}

    # -- sampling -------------------------------------------------------------------------------

    async def create_sampling_session(self, body: bytes) -> dict:
        request = read(body, wire.CreateSamplingSession)
        self._check_session(request.session_id)
        sampler = f"{request.session_id}-sampler-{request.sampling_session_seq_id}"
        if request.model_path is not None:
            folder = self._saved(request.model_path)
            future = self.service.now(lambda: self._load_sampler(sampler, folder))
            await settled(future, LOAD_S)
            if isinstance(future.answer, Failure):
                raise RequestError(future.answer.message)
        else:
            self._check_base(request.base_model or "")
            self.samplers.put(sampler, self.base.blank)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def _load_sampler(self, sampler: str, folder: Path) -> dict:
        self.samplers.put(sampler, self.base.read(folder)[1])
        return {}

    async def sampler(self, body: bytes, id: str) -> dict:
        self.samplers.get(id)
        return {"sampler_id": id, "base_model": self.base.settings.model}

    async def sample(self, body: bytes) -> dict:
        request = read(body, wire.Sample)
        if request.sampling_session_id is None:
            raise RequestError("a sample without sampling_session_id")
        weights = self.samplers.get(request.sampling_session_id)
        number = request.seq_id if request.seq_id is not None else uuid.uuid4().hex
        id = f"{request.sampling_session_id}:sample:{number}"
        future = self.service.sample(id, weights, request)
        names = [f"{id}:{at}" for at in range(request.num_samples)]
        return {**future_of(future), "sample_sequence_ids": names}

    # -- results --------------------------------------------------------------------------------

    async def retrieve(self, body: bytes) -> Response:
        id = read(body, wire.RetrieveFuture).request_id
        future = self.service.futures.get(id)
        if future is None:
            return JSONResponse({"detail": f"there is no request {id}"}, 410)
        await settled(future, POLL_S)
        answer = future.answer
        if answer is not None:
            future.read_at = time.monotonic()
        if answer is None:
            return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
        if isinstance(answer, Failure):
            return JSONResponse({"error": answer.message, "category": answer.category})
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/x-protobuf")
        return JSONResponse(answer)

    # -- names ----------------------------------------------------------------------------------

    def _submit(self, model: str, number: int, work: Callable[[], Any]) -> dict:
        """Submit work. Errors are reported in sequence, because sequence numbers must not have gaps."""
        return future_of(self.service.submit(model, number, work), model)

    def _forget_silent(self) -> None:
        """Clients say every few seconds that they are there; what those that went away have made is dropped."""
        silent = [s for s, heard in self.sessions.items() if time.monotonic() - heard > SILENT_S]
        for session in silent:
            del self.sessions[session]
            self.samplers.forget(session)
            for model in [name for name in self.models if name.startswith(f"{session}-model-")]:
                del self.models[model]
                self.runs.pop(model, None)  # absent: it could not be made
                self.service.forget(model)

    def _check_session(self, session: str) -> None:
        if session not in self.sessions:
            raise RequestError(f"no session {session!r}", hint="the server was started anew")

    def _check_base(self, name: str) -> None:
        served = self.base.settings.model
        if name != served:
            raise RequestError(f"the base model {name!r} is not here", hint=f"this is {served!r}")

    def _run(self, model: str) -> Run:
        if model not in self.runs:
            raise RequestError(f"no model {model!r}", hint="the server was started anew")
        return self.runs[model]

    def _place(self, model: str, kind: str, name: str) -> tuple[str, Path]:
        if not NAME.fullmatch(name) or name.startswith("."):
            raise RequestError(
                f"weights cannot be called {name!r}", hint="use letters, digits, . _ and -"
            )
        return f"tinker://{model}/{kind}/{name}", self.base.settings.out / model / kind / name

    def _saved(self, path: str) -> Path:
        match = PATH.fullmatch(path)
        folder = self.base.settings.out.joinpath(*match.groups()) if match else None
        if folder is None or ".." in path or not folder.is_dir():
            raise RequestError(f"no weights under {path!r}", hint="were they saved by this server?")
        return folder


def read(body: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.MsgspecError as problem:
        raise RequestError(f"the request cannot be read: {problem}") from None


async def settled(future: Future, seconds: float) -> None:
    """Returns when it is, or after so many seconds; no thread waits for it."""
    loop, happened = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(happened.set)

    future.waiters.append(tell)
    if not future.done.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(happened.wait(), seconds)
    future.waiters.remove(tell)


def future_of(future: Future, model: str | None = None) -> dict:
    return {"request_id": future.id, "model_id": model}

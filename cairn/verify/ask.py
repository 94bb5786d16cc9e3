"""Probes for a model, and the engine of this machine as a source of evidence.

probes_of(spec, tokenizer) -> Probe, Probe, ...   --from_engine | from_server-->   Evidence
"""

import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import cairn
from cairn.core.errors import ConfigError
from cairn.models.runnable import OpenModel
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.serve.answer import Logprob
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.llm import LLM
from cairn.verify.evidence import ModelEvidence, Observation, Row
from cairn.verify.probes import (
    CHAT,
    CHAT_PROBE,
    LONG,
    LONG_TAIL,
    LONGEST,
    TEXTS,
    TOP,
    VerifyProbe,
    long_text,
)

SAMPLES, SAMPLE_BYTES = 64, 64 * 1024  # of each file, for the fingerprint
CHARACTERS = 8  # of a token at most, on average


def probes_of(spec: ModelSpec, tokenizer: Tokenizer, context: int = 0) -> list[VerifyProbe]:
    """`context`: most tokens of a request; 0: the model's."""
    room = min(context or spec.context, spec.context)
    made = [_text_probe(name, text, tokenizer) for name, text in TEXTS.items()]
    window = max(spec.windows, default=0)
    if window and window + LONG_TAIL <= min(room, LONGEST):
        made.append(_long_probe(window, tokenizer))
    if tokenizer.templates:
        text = tokenizer.chat(CHAT)
        ids = tokenizer.encode(text, special=False)
        made.append(VerifyProbe(CHAT_PROBE, text, ids, len(ids)))
    return [probe for probe in made if len(probe.ids) + probe.answer <= room] or _refuse(room)


def _refuse(room: int) -> list[VerifyProbe]:
    raise ConfigError(
        f"a context of {room} tokens has no room for the fixed texts", hint="allow at least 160"
    )


def _text_probe(name: str, text: str, tokenizer: Tokenizer) -> VerifyProbe:
    return VerifyProbe(name, text, tokenizer.encode(text))


def _long_probe(window: int, tokenizer: Tokenizer) -> VerifyProbe:
    tokens = window + LONG_TAIL
    ids = tokenizer.encode(long_text(tokens * CHARACTERS))[:tokens]
    text = tokenizer.decode(ids)
    read = tokenizer.encode(text)  # a cut word may be read otherwise
    return VerifyProbe(LONG, text, read, max(window - 2, 1), answer=0)


def from_engine(llm: LLM, probes: Sequence[VerifyProbe]) -> ModelEvidence:
    """Collect the engine's log probabilities of each prompt and of a greedy continuation."""
    params = [_params(probe) for probe in probes]
    outputs = llm.generate(
        [{"prompt_token_ids": probe.ids} for probe in probes], params, use_tqdm=False
    )
    observations = []
    for probe, output in zip(probes, outputs, strict=True):
        answer = output.outputs[0]
        if answer.error is not None:
            raise ConfigError(f"the probe {probe.name} failed: {answer.error}")
        prompt = output.prompt_logprobs or []
        count = probe.answer  # an answer of one token is made where none is asked for
        rows = [_row(row) for row in prompt[probe.first :]]
        rows += [_row(row) for row in (answer.logprobs or [])[:count]]
        ids = [*probe.ids, *answer.token_ids[:count]]
        observations.append(Observation(probe.name, ids, len(ids) - len(rows), rows))
    return ModelEvidence(
        model=llm.serving.name,
        source=f"the engine here: {'; '.join(llm.notes[:3])}",
        versions=versions(),
        observations=observations,
    )


def _params(probe: VerifyProbe) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max(probe.answer, 1),
        logprobs=TOP,
        prompt_logprobs=TOP if probe.first < len(probe.ids) else None,
        ignore_eos=False,
    )


def _row(found: dict[int, Logprob] | None) -> Row:
    return {token: one.logprob for token, one in (found or {}).items()}


def versions() -> dict[str, str]:
    return {"cairn": cairn.__version__, "torch": version("torch")}


def fingerprint(opened: OpenModel) -> str:
    """A digest of the weights' files: their sizes, and samples that are spread evenly over them."""
    digest = hashlib.blake2b(digest_size=16)
    for file in _files(opened):
        size = file.stat().st_size
        digest.update(f"{file.name if file.suffix != '.gguf' else 'gguf'} {size}\n".encode())
        with file.open("rb") as stream:
            for at in range(SAMPLES):
                stream.seek(at * max(size - SAMPLE_BYTES, 0) // max(SAMPLES - 1, 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _files(opened: OpenModel) -> Iterator[Path]:
    if opened.checkpoint is None:
        return
    path = opened.checkpoint.path
    yield from [path] if path.is_file() else sorted(path.glob("*.safetensors"))

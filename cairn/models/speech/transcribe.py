"""Transcription of batches of windows: greedy first, then at higher temperatures where that fails."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cairn.core.errors import RequestError
from cairn.models.speech.decoding_rules import TEMPERATURES, DecodedWindow, allowed, looks_wrong
from cairn.models.speech.load import OpenWhisper
from cairn.models.speech.mel import log_mel
from cairn.models.speech.model import Sounds, Texts, Whisper, joined
from cairn.models.speech.windows import AudioWindow

Task = Literal["transcribe", "translate"]


class WindowOptions(NamedTuple):
    """Transcription options of a window."""

    task: Task = "transcribe"
    language: str | None = None  # None: the one that is detected
    prompt: tuple[int, ...] = ()  # tokens of text that came before
    temperature: float | None = None  # None: 0, and higher ones where that fails


class WindowText(NamedTuple):
    decoded: DecodedWindow
    language: str | None


class Transcriber:
    """A Whisper on a device with its tokens. One thread."""

    def __init__(self, opened: OpenWhisper, model: Whisper) -> None:
        self.opened, self.model, self.tokens = opened, model, opened.tokens
        self.device = model.embedding.device
        self.passes = 0  # through the encoder or the decoder, since the start
        suppressed = [*opened.tokens.suppressed, opened.tokens.no_timestamps]
        self._never_V = torch.zeros(opened.spec.vocab, dtype=torch.bool)
        self._never_V[suppressed] = True
        self._never_V[opened.tokens.start : opened.tokens.no_timestamps] = True  # they steer
        self._never_V = self._never_V.to(self.device)
        self._token_V = torch.arange(opened.spec.vocab, device=self.device)

    @torch.inference_mode()
    def transcribe(self, requests: Sequence[tuple[AudioWindow, WindowOptions]]) -> list[WindowText]:
        """Transcribe windows and return the results in order. Silent windows are skipped."""
        loud = [at for at, (window, _) in enumerate(requests) if not window.is_silent]
        silent = WindowText(DecodedWindow([], 0.0, 1.0, 0.0), None)
        results = [silent] * len(requests)
        if loud:
            chosen = [requests[at] for at in loud]
            sound = self._listen(self._mel([window for window, _ in chosen]))
            heard = self._write(sound, [settings for _, settings in chosen])
            for at, one in zip(loud, heard, strict=True):
                results[at] = one
        return results

    def _mel(self, windows: Sequence[AudioWindow]) -> Tensor:
        spectra = [
            log_mel(
                torch.from_numpy(window.samples.copy()).to(self.device)[None], self.model.spec.bins
            )
            for window in windows
        ]
        return torch.cat(spectra)

    def _listen(self, mel_BMN: Tensor) -> Sounds:
        """All windows at once; on a CPU, which is no faster so, one by one, so that no pass takes long."""
        parts = mel_BMN.split(1) if self.device.type == "cpu" else [mel_BMN]
        heard = []
        for part in parts:
            heard.append(self.model.listen(part))
            self.passes += 1
        return heard[0] if len(heard) == 1 else joined(heard)

    def _read(
        self, tokens_BS: Tensor, texts: Texts, sound: Sounds, rows: list[int] | None = None
    ) -> Tensor:
        """Logits behind the last of these tokens, [B, V]."""
        logits_B1V = self.model.read(tokens_BS, texts, sound, last_only=True, slots=rows)
        self.passes += 1
        return logits_B1V[:, 0]

    def _write(self, sound: Sounds, settings: list[WindowOptions]) -> list[WindowText]:
        """Each window at the lowest temperature at which its text looks right."""
        languages, no_speech = self._hear(sound, settings)
        results: dict[int, DecodedWindow] = {}
        left = list(range(len(settings)))
        for temperature in TEMPERATURES:
            if not left:
                break
            index_B = torch.tensor(left, device=self.device)
            rows = sound if len(left) == len(settings) else sound.rows(index_B)
            rest = [settings[at] for at in left]
            heats = [temperature if one.temperature is None else one.temperature for one in rest]
            starts = [self._start(settings[at], languages[at]) for at in left]
            decoded = self._decode(rows, starts, heats, [no_speech[at] for at in left])
            results |= dict(zip(left, decoded, strict=True))
            left = [
                at
                for at in left
                if settings[at].temperature is None
                and looks_wrong(results[at], self.text(results[at].tokens))
            ]
        return [WindowText(results[at], languages[at]) for at in range(len(settings))]

    def text(self, tokens: Sequence[int]) -> str:
        words = [token for token in tokens if token < self.tokens.end]
        return self.opened.tokenizer.decode(words)

    def _hear(
        self, sound: Sounds, settings: Sequence[WindowOptions]
    ) -> tuple[list[str | None], list[float]]:
        """Detect the language and the probability of no speech."""
        tokens, rows = self.tokens, len(settings)
        first_B1 = torch.full((rows, 1), tokens.start, device=self.device)
        texts = self.model.texts(rows)
        logits_BV = self._read(first_B1, texts, sound)
        silence = [0.0] * rows
        if tokens.no_speech is not None:
            silence = logits_BV.softmax(-1)[:, tokens.no_speech].tolist()
        if not self.model.spec.multilingual or not tokens.languages:
            return [None] * rows, silence
        codes, ids = list(tokens.languages), list(tokens.languages.values())
        best_B = logits_BV[:, ids].argmax(-1).tolist()
        heard = [one.language or codes[at] for one, at in zip(settings, best_B, strict=True)]
        return list(heard), silence

    def _start(self, settings: WindowOptions, language: str | None) -> list[int]:
        """Decoder prompt: previous text, language and task."""
        tokens = self.tokens
        begin = [tokens.start]
        if language is not None:
            task = tokens.transcribe if settings.task == "transcribe" else tokens.translate
            if task is None:
                raise RequestError(f"this model does not {settings.task}")
            begin += [tokens.languages[language], task]
        if settings.prompt and tokens.previous is not None:
            room = self.model.spec.context // 2 - 1
            begin = [tokens.previous, *settings.prompt[-room:], *begin]
        return begin

    # -- decoding --------------------------------------------------------------------------------

    def _decode(
        self, sound: Sounds, starts: list[list[int]], heats: list[float], no_speech: list[float]
    ) -> list[DecodedWindow]:
        """Rows grow together; those with starts of other lengths are decoded apart."""
        by_length: dict[int, list[int]] = {}
        for at, start in enumerate(starts):
            by_length.setdefault(len(start), []).append(at)
        by_row: dict[int, DecodedWindow] = {}
        for rows in by_length.values():
            index_B = torch.tensor(rows, device=self.device)
            part = sound if len(rows) == len(starts) else sound.rows(index_B)
            decoded = self._decode_together(
                part, [starts[at] for at in rows], [heats[at] for at in rows]
            )
            for at, (tokens, logprob) in zip(rows, decoded, strict=True):
                by_row[at] = DecodedWindow(tokens, logprob, no_speech[at], heats[at])
        return [by_row[at] for at in range(len(starts))]

    def _decode_together(
        self, sound: Sounds, starts: list[list[int]], heats: list[float]
    ) -> list[tuple[list[int], float]]:
        spec, tokens = self.model.spec, self.tokens
        rows = list(range(len(starts)))  # those that are computed
        texts = self.model.texts(len(rows))
        written: list[list[int]] = [[] for _ in rows]
        sums, over = [0.0] * len(rows), [False] * len(rows)
        generator = torch.Generator(self.device).manual_seed(0)
        given_BS = torch.tensor(starts, device=self.device)
        most = min(spec.context // 2, spec.context - len(starts[0]))
        for _ in range(most):
            logits_BV = self._read(given_BS, texts, sound, rows)
            self._mask(logits_BV, [written[row] for row in rows])
            chosen_B = _choose(logits_BV, [heats[row] for row in rows], generator)
            logprobs_B = logits_BV.gather(1, chosen_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
            for row, token, logprob in zip(
                rows, chosen_B.tolist(), logprobs_B.tolist(), strict=True
            ):
                if over[row]:
                    continue
                sums[row] += logprob
                over[row] = token == tokens.end
                if not over[row]:
                    written[row].append(token)
            if all(over):
                break
            if self.model.compiled is not None:  # whose rows need not stay together
                chosen_B = chosen_B[[at for at, row in enumerate(rows) if not over[row]]]
                rows = [row for row in rows if not over[row]]
            given_BS = chosen_B[:, None]
        return [(one, total / (len(one) + 1)) for one, total in zip(written, sums, strict=True)]

    def _mask(self, logits_BV: Tensor, texts: list[list[int]]) -> None:
        """Set forbidden logits of all rows to minus infinity, in place."""
        tokens, vocab, never = self.tokens, logits_BV.shape[1], -math.inf
        first = tokens.first_timestamp
        rules = [allowed(one, tokens) for one in texts]
        logits_BV.masked_fill_(self._never_V, never)
        if not any(texts):
            logits_BV[:, list(tokens.suppressed_first)] = never
        # Of each row: where text begins, where timestamps begin and end, and whether both are to be had.
        bounds = [
            (
                0 if rule.text else tokens.end if one else first,
                rule.earliest if rule.timestamps else vocab,
                vocab if rule.latest is None else rule.latest + 1,
                bool(one) and rule.timestamps,
            )
            for one, rule in zip(texts, rules, strict=True)
        ]
        text_B1, earliest_B1, end_B1, both_B1 = torch.tensor(bounds, device=self.device).t()[
            ..., None
        ]
        token_V = self._token_V
        timestamps_BV = (token_V >= first) & (token_V < earliest_B1)
        logits_BV.masked_fill_((token_V < text_B1) | timestamps_BV | (token_V >= end_B1), never)
        likelier_B = logits_BV[:, first:].logsumexp(-1) > logits_BV[:, :first].amax(-1)
        logits_BV[:, :first].masked_fill_(both_B1.bool() & likelier_B[:, None], never)


def _choose(logits_BV: Tensor, heats: list[float], generator: torch.Generator) -> Tensor:
    best_B = logits_BV.argmax(-1)
    if not any(heats):
        return best_B
    heats_B1 = torch.tensor(heats, device=logits_BV.device)[:, None]
    shares_BV = (logits_BV / heats_B1.clamp(min=1e-3)).softmax(-1)
    drawn_B = torch.multinomial(shares_BV, 1, generator=generator)[:, 0]
    return torch.where(heats_B1[:, 0] > 0, drawn_B, best_B)

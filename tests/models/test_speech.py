"""Whisper against transformers on the same random weights, and the rules of timestamps, windows and files."""

import contextlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny_whisper
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from cairn import LLM
from cairn.core.errors import CairnError, ModelNotFound, WeightsError
from cairn.models.hub import PACKAGED, resolve
from cairn.models.speech.ctranslate2 import read_variables
from cairn.models.speech.decoding_rules import DecodedWindow, is_silent, looks_wrong, segments
from cairn.models.speech.load import is_whisper, open_whisper
from cairn.models.speech.mel import RATE, SAMPLES, log_mel
from cairn.models.speech.sound_file import _read_wave, read_sound, resampled
from cairn.models.speech.transcribe import Transcriber, WindowOptions
from cairn.models.speech.windows import AudioWindow, windows


@pytest.fixture(scope="module")
def theirs():
    return tiny_whisper.reference()


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    return tiny_whisper.save(tmp_path_factory.mktemp("whisper") / "hf", theirs)


@pytest.fixture(scope="module")
def transcriber(folder):
    opened = open_whisper("tiny", folder)
    return Transcriber(opened, opened.load("cpu", torch.float32))


def noise(seconds, seed=0):
    draw = np.random.default_rng(seed)
    return (draw.standard_normal(int(seconds * RATE)) * 0.1).astype(np.float32)


@pytest.mark.parametrize("bins", [80, 128])
def test_the_spectrogram_is_that_of_transformers(bins):
    sound = noise(3.7)
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    expected = extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features
    torch.testing.assert_close(
        log_mel(torch.tensor(sound)[None], bins), expected, atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("plain", [True, False])
def test_states_and_logits_are_those_of_transformers_in_both_forms(theirs, transcriber, plain):
    """In a batch, the tokens in pieces."""
    model = transcriber.opened.load("cpu", torch.float32, plain)
    fast = model.compiled is not None or model.decoder[0].fused_up is not None
    assert fast != plain
    mel = log_mel(torch.tensor(np.stack([noise(4), noise(4, 1)])), 80)
    tokens = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(input_features=mel, decoder_input_ids=tokens)
        torch.testing.assert_close(
            model.encode(mel), expected.encoder_last_hidden_state, atol=2e-4, rtol=1e-4
        )
        sound, texts = model.listen(mel), model.texts(2)
        pieces = [model.read(part, texts, sound) for part in tokens.split([5, 1, 6], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), expected.logits, atol=2e-4, rtol=1e-4)
    assert expected.logits.std() > 0.1


def test_the_encoder_in_float16_is_near_that_in_float32(transcriber):
    """Where this CPU has no kernel for it, it is the one in float32."""
    half = transcriber.opened.load("cpu", torch.float32, stored=torch.float16)
    plain = transcriber.opened.load("cpu", torch.float32, plain=True)
    mel = log_mel(torch.tensor(noise(4))[None], 80)
    with torch.inference_mode():
        found, expected = half.encode(mel), plain.encode(mel)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 5e-3 * expected.norm()


def test_what_may_be_said_next_is_what_transformers_allows(transcriber):
    """Along texts that follow the rules: on random scores both leave the same tokens."""
    tokens, vocab = transcriber.tokens, transcriber.model.spec.vocab
    config = transformers.GenerationConfig(
        no_timestamps_token_id=tokens.no_timestamps,
        eos_token_id=tokens.end,
        bos_token_id=tokens.end,
        max_initial_timestamp_index=50,
    )
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(12):
        said: list[int] = []
        for _ in range(14):
            scores = torch.randn(vocab, generator=draw) * 3
            scores[: tokens.end] += torch.rand(1, generator=draw) * 9
            given_ids = torch.tensor([[1, 2, 3, *said]])
            ours = scores.clone()
            transcriber._mask(ours[None], [said])
            wanted = scores.clone()
            wanted[transcriber._never_V] = -torch.inf
            if not said:
                wanted[list(tokens.suppressed_first)] = -torch.inf
            wanted = theirs(given_ids, wanted[None])[0]
            assert torch.equal(ours.isinf(), wanted.isinf()), said
            said.append(int(ours.softmax(-1).multinomial(1, generator=draw)))
            if said[-1] == tokens.end:
                break


def test_windows_together_alone_and_greedy_step_by_step(theirs, transcriber):
    """A batch says what each window says alone, and that is the argmax under the rules."""
    given_windows = [
        (AudioWindow(0, noise(2)), WindowOptions(language="en", temperature=0.0)),
        (AudioWindow(0, np.zeros(RATE, np.float32)), WindowOptions()),
        (AudioWindow(0, noise(5, 1)), WindowOptions("translate", "de", temperature=0.0)),
        (
            AudioWindow(0, noise(3, 2)),
            WindowOptions(language="en", prompt=(40, 41), temperature=0.0),
        ),
    ]
    together = transcriber.transcribe(given_windows)
    alone = [transcriber.transcribe([one])[0] for one in given_windows]
    assert [one.decoded.tokens for one in together] == [one.decoded.tokens for one in alone]
    assert together[1].decoded.tokens == []
    tokens = transcriber.tokens
    ids = [tokens.start, tokens.languages["en"], tokens.transcribe]
    mel = log_mel(torch.tensor(noise(2))[None], 80)
    said: list[int] = []
    with torch.inference_mode():
        while len(said) < 20:
            given_ids = torch.tensor([ids + said])
            scores = theirs(input_features=mel, decoder_input_ids=given_ids).logits[0, -1]
            transcriber._mask(scores[None], [said])
            if (best := int(scores.argmax())) == tokens.end:
                break
            said.append(best)
    assert together[0].decoded.tokens == said
    assert said[0] >= tokens.first_timestamp


def test_passes_are_counted_so_that_a_server_sees_progress_inside_a_batch(transcriber):
    wanted, before = WindowOptions(language="en", temperature=0.0), transcriber.passes
    heard = transcriber.transcribe([(AudioWindow(0, noise(2, seed)), wanted) for seed in range(2)])
    longest = max(len(one.decoded.tokens) for one in heard)
    spec = transcriber.model.spec
    most = min(spec.context // 2, spec.context - 3)  # three tokens stand before the text
    encoded, first_token = 2, 1
    assert transcriber.passes - before == encoded + first_token + min(longest + 1, most)


def test_the_language_is_the_likeliest_one(theirs, transcriber):
    tokens, sound = transcriber.tokens, noise(2, 3)
    mel = log_mel(torch.tensor(sound)[None], 80)
    with torch.inference_mode():
        start = torch.tensor([[tokens.start]])
        scores = theirs(input_features=mel, decoder_input_ids=start).logits[0, 0]
    best = max(tokens.languages, key=lambda code: scores[tokens.languages[code]])
    heard = transcriber.transcribe([(AudioWindow(0, sound), WindowOptions(temperature=0.0))])[0]
    assert heard.language == best
    silence = float(scores.softmax(-1)[tokens.no_speech])
    assert heard.decoded.no_speech == pytest.approx(silence, rel=1e-3)


@pytest.mark.parametrize("int8", [False, True])
def test_a_file_of_ctranslate2_holds_the_same_model(theirs, transcriber, tmp_path, int8):
    folder = tiny_whisper.save_ctranslate2(tmp_path / "ct2", theirs, int8)
    assert is_whisper(folder)
    opened = open_whisper("tiny", folder)
    model, ours = (
        one.load("cpu", torch.float32, plain=True) for one in (opened, transcriber.opened)
    )
    assert opened.tokens == transcriber.tokens
    for name, tensor in ours.state_dict().items():
        error = (model.state_dict()[name] - tensor).abs().max()
        assert error <= (tensor.abs().max() / 127 if int8 else 0), name


def test_a_damaged_file_is_refused_wherever_it_ends(theirs, tmp_path):
    folder = tiny_whisper.save_ctranslate2(tmp_path / "ct2", theirs)
    whole = (folder / "model.bin").read_bytes()
    for end in (0, 3, 10, 40, 1000, len(whole) // 2, len(whole) - 1):
        (folder / "model.bin").write_bytes(whole[:end])
        with pytest.raises(WeightsError):
            read_variables(folder)
    (folder / "model.bin").write_bytes(struct.pack("<I", 9) + whole[4:])
    with pytest.raises(CairnError, match="version 9"):
        read_variables(folder)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 95), st.integers(0, 2**16))
def test_windows_are_all_of_the_sound_in_order(seconds, seed):
    sound = noise(seconds + 0.3, seed)
    found = windows(sound)
    assert np.array_equal(np.concatenate([one.samples for one in found]), sound)
    assert all(len(one.samples) <= SAMPLES for one in found)
    assert [one.start for one in found][1:] == list(
        np.cumsum([len(one.samples) for one in found])[:-1]
    )


def test_a_cut_lies_where_it_is_quiet():
    sound = noise(50)
    sound[24 * RATE : 24 * RATE + RATE // 2] = 0
    first, second = windows(sound)
    assert 24 <= second.start_s <= 24.5
    assert first.length_s == second.start_s


def test_segments_have_the_times_that_were_said(transcriber):
    tokens = transcriber.tokens
    at = lambda seconds: tokens.first_timestamp + round(seconds / 0.02)  # noqa: E731
    said = [at(0.5), 5, 6, at(2.0), at(2.4), 7, at(3.0)]
    assert segments(said, tokens, 8.0) == [(0.5, 2.0, [5, 6]), (2.4, 3.0, [7])]
    assert segments([at(1), 5], tokens, 8.0) == [(1.0, 8.0, [5])]
    assert segments([at(1), 5, at(20)], tokens, 8.0) == [(1.0, 8.0, [5])]
    assert segments([], tokens, 8.0) == []


def test_when_a_window_is_decoded_again():
    good = DecodedWindow([5], -0.3, 0.1, 0.0)
    assert not looks_wrong(good, "a text like any other")
    assert looks_wrong(good, "again and " * 40)
    assert looks_wrong(good._replace(mean_logprob=-1.2), "mumbled")
    silent = DecodedWindow([5], -1.2, 0.9, 0.0)
    assert is_silent(silent)
    assert not looks_wrong(silent, "Thank you.")
    assert not is_silent(silent._replace(mean_logprob=-0.5))


def wav(samples, rate=RATE, channels=1):
    raw = (np.clip(samples, -1, 1) * 32767).astype("<i2")
    raw = np.repeat(raw, channels).tobytes()
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    head = b"RIFF" + struct.pack("<I", 36 + len(raw)) + b"WAVEfmt " + struct.pack("<I", 16)
    return head + form + b"data" + struct.pack("<I", len(raw)) + raw


def test_sound_files_and_what_is_none():
    time_S = np.arange(44100 * 2) / 44100
    tone = np.sin(2 * np.pi * 440 * time_S).astype(np.float32) * 0.5
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE * 2) / RATE) * 0.5
    for found in (resampled(tone, 44100), read_sound(wav(tone, 44100, 2))):
        assert len(found) == RATE * 2
        inner = slice(2000, -2000)
        np.testing.assert_allclose(found[inner], expected[inner], atol=2e-3)
    draw = np.random.default_rng(0)
    whole = wav(noise(0.1))
    for _ in range(1500):  # damaged and truncated headers: an error or some samples, never a crash
        hostile = bytearray(whole[: int(draw.integers(4, len(whole)))])
        for _ in range(int(draw.integers(0, 6))):
            hostile[int(draw.integers(4, max(min(len(hostile), 44), 5))) - 1] = int(
                draw.integers(256)
            )
        with contextlib.suppress(CairnError):
            found = _read_wave(bytes(hostile))
            assert found is None or len(found) <= 100 * RATE
    for magic in (b"OggS", b"fLaC"):  # these go to the child
        with pytest.raises(CairnError):
            read_sound(magic + bytes(200))


def test_a_real_model_writes_down_a_real_clip():
    """CAIRN_SPEECH_CLIP: tests/jfk.flac of openai/whisper; the package holds Whisper base."""
    try:
        found = resolve("whisper-base")
    except ModelNotFound:
        pytest.skip(f"needs a package: {PACKAGED['whisper-base'].install}")
    clip = os.environ.get("CAIRN_SPEECH_CLIP")
    if clip is None:
        pytest.skip("set CAIRN_SPEECH_CLIP to tests/jfk.flac of openai/whisper")
    with LLM(str(found), device="cpu") as llm:
        heard = llm.transcribe(Path(clip).read_bytes())
    text = "".join(letter for letter in heard.text.lower() if letter.isalpha() or letter == " ")
    assert heard.language == "en"
    assert "my fellow americans ask not what your country can do for you" in text
    assert "ask what you can do for your country" in text

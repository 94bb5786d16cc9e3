"""Speech over HTTP with OpenAI's client: every form of a transcript, true times in long sound, and what is refused."""

import concurrent.futures
import io
import struct

import live_server
import numpy as np
import openai
import pytest
import tiny_whisper

RATE = 16_000


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    folder = tiny_whisper.save(tmp_path_factory.mktemp("whisper") / "hf", tiny_whisper.reference())
    with live_server.live(folder) as made:
        yield made


def clip(seconds, seed=0):
    samples = np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * 0.1
    raw = (samples * 32767).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", 1, 1, RATE, RATE * 2, 2, 16)
    head = b"RIFF" + struct.pack("<I", 36 + len(raw)) + b"WAVEfmt " + struct.pack("<I", 16)
    file = io.BytesIO(head + form + b"data" + struct.pack("<I", len(raw)) + raw)
    file.name = "clip.wav"
    return file


def test_every_form_says_the_same(hearing):
    create = hearing.client.audio.transcriptions.create
    asked = dict(model="tiny", language="en", temperature=0.01)
    plain = create(file=clip(2), **asked)
    verbose = create(file=clip(2), response_format="verbose_json", **asked)
    assert plain.text == verbose.text
    assert create(file=clip(2), response_format="text", **asked).strip() == plain.text
    assert (verbose.language, verbose.duration) == ("en", 2.0)
    assert "".join(one.text for one in verbose.segments).strip() == plain.text
    assert all(0 <= one.start <= one.end <= 2 for one in verbose.segments)
    srt = create(file=clip(2), response_format="srt", **asked)
    vtt = create(file=clip(2), response_format="vtt", **asked)
    assert srt.startswith("1\n00:00:0")
    assert vtt.startswith("WEBVTT\n\n00:00:0")
    assert srt.count("-->") == vtt.count("-->") == len(verbose.segments)
    translated = hearing.http.post("/v1/audio/translations", files={"file": clip(2)})
    assert isinstance(translated.json()["text"], str)


def test_long_sound_keeps_its_times_and_shares_batches_with_short_ones(hearing):
    create = hearing.client.audio.transcriptions.create
    asked = dict(model="tiny", language="en", temperature=0.01, response_format="verbose_json")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        long = pool.submit(create, file=clip(70), **asked)
        short = [pool.submit(create, file=clip(1, at), **asked) for at in range(3)]
        assert all(one.result().duration == 1.0 for one in short)
    found = long.result()
    assert found.duration == 70.0
    starts = [one.start for one in found.segments]
    assert starts == sorted(starts)
    assert starts[-1] > 30
    assert all(one.end <= 70 for one in found.segments)


def test_a_stream_brings_the_text_of_each_window(hearing):
    create = hearing.client.audio.transcriptions.create
    asked = dict(model="tiny", language="en", temperature=0.01)
    whole = create(file=clip(65), **asked).text
    events = list(create(file=clip(65), stream=True, **asked))
    deltas = [one.delta for one in events if one.type == "transcript.text.delta"]
    assert events[-1].type == "transcript.text.done"
    assert "".join(deltas).strip() == events[-1].text == whole


def test_what_is_refused(hearing):
    post = hearing.http.post
    path = "/v1/audio/transcriptions"
    for data, param in (
        ({"response_format": "xml"}, "response_format"),
        ({"language": "klingon"}, "language"),
        ({"temperature": "hot"}, "temperature"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
    ):
        answer = post(path, data=data, files={"file": clip(0.1)})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), data
    assert post(path, data={"model": "tiny"}, files={"x": b"1"}).json()["error"]["param"] == "file"
    hostile = post(path, files={"file": b"RIFF" + bytes(40)})
    assert hostile.status_code == 400
    assert post(path, content=b"no form").status_code == 400
    with pytest.raises(openai.BadRequestError, match="transcriber of speech"):
        hearing.client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.BadRequestError, match="transcriber of speech"):
        hearing.client.completions.create(model="tiny", prompt="a")


def test_a_model_that_does_not_hear_says_so(server):
    with pytest.raises(openai.BadRequestError, match="does not hear"):
        server.client.audio.transcriptions.create(model="tiny", file=clip(0.1))

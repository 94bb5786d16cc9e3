"""Requests with pictures: the engine answers as transformers does, cold, warm and in chunks; rows are shared."""

import asyncio
import base64
import functools
import io
import threading
import time

import pytest
import torch

pytest.importorskip("PIL", reason="pictures are decoded by Pillow")
import tiny_vision as tiny

from cairn import LLM, SamplingParams
from cairn.core.errors import ConfigError, RequestError
from cairn.models.checkpoint import open_checkpoint
from cairn.models.runnable import OpenModel, open_model
from cairn.models.vision.conversation import ImageSource
from cairn.models.vision.picture import prepare_image
from cairn.models.vision.prompt import placeholders_of
from cairn.serve.config import EngineConfig
from cairn.serve.engine import start as start_module
from cairn.serve.engine.gpu_runner import GPURunner
from cairn.serve.engine.start import start
from cairn.serve.media.decoder import DecodingBudget, ImageDecoder
from cairn.serve.media.picture_input import THREADS, picture_input_of

TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FIRST, SECOND = (61, 40, 0), (33, 97, 1)  # width, height, seed


def png(width: int, height: int, seed: int) -> bytes:
    written = io.BytesIO()
    tiny.photograph(width, height, seed).save(written, "PNG")
    return written.getvalue()


def messages(*pictures, text: str = "What is this?") -> list[dict]:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@functools.cache
def expected(name: str) -> list[int]:
    """Greedy tokens of transformers for both pictures."""
    checkpoint = open_checkpoint(tiny.folder(name))
    images = [tiny.photograph(*FIRST), tiny.photograph(*SECOND)]
    places = placeholders_of(checkpoint.vision, checkpoint.tokenizer())
    token = places.mark
    pictures = [prepare_image(image, checkpoint.image_rules()) for image in images]
    text = places.expanded(f"user: ({token})({token})What is this?\n", pictures)
    ids = tiny.tokenizer(name).encode(text, add_special_tokens=False).ids
    nested = [images] if name in ("idefics3", "smolvlm") else images
    given = tiny.image_processor(name)(nested, return_tensors="pt")
    features = tiny.features(name, given) | tiny.token_types(name, ids)
    with torch.inference_mode():
        made = tiny.reference(name).generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            **features,
        )
    return made[0, len(ids) :].tolist()


def engine(name: str, **options) -> LLM:
    folder = str(tiny.folder(name))
    return LLM(folder, device="cpu", dtype="float32", block_size=16, weights="float", **options)


ALIKE = (
    "llava-siglip",
    "smolvlm",
)  # differ from others in what tests/models/test_vision.py compares


@pytest.mark.parametrize("name", [name for name in tiny.FAMILIES if name not in ALIKE])
def test_tokens_are_those_of_transformers(name):
    """A chunk ends anywhere, but where tokens see each other both ways: PaliGemma's whole prompts do."""
    asked = messages(png(*FIRST), tiny.photograph(*SECOND))
    chunk = 64 if name == "paligemma" else 24
    with engine(name, num_gpu_blocks_override=96) as llm:
        cold, warm = (llm.chat(asked, GREEDY, use_tqdm=False)[0] for _ in range(2))
    with engine(name, num_gpu_blocks_override=96, max_num_batched_tokens=chunk) as llm:
        chunked = llm.chat(asked, GREEDY, use_tqdm=False)[0]
    assert cold.outputs[0].token_ids == expected(name)
    assert warm.outputs[0].token_ids == chunked.outputs[0].token_ids == expected(name)
    assert cold.num_cached_tokens == 0 < warm.num_cached_tokens


def frames(count: int = 5) -> list:
    return [tiny.photograph(90, 62, seed) for seed in range(count)]


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_tokens_about_a_video_are_those_of_transformers(name):
    """Five frames, four a second; the last is repeated. Steps have numbers, or times as text between them."""
    parts = [{"type": "video", "video": frames(), "fps": 4}, {"type": "text", "text": "What?"}]
    asked = [{"role": "user", "content": parts}]
    with engine(name, num_gpu_blocks_override=96, max_num_batched_tokens=48) as llm:
        made = llm.chat(asked, GREEDY, use_tqdm=False)[0]
        video = llm._read_chat(asked, None, True, None).pictures[0]
    ids = made.prompt_token_ids
    shown = torch.tensor([[2 * int(id == tiny.VIDEO_TOKEN) for id in ids]])
    with torch.inference_mode():
        theirs = tiny.reference(name).generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones_like(shown),
            mm_token_type_ids=shown,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            **tiny.video_features(name, video, 4),
        )
    assert made.outputs[0].token_ids == theirs[0, len(ids) :].tolist()
    if name == "qwen3-vl":
        step = tiny.VIDEO.replace("<unused_299>", "<unused_299>" * 24)
        times = "".join(f"<{at} seconds>{step}" for at in ("0.1", "0.6", "1.0"))
        assert made.prompt == f"user: {times}What?\n"


def test_videos_as_frames_in_a_url_and_as_an_animated_file():
    """Twenty frames of a tenth of a second: two a second would be four, the least that are taken."""
    written, picture_input = (
        io.BytesIO(),
        picture_input_of(open_model(str(tiny.folder("qwen2-vl")))),
    )
    several = frames(20)
    several[0].save(written, "GIF", save_all=True, append_images=several[1:], duration=100)
    gif = base64.b64encode(written.getvalue()).decode()
    urls = [
        f"data:image/gif;base64,{gif}",
        "data:video/png;base64,"
        + ",".join(base64.b64encode(png(90, 62, seed)).decode() for seed in range(3)),
    ]
    try:
        found = [picture_input._video(ImageSource(url, "here", 2.0)) for url in urls]
        with pytest.raises(RequestError, match="1 to 128"):
            picture_input._video(ImageSource(frames(1) * 129, "here", 2.0))
    finally:
        picture_input.close()
    assert [(video.tiles, round(video.frame_s, 2)) for video in found] == [(4, 0.63), (3, 0.5)]
    with pytest.raises(RequestError, match="takes pictures only"):
        tiny_llm().chat([{"role": "user", "content": [{"type": "video", "video": frames(2)}]}])


@pytest.fixture
def picture_input():
    made = picture_input_of(open_model(str(tiny.folder("llava"))))
    yield made
    made.close()


def test_a_request_has_one_budget_of_decoding_seconds(picture_input):
    """It ends after one picture or after thousands, as fast as the machine is; other requests have their own."""
    picture, rules = png(*FIRST), picture_input.rules
    picture_input.decoder.prepare([picture], rules)
    budget = DecodingBudget(0.5)

    def decode_on() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            picture_input.decoder.prepare([picture], rules, budget=budget)

    with pytest.raises(RequestError, match=r"took \d+\.\d s to decode, .* may take 0.5 s"):
        decode_on()
    assert budget.used_s > 0.499
    # A process takes longer than this to start: the timer of the budget ends it in the middle of a picture.
    short = DecodingBudget(0.001)
    picture_input.decoder.close()
    picture_input.decoder = ImageDecoder(processes=1)
    with pytest.raises(RequestError, match=r"a request may take 0.001 s; 0 of them"):
        picture_input.decoder.prepare([picture], rules, budget=short)
    assert picture_input.decoder.prepare([picture], rules, budget=DecodingBudget()).tiles == 1


def test_requests_take_turns_at_the_decoders(picture_input):
    """One with a single picture ends before any of those with forty that came first, one for each thread."""
    ended = []

    async def ask(count: int) -> None:
        shown = messages(*[png(24, 18, seed) for seed in range(count)])

        def render(split: list) -> str:
            ended.append(count)
            return picture_input.placeholders.mark * count

        await picture_input.read_in_turns(shown, render, DecodingBudget(60.0))

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, [40] * THREADS + [1]))

    asyncio.run(ask_all())
    assert ended == [1, *[40] * THREADS]


def test_a_decoder_serves_threads_in_the_order_in_which_they_came():
    """Also before the thread that has just had a picture decoded, and asks for the next at once."""
    decoder, served = ImageDecoder(processes=1), []
    rules, picture = open_checkpoint(tiny.folder("llava")).image_rules(), png(24, 18, 0)

    def ask(name: str) -> None:
        decoder.prepare([picture], rules)
        served.append(name)

    try:
        place, threads = decoder._take(), []
        for name in "abc":
            threads.append(threading.Thread(target=ask, args=name, daemon=True))
            threads[-1].start()
            deadline = time.monotonic() + 60
            while len(decoder._waiting) < len(threads) and time.monotonic() < deadline:
                time.sleep(0.002)
        decoder._give_back(place)
        ask("again")
        for thread in threads:
            thread.join(60)
        assert served == ["a", "b", "c", "again"]
    finally:
        decoder.close()


@pytest.mark.parametrize("name", ["gemma3", "qwen2-vl", "qwen3-vl"])
def test_the_runner_of_a_gpu_answers_the_same(name, monkeypatch):
    """By its references, which a CPU computes: spans over pages, a table of rotations for each token, deeper rows."""

    def runner(runnable, limits, *_):
        return GPURunner(runnable.model, limits, graphs=False)

    monkeypatch.setattr(start_module, "_runner", runner)
    asked = messages(png(*FIRST), tiny.photograph(*SECOND))
    with engine(name, num_gpu_blocks_override=96, max_num_batched_tokens=48) as llm:
        made = llm.chat([asked, messages(text="Hi")], GREEDY, use_tqdm=False)
    assert made[0].outputs[0].token_ids == expected(name)


def test_other_pictures_share_no_page_and_equal_ones_are_computed_once():
    with engine("llava", num_gpu_blocks_override=96) as llm:
        tower, calls = llm.serving.engine.engine.media, []
        encode = tower.encode
        tower.encode = lambda new: (calls.append(len(new)), encode(new))
        several = [messages(png(*size), text=text) for size in (FIRST, SECOND) for text in "ab"]
        four = llm.chat(several, FEW, use_tqdm=False)
        assert sum(calls) == 2
        stats = llm.serving.engine.stats()
        assert (stats.pictures, stats.pictures_found) == (2, 2)
        assert stats.tower_s > 0
        other = llm.chat(messages(png(61, 40, 5)), FEW, use_tqdm=False)[0]
        assert other.num_cached_tokens == 0
        assert four[0].outputs[0].token_ids != four[2].outputs[0].token_ids
        assert llm.serving.engine.engine.scheduler.queues.arena.held() == 0


def test_requests_wait_for_rows_and_are_answered_all_the_same():
    """An arena for two pictures, and six requests with one of their own each."""
    with engine("llava", num_gpu_blocks_override=200) as llm:
        asked = [messages(png(40, 40, seed)) for seed in range(6)]
        alone = [llm.chat(one, FEW, use_tqdm=False)[0].outputs[0].token_ids for one in asked]
        llm.serving.engine.engine.scheduler.queues.arena.rows = 2 * 16
        llm.serving.engine.engine.scheduler.queues.arena._spans.clear()
        llm.serving.engine.reset_prefix_cache()
        together = llm.chat(asked, FEW, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in together] == alone
        with pytest.warns(RuntimeWarning, match="the pictures have 48 tokens"):
            llm.chat(messages(*[png(40, 40, at) for at in range(3)]), GREEDY, use_tqdm=False)


def test_a_tower_that_fails_ends_its_requests_alone():
    with engine("llava", num_gpu_blocks_override=96) as llm:
        media = llm.serving.engine.engine.media
        encode, media.encode = media.encode, lambda new: 1 / 0
        with pytest.warns(RuntimeWarning, match="ended with an error"):
            failed = llm.chat(messages(png(*FIRST)), GREEDY, use_tqdm=False)[0]
        assert "ZeroDivisionError" in failed.outputs[0].error
        media.encode = encode
        again = llm.chat(messages(png(*FIRST)), GREEDY, use_tqdm=False)[0]
        assert again.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (messages(b"no picture"), "cannot be read"),
        (messages(text="look: <image>"), "holds <image>"),
        (messages("http://example.com/a.png"), "are not fetched"),
        (messages("data:image/png;base64,!!"), "not base64"),
        (messages(7), "is int"),
    ],
    ids=["bytes", "placeholder", "url", "data url", "number"],
)
def test_what_is_no_picture_is_refused(asked, why):
    with pytest.raises(RequestError, match=why):
        tiny_llm().chat(asked, GREEDY, use_tqdm=False)


@functools.cache
def tiny_llm() -> LLM:
    return engine("llava", num_gpu_blocks_override=96)


def test_what_a_model_that_sees_both_ways_cannot_have_is_refused_before_it_is_loaded(monkeypatch):
    monkeypatch.setattr(OpenModel, "load", None)
    model = str(tiny.folder("paligemma"))
    with pytest.raises(ConfigError, match="batch_invariant"):
        start(EngineConfig(model=model, device="cpu", batch_invariant=True))
    with pytest.raises(ConfigError, match="see each other both ways"):
        start(EngineConfig(model=model, device="cpu", kv_cache_dtype="fp8"))

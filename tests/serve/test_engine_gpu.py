"""The engine on a GPU: the fast forms against the plain ones and against the contiguous generator.

In bfloat16 two correct forms may choose differently between tokens that are almost equally likely. So tokens are
compared up to the first that differs, and there the reference must hold both for equally likely, within two steps of
bfloat16 at the size of its logits.
"""

import time

import pytest
import torch
from noisy_drafter import NoisyDrafter
from tiny_engines import prompt_of

from cairn.models.attend import Cached, KVCache
from cairn.models.build import ModelBuild
from cairn.models.export import export
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.runnable import open_model
from cairn.models.weights import random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine import two_batch_overlap
from cairn.serve.engine.pieces import Piece
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MOST = 40
LENGTHS = (1, 5, 64, 65, 200, 30, 128, 300)
SWITCHES = {
    "everything": {},
    "kernel by kernel": dict(enforce_eager=True),
    "plain": dict(plain=True),
    "chunked": dict(max_num_batched_tokens=96),
    "tight": dict(num_gpu_blocks_override=9, max_num_batched_tokens=512),
    "no prefixes": dict(enable_prefix_caching=False),
    "invariant": dict(batch_invariant=True),
}


@pytest.fixture(scope="module")
def loaded():
    opened = open_model("random:tiny")
    return opened, opened.load("cuda", "bfloat16")


def engine_of(loaded, **switches):
    opened, runnable = loaded
    config = EngineConfig(
        model="random:tiny", device="cuda", max_model_len=512, max_num_seqs=16, **switches
    )
    return start_with(opened, runnable, config).engine


def submit(engine, prompts, **params):
    settings = dict(temperature=0.0, max_tokens=MOST, ignore_eos=True) | params
    first = engine.scheduler.queues.arrivals
    requests = [Request(first + i, p, SamplingParams(**settings)) for i, p in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    return requests


@torch.inference_mode()
def logits_after(model, tokens):
    cache = KVCache(model.spec, len(tokens), model.embedding.weight.dtype, "cuda")
    attend = Cached([cache], [len(tokens)])
    hidden = model(torch.tensor(tokens, device="cuda"), attend.positions_T(), attend)
    return model.logits(hidden[-1:])[0].float()


def agrees(model, request):
    wanted = list(Generation(model, request.prompt, GenerateSampling(max_tokens=MOST), ()))
    assert len(request.outputs) == MOST, request.error
    for at, (ours, theirs) in enumerate(zip(request.outputs, wanted, strict=True)):
        if ours != theirs:
            scores = logits_after(model, [*request.prompt, *wanted[:at]])
            gap = float(scores[theirs] - scores[ours])
            assert gap <= 2 * 2**-7 * float(scores.abs().max()), (at, ours, theirs, gap)
            return


@pytest.mark.parametrize("name", SWITCHES)
def test_greedy_tokens(loaded, name):
    engine = engine_of(loaded, **SWITCHES[name])
    prompts = [prompt_of(n, seed=n) for n in LENGTHS]
    requests = submit(engine, [*prompts, prompts[4], [*prompts[4][:130], 3, 4]])
    engine.run()
    for request in requests:
        agrees(engine.runner.model, request)
    if name == "tight":
        assert sum(request.ledger.preemptions for request in requests)
    engine.scheduler.queues.check_integrity()


def test_again_through_graphs_that_are_captured_by_now(loaded):
    engine = engine_of(loaded)
    for seed in range(3):
        requests = submit(engine, [prompt_of(n, seed=seed + n) for n in LENGTHS])
        engine.run()
        for request in requests:
            agrees(engine.runner.model, request)


@pytest.mark.parametrize("eager", [False, True])
def test_a_prefix_that_all_share_is_read_once(loaded, eager):
    engine = engine_of(loaded, enforce_eager=eager)
    engine.runner.shared.worth = 1  # however little it is
    seen, mixed = [], []
    found, before = engine.runner.shared.tokens, engine.runner.shared.before
    engine.runner.shared.tokens = lambda requests: seen.append(found(requests)) or seen[-1]
    engine.runner.shared.before = lambda chunks: mixed.append(before(chunks)) or mixed[-1]
    shared = prompt_of(200, seed=5)
    requests = submit(engine, [[*shared, *prompt_of(n, seed=n)] for n in (3, 40, 1, 90, 17)])
    for _ in range(4):
        engine.step()
    requests += submit(engine, [[*shared, *prompt_of(n, seed=n)] for n in (5, 33)])
    engine.run()
    assert set(seen) == {192}  # three pages of 64, in every step of decoding
    assert mixed[-1] == 192  # and where prompts come behind them
    for request in requests:
        agrees(engine.runner.model, request)
    engine.scheduler.queues.check_integrity()


def test_two_halves_at_once(monkeypatch):
    """One half's attention beside the other's products, in graphs and kernel by kernel."""
    monkeypatch.setattr(two_batch_overlap, "FEWEST", 16)
    opened = open_model("random:qwen3-0.6b")
    runnable = opened.load("cuda", "bfloat16")
    for eager in (False, True):
        config = EngineConfig(
            model="random:qwen3-0.6b",
            device="cuda",
            max_model_len=512,
            max_num_seqs=48,
            num_gpu_blocks_override=300,
            enforce_eager=eager,
        )
        engine = start_with(opened, runnable, config).engine
        assert engine.runner.halves is not None
        requests = submit(engine, [prompt_of(20 + 7 * n, seed=n) for n in range(45)])
        engine.run()
        for request in requests[:: 20 if eager else 8]:
            agrees(engine.runner.model, request)
        engine.scheduler.queues.check_integrity()


def test_seeds_and_the_special_parameters(loaded):
    """The same seed, the same tokens, in a crowd and alone, beside requests that need more than the graph samples."""
    mine = prompt_of(40, seed=9)
    ask = dict(temperature=1.0, top_k=50, top_p=0.9, seed=7)
    engine = engine_of(loaded, batch_invariant=True)
    [alone] = submit(engine, [mine], **ask)
    engine.run()
    crowd = submit(
        engine,
        [prompt_of(20 + n, seed=n) for n in range(5)],
        temperature=0.8,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
    )
    [again] = submit(engine, [mine], **ask)
    [biased] = submit(engine, [mine], logit_bias={17: 100.0}, logprobs=3)
    outputs = engine.run()
    assert again.outputs == alone.outputs
    assert biased.outputs == [17] * MOST
    assert all(out.logprobs for out in outputs if out.request is biased)
    for request in crowd:
        repeats = MOST - len(set(request.outputs))
        assert repeats < MOST // 2


def test_invariance_is_bitwise(loaded):
    mine = prompt_of(77, seed=5)
    heard = []
    for others in ([], [prompt_of(n, seed=n) for n in (3, 100, 260, 31, 64)]):
        engine = engine_of(loaded, batch_invariant=True)
        submit(engine, others, temperature=0.7)
        [request] = submit(engine, [mine], logprobs=4)
        heard.append([(o.tokens, o.logprobs) for o in engine.run() if o.request is request])
    assert heard[0] == heard[1]


def test_logprobs_of_prompt_and_answer(loaded):
    engine = engine_of(loaded, max_num_batched_tokens=64)
    prompt = prompt_of(150, seed=2)
    [request] = submit(engine, [prompt], logprobs=2, prompt_logprobs=1, max_tokens=4)
    outputs = engine.run()
    found = engine.prompt_logprobs.pop(request)
    assert len(found) == len(prompt) - 1
    for at in (0, 70, 148):
        exact = logits_after(engine.runner.model, prompt[: at + 1]).log_softmax(-1)
        assert found[at].logprob == pytest.approx(float(exact[prompt[at + 1]]), abs=0.1)
    assert all(s.top[0][1] >= s.logprob for out in outputs for s in out.logprobs or [])


def test_out_of_memory_in_a_step_ends_its_requests_alone(loaded, monkeypatch):
    engine = engine_of(loaded)
    launch = engine.runner.launch
    failed = []

    def sometimes(step):
        if not failed and step.number == 3:
            failed.append(step)
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return launch(step)

    monkeypatch.setattr(engine.runner, "launch", sometimes)
    lost = submit(engine, [prompt_of(30, seed=1)])
    engine.run()
    assert lost[0].finish == "error"
    assert "OutOfMemoryError" in lost[0].error
    [fine] = submit(engine, [prompt_of(30, seed=2)])
    engine.run()
    agrees(engine.runner.model, fine)


@pytest.mark.parametrize("name", ["random:tiny-gemma3", "random:gemma-3-270m"])
@pytest.mark.parametrize(
    "switches",
    [{}, {"enforce_eager": True}, {"cache_groups": False}, {"batch_invariant": True}],
    ids=str,
)
def test_windows_that_free_their_pages(name, switches):
    """Through graphs and without: tokens behind windows that have moved on, chunks, hits and preemptions included."""
    opened = open_model(name)
    loaded = opened, opened.load("cuda", "bfloat16")
    length = min(opened.spec.context, 2048) - MOST
    config = EngineConfig(
        model=name,
        device="cuda",
        max_model_len=length + MOST,
        max_num_seqs=8,
        block_size=16,
        max_num_batched_tokens=96 if length < 500 else 768,
        num_gpu_blocks_override=4096,
        **switches,
    )
    engine = start_with(*loaded, config).engine
    whole = [token % opened.spec.vocab for token in prompt_of(length, seed=5)]
    requests = submit(engine, [whole, whole[3:10], whole[: length // 2]])
    engine.run()
    requests += submit(
        engine, [[*whole[: length // 2], 3, 4], [*requests[2].prompt, *requests[2].outputs, 9]]
    )
    engine.run()
    for request in requests:
        agrees(engine.runner.model, request)
    assert requests[-1].cached >= length // 2 // 16 * 16
    blocks = engine.scheduler.blocks
    assert blocks.windowed == switches.get("cache_groups", True)
    engine.scheduler.queues.check_integrity()
    assert blocks.usage().used == 0


@pytest.mark.parametrize(
    "how", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 96}], ids=str
)
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_through_graphs_change_no_token(loaded, drafts, how):
    """A step of k + 1 tokens for each row, captured; lengths and last tokens of the rows stay on the device.

    Two correct forms may differ in bfloat16, so a run without drafts is compared by `agrees`, which allows for that;
    the drafter knows the answers of such a run, with an error in every fifth.
    """
    prompts = [prompt_of(n, seed=n) for n in LENGTHS]
    plain = engine_of(loaded, **how)
    known = submit(plain, prompts)
    plain.run()
    answers = {request.id: request.outputs for request in known}
    opened, runnable = loaded
    config = EngineConfig(
        model="random:tiny", device="cuda", max_model_len=512, max_num_seqs=16, **how
    )
    drafter = NoisyDrafter(answers, 0.8, runnable.model.spec.vocab, whole=True)
    engine = start_with(opened, runnable, config, drafter=drafter, drafts=drafts).engine
    for _ in range(2):  # the second time through graphs that are captured by now
        requests = submit(engine, prompts)
        drafter.answers = {request.id: answers[at] for at, request in enumerate(requests)}
        engine.run()
        for request in requests:
            agrees(engine.runner.model, request)
    speculation = engine.scheduler.speculation
    assert speculation.counts.accepted > 0.3 * speculation.counts.drafted > 0
    if not how:
        shapes = [shape for shape in engine.runner.graphs._captured if shape.layout.verifies]
        assert any(shape.layout.max_query == 1 + drafts for shape in shapes)
    engine.scheduler.queues.check_integrity()


def test_drafts_and_the_special_parameters(loaded):
    """Batch-invariant, so that the same request alone and with drafts gives the same tokens, bit by bit."""
    prompts = [prompt_of(n, seed=n) for n in (9, 40, 70)]
    kinds = [
        dict(temperature=1.0, top_k=50, seed=7),
        dict(repetition_penalty=1.3, frequency_penalty=0.4),
        dict(logit_bias={17: 4.0}, min_tokens=5, logprobs=2),
    ]
    plain = engine_of(loaded, batch_invariant=True)
    wanted = [
        submit(plain, [prompt], **kind)[0] for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    plain.run()
    opened, runnable = loaded
    config = EngineConfig(
        model="random:tiny", device="cuda", max_model_len=512, max_num_seqs=16, batch_invariant=True
    )
    drafter = NoisyDrafter(
        {r.id: r.outputs for r in wanted}, 0.8, runnable.model.spec.vocab, whole=True
    )
    engine = start_with(opened, runnable, config, drafter=drafter, drafts=3).engine
    found = [
        submit(engine, [prompt], **kind)[0] for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    engine.run()
    assert [r.outputs for r in found] == [r.outputs for r in wanted]


@pytest.mark.parametrize("speculate", ["ngram", "suffix"])
def test_drafters_that_are_served_change_no_token(loaded, speculate):
    """The same questions twice, so that finished answers are known; through graphs, in the overlapped loop."""
    prompts = [prompt_of(n, seed=n) * 2 for n in (9, 40, 70)]
    answers = {}
    for who in ("off", speculate):
        engine = engine_of(loaded, batch_invariant=True, speculate=who, draft_tokens=4)
        for _ in range(2):
            requests = submit(engine, prompts, max_tokens=48)
            requests += submit(engine, prompts[:1], max_tokens=48, repetition_penalty=1.2)
            engine.run()
        answers[who] = [request.outputs for request in requests]
    assert answers[speculate] == answers["off"]
    counts = engine.scheduler.speculation.counts
    assert 0 < counts.accepted <= counts.drafted
    assert any(shape.layout.verifies for shape in engine.runner.graphs._captured)


def test_a_head_drafts_in_graphs_what_it_drafts_kernel_by_kernel(loaded):
    """With random weights: other drafts would change no token, so the drafts are compared themselves."""
    prompts = [prompt_of(n, seed=n) for n in (9, 70)]
    answers, drafts = {}, {}
    for how in ("off", "graphs", "eager"):
        who = "off" if how == "off" else "random:eagle3"
        torch.manual_seed(0)
        engine = engine_of(
            loaded,
            speculate=who,
            draft_tokens=3,
            batch_invariant=True,
            enforce_eager=how == "eager",
        )
        seen = drafts[how] = []
        if engine.scheduler.speculation is not None:
            settle = engine.scheduler.speculation.accept
            engine.scheduler.speculation.accept = (
                lambda request, drawn, own, seen=seen, settle=settle: (
                    seen.append((request.id, len(request.outputs), *own))
                    or settle(request, drawn, own)
                )
            )
        requests = submit(engine, prompts, max_tokens=24)
        engine.run()
        answers[how] = [request.outputs for request in requests]
    assert answers["graphs"] == answers["eager"] == answers["off"]
    assert len(set(drafts["graphs"])) > 20
    same = set(drafts["graphs"]) & set(drafts["eager"])
    assert len(same) > 0.8 * len(set(drafts["graphs"]))


def test_new_weights_go_where_the_graphs_look(loaded, tmp_path):
    """Captured graphs keep addresses: after a change in place they compute with the new numbers."""
    opened, _ = loaded
    runnable = opened.load("cuda", "bfloat16")  # its own: others must not see its weights change
    other = random_model(opened.spec, ModelBuild("cpu", torch.bfloat16), seed=1)
    export(other, tmp_path / "new")
    engine = engine_of((opened, runnable))
    prompts = [prompt_of(n, seed=n) for n in LENGTHS]
    submit(engine, prompts)
    engine.run()
    addresses = [parameter.data_ptr() for parameter in runnable.model.parameters()]
    engine.load_weights(1, str(tmp_path / "new"))
    assert [parameter.data_ptr() for parameter in runnable.model.parameters()] == addresses
    requests = submit(engine, prompts)
    engine.run()
    assert all(request.cached == 0 for request in requests)
    for request in requests:
        agrees(other.to("cuda"), request)


def test_pieces_through_graphs(loaded):
    """Rows of the arena beside looked-up tokens, against the plain form on the same device."""
    outputs = []
    for how in ({}, {"plain": True}):
        opened, runnable = loaded
        config = EngineConfig(
            model="random:tiny", device="cuda", max_model_len=512, max_num_seqs=16, **how
        )
        engine = start_with(opened, runnable, config, arena_rows=128).engine
        rows = torch.randn(40, opened.spec.hidden, generator=torch.Generator().manual_seed(0))
        row, _ = engine.scheduler.queues.arena.hold(b"picture", 40)
        engine.runner.write_piece(row, rows.to("cuda", torch.bfloat16))
        prompt = [*prompt_of(5, 1), *[3] * 40, *prompt_of(20, 2)]
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
        request = Request(1, prompt, params, pieces=[Piece(5, 40, b"picture")], piece_rows=[row])
        engine.add(request)
        (output,) = [output for output in engine.run() if output.request is request]
        outputs.append(dict(output.logprobs[0].top))
        runnable.model.arena_RD = None
    shared = outputs[0].keys() & outputs[1].keys()
    assert len(shared) >= 3
    assert all(abs(outputs[0][token] - outputs[1][token]) < 0.1 for token in shared)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_pages_come_back_from_pinned_host_memory(loaded, dtype):
    """Behind a prefix from the host an answer is what it is behind the same prefix on the device."""
    host = dict(kv_offload_host="64MiB", num_gpu_blocks_override=9, kv_cache_dtype=dtype)
    engine = engine_of(loaded, **host)
    engine.tiers.compute = lambda first, last: 1e3 * (last - first)  # loading is always the fastest
    prompt = prompt_of(300, seed=1)
    submit(engine, [prompt])
    engine.run()
    (here,) = submit(engine, [prompt])
    engine.run()
    submit(engine, [prompt_of(300, seed=seed) for seed in range(2, 6)])
    engine.run()
    (back,) = submit(engine, [prompt])
    engine.run()
    assert (here.cached, here.ledger.host_tokens) == (256, 0)
    assert (back.cached, back.ledger.host_tokens) == (256, 256)
    assert back.outputs == here.outputs


def test_pages_come_from_the_pinned_memory_of_another_engine(loaded):
    small = dict(kv_offload_host="64MiB", num_gpu_blocks_override=9)
    first = engine_of(loaded, **small, kv_offload_share="127.0.0.1:0")
    first.tiers.compute = lambda first, last: (
        1e3 * (last - first)
    )  # so that pages are worth storing
    prompt = prompt_of(300, seed=1)
    submit(first, [prompt])
    first.run()
    (here,) = submit(first, [prompt])
    first.run()
    first.tiers.settle()
    second = engine_of(loaded, **small, kv_offload_peers=first.tiers.shared.address)
    second.tiers.compute = lambda first, last: 1e3 * (last - first)
    ends = time.monotonic() + 60
    while len(second.tiers.disk) < 256 // second.scheduler.limits.page_size:
        assert time.monotonic() < ends
        time.sleep(0.01)
    (fetched,) = submit(second, [prompt])
    second.run()
    assert (fetched.cached, fetched.ledger.disk_tokens) == (256, 256)
    assert fetched.outputs == here.outputs
    for engine in (second, first):
        engine.tiers.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it does not see everything
def test_no_launch_waits_for_the_device(loaded):
    """Whoever is admitted, and whatever is asked for: a step is launched while the one before it computes."""
    engine = engine_of(loaded)
    kinds = [
        {},
        {"logprobs": 5},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 1.0, "presence_penalty": 0.5},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 3, "ignore_eos": False},
    ]
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    for how in kinds * 2:
        submit(engine, prompts, max_tokens=6, **how)
    launch = engine.runner.launch

    def watched(step):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.launch = watched
    assert not [output.request.error for output in engine.run() if output.request.error]

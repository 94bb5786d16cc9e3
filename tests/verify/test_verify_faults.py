"""Planted faults are named; healthy deployments are left alone."""

import functools
import math
import random
from types import SimpleNamespace

import msgspec
import pytest
import torch
from msgspec import structs
from planted import TINY, WINDOW, SharedPlainPath, copy, quantised, windowed

from cairn.models.build import ModelBuild
from cairn.models.rope import Rotation
from cairn.models.runnable import open_model
from cairn.models.spec import ModelSpec, Rope
from cairn.models.weights import random_model
from cairn.serve.llm import LLM
from cairn.verify import plain_path
from cairn.verify.ask import from_engine, probes_of
from cairn.verify.check import ModelCheck
from cairn.verify.evidence import ModelEvidence, Observation
from cairn.verify.explain import fit
from cairn.verify.hypotheses import of_spec, of_weights
from cairn.verify.plain_path import PlainPath, rounded, score, with_rounded_inputs, with_spec
from cairn.verify.probes import CHAT

ALPACA = "{% for m in messages %}### Instruction:\n{{ m.content }}\n\n{% endfor %}### Response:\n"


@functools.lru_cache(
    maxsize=4
)  # cairn-tiny, which most tests ask about, and the folders of one test
def opened(folder):
    model = open_model(str(folder))
    return model, SharedPlainPath(model.checkpoint.load("cpu", torch.float32))


def observed(served, claimed, bits=None, run=None):
    """What a server would say that computes the one folder and is asked about the other: texts, and its own chat."""
    model, path = opened(served)
    if run is None:
        run = path.model if bits is None else rounded(path.model, bits)
    said = []
    for probe in probes_of(*_claims(claimed)):
        if probe.name in ("code", "numbers"):
            continue  # the other texts do
        ids = list(probe.ids)
        own = model.tokenizer.encode_chat(CHAT) if probe.name == "chat" else list(ids)
        answer = greedy(run, own, probe.answer if probe.name == "chat" else 0)
        scored = score(run, [*own, *answer], probe.first if answer == [] else len(own))
        said.append(Observation(probe.name, [*ids, *answer], probe.first, rows_of(scored)))
    return ModelEvidence(model="served", source="a test", observations=said)


def rows_of(logprobs_RV):
    top = logprobs_RV.topk(5)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [dict(zip(*pair, strict=True)) for pair in pairs]


def _claims(folder):
    model, _ = opened(folder)
    return model.spec, model.tokenizer


def greedy(model, ids, count):
    answer = []
    for _ in range(count):
        answer.append(int(score(model, [*ids, *answer, 0], len(ids) + len(answer))[-1].argmax()))
    return answer


def judged(claimed, evidence, expected="bfloat16"):
    model, path = opened(claimed)
    return ModelCheck(path, model.spec, model.tokenizer).verdict(evidence, expected)


@pytest.mark.parametrize(
    ("config", "name", "says"),
    [
        ({"rms_norm_eps": 1e-5}, "norm epsilon", "1e-05 instead of 1e-06"),
        ({"rope_theta": 500_000.0}, "rope base", "500000 instead of 10000"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope factor", "2 (linear)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope factor", "4 (yarn)"),
    ],
)
def test_a_changed_config_is_named(config, name, says, tmp_path):
    served = copy(tmp_path / "served", config)
    verdict = judged(TINY, observed(served, TINY))
    assert verdict.status == "differs"
    assert [one.name for one in verdict.findings] == [name]
    assert says in verdict.findings[0].says
    assert verdict.findings[0].explained > 0.9


@pytest.mark.parametrize(
    ("config", "name", "says"),
    [
        ({"rms_norm_eps": 1e-4}, "norm epsilon", "0.0001"),
        ({"rope_theta": 8e6}, "rope base", "1e+07"),
    ],
)
def test_a_value_that_nobody_listed_is_named_by_the_nearest(config, name, says, tmp_path):
    verdict = judged(TINY, observed(copy(tmp_path / "served", config), TINY))
    assert [one.name for one in verdict.findings] == [name]
    assert says in verdict.findings[0].says


@pytest.mark.parametrize(
    "name", ["rope pairs", "rope halves", "shared heads", "gate and up", "last norm", "head"]
)
def test_weights_where_they_do_not_belong_are_named(name, monkeypatch):
    """Each mistake is made by other means than the one that verification computes it with."""
    model, path = opened(TINY)
    spec, tokenizer, run = model.spec, model.tokenizer, path.model
    state = dict(run.state_dict())
    if name == "rope pairs":
        monkeypatch.setattr(Rotation, "__call__", rotated_neighbours)
    elif name == "rope halves":  # as llama.cpp's converter orders them for its own rotation
        for key in [key for key in state if ".qkv.q." in key or ".qkv.k." in key]:
            rows, columns = state[key].shape
            w_KHCD = state[key].view(rows // spec.head_dim, 2, spec.head_dim // 2, columns)
            state[key] = w_KHCD.swapaxes(1, 2).reshape(rows, columns)
        for key in [key for key in state if "q_norm" in key or "k_norm" in key]:
            state[key] = state[key].view(2, -1).t().flatten()
        run = with_spec(run, spec, state)
    elif name == "shared heads":  # a model in which every head has keys of its own, tiled
        for key in [key for key in state if ".qkv.k." in key or ".qkv.v." in key]:
            state[key] = state[key].repeat(spec.heads // spec.kv_heads, 1)
        run = with_spec(run, structs.replace(spec, kv_heads=spec.heads), state)
    elif name == "gate and up":
        run = with_spec(run, spec)
        for layer in run.layers:
            inner = layer.feed_forward.inner
            inner.gate, inner.up = inner.up, inner.gate
    elif name == "last norm":
        run = with_spec(run, spec)
        run.norm.weight = torch.nn.Parameter(torch.ones(spec.hidden))
    else:
        noise = torch.randn(spec.vocab, spec.hidden, generator=torch.Generator().manual_seed(0))
        state["head.weight"] = state["embedding.weight"] + 0.05 * noise
        path = PlainPath(with_spec(run, structs.replace(spec, tied=False), state))
    ids = probes_of(spec, tokenizer)[0].ids[:48]
    rows = rows_of(score(run, ids, 1))
    monkeypatch.undo()
    seen = ModelEvidence(model="m", source="s", observations=[Observation("prose", ids, 1, rows)])
    verdict = ModelCheck(path, path.model.spec, tokenizer).verdict(seen, "bfloat16")
    assert [(one.name, round(one.explained, 2)) for one in verdict.findings] == [(name, 1.0)]


def rotated_neighbours(rotation, x_THC):
    cos_T1c, sin_T1c = (table.chunk(2, dim=-1)[0] for table in (rotation.cos_T1C, rotation.sin_T1C))
    even, odd = x_THC[..., 0::2], x_THC[..., 1::2]
    pairs = (even * cos_T1c - odd * sin_T1c, odd * cos_T1c + even * sin_T1c)
    return torch.stack(pairs, dim=-1).flatten(-2)


def test_a_window_that_is_off_by_one_is_named(tmp_path):
    claimed = windowed(tmp_path / "claimed", WINDOW)
    served = windowed(tmp_path / "served", WINDOW - 1)
    verdict = judged(claimed, observed(served, claimed))
    assert [one.name for one in verdict.findings] == ["window"]
    assert "too narrow" in verdict.says


@pytest.mark.parametrize("rotates_apart", [False, True])
def test_what_no_window_hides_is_read_once_and_changes_nothing(rotates_apart, tmp_path):
    """The text behind a kept beginning scores as the whole text does, under each window and rounding."""
    claimed = windowed(tmp_path / "claimed", 80)
    model, path = opened(claimed)
    if rotates_apart:  # layers with a window, as those of Gemma 3
        own = msgspec.structs.replace(model.spec, rope_local=Rope(theta=1000.0))
        path = PlainPath(with_spec(path.model, own))
    long = next(one for one in observed(claimed, claimed).observations if one.probe == "long")
    told = [one for one in of_spec(path.model.spec) if one.name == "window"]
    assert len(told) == 4
    for one in [*told, *of_weights()]:
        [found] = path.expected([long], one)
        scored = score(path._under(one), long.ids, long.first)
        for row, scored_V in zip(found.rows, scored, strict=True):
            for token, value in row.items():
                assert abs(value - float(scored_V[token])) < 1e-4, one.says
    assert path._prefix is not None


def test_another_chat_template_is_named_and_the_model_is_not_blamed(tmp_path):
    served = copy(tmp_path / "served", template=ALPACA)
    verdict = judged(TINY, observed(served, TINY))
    texts, chat = verdict.parts
    assert texts.finding is None
    assert chat.finding.name == "chat template"
    assert "Alpaca" in chat.finding.says
    assert "closest" not in chat.finding.says


def test_other_weights_are_said_once(tmp_path):
    """Nothing on the list explains them, neither in the texts nor in the chat."""
    model, path = opened(TINY)
    run = with_spec(path.model, model.spec)
    run.layers[3], run.layers[7] = run.layers[7], run.layers[3]
    verdict = judged(TINY, observed(TINY, TINY, run=run))
    assert verdict.status == "differs"
    assert len(verdict.parts) == 2
    assert verdict.says.count("causes explains it") == 1


def test_a_scaling_that_is_left_out_leaves_the_rest_of_rope_as_it_was():
    spec = ModelSpec(
        "llama", 100, 64, 2, 4, 2, 16, 96, 64, rope=Rope(kind="yarn", factor=4.0, rotated=8)
    )
    [plain] = [one for one in of_spec(spec) if "left out" in one.says]
    assert plain.spec.rope == Rope(rotated=8)


def test_four_bits_for_sixteen_are_named(tmp_path):
    served = quantised(tmp_path / "served", 4)
    evidence = observed(served, TINY)
    verdict = judged(TINY, evidence)
    assert [one.name for one in verdict.findings] == ["quantisation"]
    assert "4 bits" in verdict.says
    assert judged(TINY, evidence, "int4").status == "agrees"


def test_activations_in_eight_bits_are_how_a_quantised_file_is_computed(tmp_path, monkeypatch):
    """Its weights do not change when they are rounded again, so they say nothing about how far off products may be."""
    monkeypatch.setattr(plain_path, "saturates", lambda: True)  # the same whatever this CPU has
    folder = quantised(tmp_path / "served", 4, group=32)
    evidence = observed(folder, folder, run=with_rounded_inputs(opened(folder)[1].model))
    evidence.observations[:] = [one for one in evidence.observations if one.probe != "chat"]
    verdict = judged(folder, evidence, "int8")
    assert (verdict.status, verdict.findings) == ("agrees", [])
    assert "8-bit weights or activations" in verdict.says
    assert judged(folder, evidence).status == "differs"  # where 16 bits were promised


def test_a_fault_is_named_beneath_bfloat16_rounding(tmp_path):
    served = copy(tmp_path / "served", {"rope_theta": 500_000.0})
    verdict = judged(TINY, observed(served, TINY, "bfloat16"))
    assert [one.name for one in verdict.findings] == ["rope base"]


@pytest.mark.parametrize("missing", [False, True])
def test_a_begin_of_text_that_is_missing_is_named(missing):
    """Of a model whose tokenizer begins texts with one; one that is there is no fault, in bfloat16 either."""
    (model, path), bos = opened(TINY), 3
    ids = [bos, *probes_of(*_claims(TINY))[0].ids]
    run = path.model if missing else rounded(path.model, "bfloat16")
    rows = [{}, *rows_of(score(run, ids[1:], 1))] if missing else rows_of(score(run, ids, 1))
    seen = ModelEvidence(model="m", source="s", observations=[Observation("prose", ids, 1, rows)])
    tokenizer = SimpleNamespace(bos_id=bos, encode=lambda text: [bos, 5])
    verdict = ModelCheck(path, model.spec, tokenizer).verdict(seen, "bfloat16")
    assert verdict.status == ("differs" if missing else "agrees")
    assert [one.says for one in verdict.findings] == (
        ["the begin-of-text token is missing"] if missing else []
    )


@pytest.mark.parametrize("faulty", [True, False])
def test_a_cause_that_rounding_hides_is_named_by_its_direction(faulty):
    """Its effect is two thirds of the rounding; as much rounding alone is no such cause."""
    chance = random.Random(1)
    shifts = [chance.choice((-0.02, 0.02)) for _ in range(144)]
    seen = [0.5 + faulty * shift + chance.gauss(0, 0.03) for shift in shifts]
    plain, under = [0.5] * 144, [0.5 + shift for shift in shifts]
    texts = [
        [Observation("prose", list(range(145)), 1, [{0: math.log(p)} for p in one])]
        for one in (seen, plain, under)
    ]
    cause = next(one for one in of_spec(small_spec(0)) if one.name == "norm epsilon")
    found = fit(cause, *texts)
    assert found.explained < 0.5
    assert found.named is faulty
    assert not fit(next(of_weights()), *texts).named  # rounded weights lean one way as well


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_computes_the_model(dtype):
    with LLM(str(TINY), max_num_seqs=4, num_gpu_blocks_override=64, dtype=dtype) as llm:
        evidence = from_engine(llm, probes_of(*_claims(TINY)))
    verdict = judged(TINY, evidence)
    assert verdict.status == "agrees"
    assert verdict.findings == []
    assert verdict.parts[0].places > 400
    if dtype == "float32":
        assert verdict.tried == 0


def test_fifty_healthy_runs_raise_no_alarm():
    """Models of random shapes, rounded in ways that are allowed: nothing is named, whatever the seed."""
    for seed in range(50):
        spec = small_spec(seed)
        path = PlainPath(random_model(spec, ModelBuild("cpu", torch.float32), seed).eval())
        with torch.no_grad():
            for parameter in path.model.parameters():
                parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
        bits = (None, "bfloat16", "int8")[seed % 3]
        run = path.model if bits is None else rounded(path.model, bits)
        chance = torch.Generator().manual_seed(seed)
        ids = torch.randint(spec.vocab, (40,), generator=chance).tolist()
        seen = Observation("prose", ids, 1, rows_of(score(run, ids, 1)))
        seen = ModelEvidence(model="m", source="s", observations=[seen])
        verdict = ModelCheck(path, spec, None).verdict(
            seen, "int8" if bits == "int8" else "bfloat16"
        )
        assert verdict.status == "agrees", (seed, bits, verdict.says)


def small_spec(seed):
    return ModelSpec(
        family="llama",
        vocab=97 + seed,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        context=64,
        norm_eps=(1e-5, 1e-6)[seed % 2],
        rope=Rope(theta=(10_000.0, 500_000.0)[seed // 2 % 2]),
        windows=() if seed % 4 else (8, 8),
    )

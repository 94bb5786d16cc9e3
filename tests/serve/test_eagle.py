"""EAGLE-3 heads: both formats of their files, drafts of the engine against a pass over the whole text, and answers."""

import json

import msgspec
import pytest
import shared_data
import torch
from safetensors.torch import load_file, save_file
from tiny_engines import VOCABULARY, at_rest, greedy, model, prompt_of, submit, tiny_engine

from cairn.core.errors import ConfigError, UnsupportedModel
from cairn.kernels.cpu import compiled
from cairn.models import eagle
from cairn.models.attend import Cached, KVCache
from cairn.models.build import ModelBuild
from cairn.models.family_config import config_of
from cairn.models.runnable import open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.speculate.head_drafts import HeadDrafts
from cairn.serve.engine.start import start

FAMILY = "llama"
DRAFTS = 3
KNOWN = 150  # tokens of the head's vocabulary


def make_head(number: int | None = None, **changed) -> eagle.EagleHead:
    """With random weights, whose guesses vary."""
    target = model(FAMILY).spec
    spec = msgspec.structs.replace(eagle.random_spec(target), draft_vocab=KNOWN, **changed)
    head = eagle.EagleHead(spec, ModelBuild("cpu"), target.layers if number is None else number)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
        head.d2t.copy_(torch.arange(KNOWN) % (VOCABULARY - KNOWN))
    return head.requires_grad_(False)


def write(head: eagle.EagleHead, folder, kind: str):
    target = model(FAMILY).spec
    layer = "midlayer" if kind == "original" else "layers.0"
    parameters = dict(head.named_parameters())
    tensors = {
        eagle._file_name(slot.name, layer): parameters[slot.parameter][slot.index].clone()
        for slot in head.slots()
    }
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[torch.arange(KNOWN) + head.d2t] = True
    tensors |= {"d2t": head.d2t.clone(), "t2d": known}
    described = config_of(head.spec.layer) | {"vocab_size": VOCABULARY}
    numbers = [tap + 1 for tap in head.spec.taps]
    own = {
        "draft_vocab_size": KNOWN,
        "norm_before_residual": head.spec.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": numbers,
    }
    if kind == "original":
        config = described | own | {"architectures": ["LlamaForCausalLMEagle3"]}
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": described,
            "target_hidden_size": target.hidden,
            **own,
        }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["original", "speculators"])
@pytest.mark.parametrize("before", [False, True])
def test_both_formats_give_the_same_head(tmp_path, kind, before):
    written = make_head(norm_before_residual=before)
    read = eagle.load_head(write(written, tmp_path, kind), model(FAMILY).spec, ModelBuild("cpu"))
    assert read.spec.taps == written.spec.taps
    assert (read.spec.norm_before_residual, read.spec.draft_vocab) == (before, KNOWN)
    wanted = written.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read.state_dict().items())


@torch.inference_mode()
def drafts_behind(text: list[int]) -> list[int]:
    """By one pass over the whole text; its last token is not computed by the target."""
    net, head = model(FAMILY), make_head(number=0)
    weight = net.embedding.weight
    attend = Cached([KVCache(net.spec, len(text), weight.dtype, weight.device)], [len(text) - 1])
    tokens = torch.tensor(text)
    _, tapped = net.tapped(tokens[:-1], attend.positions_T(), attend, head.spec.taps)
    cache = KVCache(head.spec.layer, len(text) + DRAFTS, weight.dtype, weight.device)
    following, g_TD, found = tokens[1:], head.fuse(tapped), []
    while len(found) < DRAFTS:
        attend = Cached([cache], [len(following)])
        h_TD, normed_TD = head.passed(net.embedding(following), g_TD, attend.positions_T(), attend)
        attend.commit()
        following, g_TD = head.likeliest(normed_TD[-1:]).long(), h_TD[-1:]
        found.append(int(following))
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_drafts_as_a_pass_over_the_whole_text_does(tmp_path, monkeypatch, overlap):
    """In chunks, over pages, behind drafts that held and did not; where the pages have room for all passes."""
    folder = write(make_head(), tmp_path, "speculators")
    engine = tiny_engine(
        FAMILY, speculate=str(folder), draft_tokens=DRAFTS, overlap=overlap, budget=24
    )
    seen = []
    settle = engine.scheduler.speculation.accept

    def note(request, drawn, drafts):
        run = settle(request, drawn, drafts)
        seen.append(([*request.prompt, *request.outputs], list(drafts)))
        return run

    engine.scheduler.speculation.accept = note
    prompts = [prompt_of(40, seed=3), prompt_of(7, seed=1)]
    requests = submit(engine, prompts, max_tokens=20)
    engine.run()
    assert [r.outputs for r in requests] == [greedy(FAMILY, p, 20) for p in prompts]
    compared = [
        (drafts, drafts_behind(text))
        for text, drafts in seen
        if drafts and (len(text) - 2) % 16 + DRAFTS <= 16
    ]
    assert len(compared) > 15
    assert all(found == wanted[: len(found)] for found, wanted in compared)
    at_rest(engine)


def test_a_head_of_another_model_is_refused(tmp_path):
    folder = write(make_head(), tmp_path, "original")
    config = json.loads((folder / "config.json").read_text())
    for change, what in (
        ({"target_hidden_size": 99}, "99 wide"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 900]}, "900"),
        ({"head_dim": 8}, "heads of 8 columns"),
        ({"norm_output": True}, "norm_output"),
        ({"intermediate_size": 40}, "configuration says"),
        ({"vocab_size": VOCABULARY + 1}, f"vocabulary of {VOCABULARY + 1} tokens"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=what):
            eagle.load_head(folder, model(FAMILY).spec, ModelBuild("cpu"))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for d2t, what in (
        (torch.full((KNOWN,), VOCABULARY - KNOWN + 1), f"guesses token {VOCABULARY}"),
        (torch.zeros(KNOWN + 1, dtype=torch.int64), f"{KNOWN + 1} entries"),
    ):
        save_file(tensors | {"d2t": d2t}, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=what):
            eagle.load_head(folder, model(FAMILY).spec, ModelBuild("cpu"))


def test_rotary_positions_are_read_in_both_spellings(tmp_path):
    folder = write(make_head(), tmp_path, "speculators")
    config = json.loads((folder / "config.json").read_text())
    described = config["transformer_layer_config"]
    del described["rope_theta"]
    described["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    (folder / "config.json").write_text(json.dumps(config))
    read = eagle.load_head(folder, model(FAMILY).spec, ModelBuild("cpu"))
    assert read.spec.layer.rope.theta == 5e5


def test_a_saved_head_is_read_back(tmp_path):
    head = make_head()
    eagle.save_head(head, tmp_path / "head", VOCABULARY, "llama")
    read = eagle.load_head(tmp_path / "head", model(FAMILY).spec, ModelBuild("cpu"))
    assert (read.spec.taps, read.spec.draft_vocab) == (head.spec.taps, KNOWN)
    wanted = head.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read.state_dict().items())


@pytest.mark.parametrize(
    ("family", "how", "what"),
    [("gemma3", {}, "windows"), (FAMILY, dict(invariant=True), "batch_invariant")],
)
def test_where_a_head_does_not_serve_it_says_why(family, how, what):
    with pytest.raises(ConfigError, match=what):
        tiny_engine(family, speculate="random:eagle3", **how)


def test_a_random_draft_model_is_no_head():
    with pytest.raises(ConfigError, match="cannot draft for"):
        tiny_engine(FAMILY, speculate="random:tiny")


def test_the_head_that_comes_with_cairn_guesses_what_smollm2_says(monkeypatch):
    """In one compiled call; every step is held against the plain form."""
    shared_data.packaged_chat_model()
    config = EngineConfig(
        model="smollm2-135m-instruct",
        device="cpu",
        max_model_len=128,
        max_num_seqs=1,
        speculate="smollm2-135m-instruct-eagle3",
        draft_tokens=3,
    )
    started = start(config)
    drafts, steps = started.engine.runner.head, []
    assert (drafts.compiled is not None) is (compiled.obstacle() is None)

    def propose(*given):
        """By the plain form first: both write the same keys and values."""
        held, drafts.compiled, drafts.least = (
            drafts.compiled,
            None,
            [0.0] * (drafts.limits.drafts - 1),
        )
        drafts_before = drafts.drafts_NK.clone()
        HeadDrafts.propose(drafts, *given)
        wanted, wanted_chances = drafts.drafts_NK.clone(), drafts.chances_BK
        drafts.drafts_NK.copy_(drafts_before)
        drafts.compiled, drafts.least = held, None if len(steps) % 2 else drafts.least
        HeadDrafts.propose(drafts, *given)
        sure = wanted_chances > 0.3
        torch.testing.assert_close(
            drafts.chances_BK[sure], wanted_chances[sure], rtol=0.03, atol=0.01
        )
        assert torch.equal(drafts.drafts_NK[:1][sure], wanted[:1][sure])
        steps.append(len(wanted))

    if drafts.compiled is not None:
        monkeypatch.setattr(drafts, "propose", propose)
    asked = [
        {"role": "user", "content": "What do you know about Ottawa? Answer in three sentences."}
    ]
    params = SamplingParams(temperature=0, max_tokens=32)
    started.engine.add(Request(0, started.opened.tokenizer.encode_chat(asked), params))
    while started.engine.has_work:
        started.engine.step()
    counts = started.engine.scheduler.speculation.counts
    assert counts.length_since(0, 0) > 1.4  # 1.0: no guess held
    assert len(steps) >= counts.runs or drafts.compiled is None


def test_a_head_is_no_model():
    with pytest.raises(UnsupportedModel, match="Eagle3Speculator") as refused:
        open_model("smollm2-135m-instruct-eagle3")
    assert "--speculate" in refused.value.hint

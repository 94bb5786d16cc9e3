"""MTP layers of checkpoints: drafts of the engine against the reference's layer over the whole text, and answers."""

import functools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS
from tiny_engines import at_rest, prompt_of, submit, tiny_engine

from cairn.core.errors import ConfigError
from cairn.models.checkpoint import open_checkpoint
from cairn.models.runnable import OpenModel, Runnable
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.start import start_with

DRAFTS = 3
PAGE = 16
LAST = "model.layers.{last}."
MIMO = "model.mtp_layers.0."
NAMES = {  # of what is around the layer: norm of tokens, norm of hidden states, join, last norm
    "deepseek_v3": [LAST + name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")],
    "glm4_moe": [LAST + name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")],
    "mimo": [
        MIMO + name
        for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ],
}


def config_of(kind: str) -> transformers.PretrainedConfig:
    if kind == "glm4_moe":
        sizes = CONFIGS["qwen3"]().to_dict()
        common = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        return transformers.Glm4MoeConfig(
            **{name: sizes[name] for name in common},
            num_key_value_heads=2,
            head_dim=16,
            num_hidden_layers=3,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            use_qk_norm=True,
        )
    if kind == "mimo-wide":
        return transformers.Qwen2Config(
            vocab_size=211,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=3,
            max_position_embeddings=512,
        )
    return CONFIGS["qwen2" if kind == "mimo" else kind]()


class Reference:
    """A model whose last layer is the MTP layer and what is around that layer."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(7)
        config = config_of(kind)
        self.kind, self.last = kind.removesuffix("-wide"), config.num_hidden_layers - 1
        self.model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        )
        with torch.no_grad():
            for name, value in (*self.model.named_parameters(), *self.model.named_buffers()):
                if "inv_freq" not in name:
                    value.add_(torch.randn_like(value) * (0.12 if value.ndim > 1 else 0.3))
        self.model.eval()
        self.layers, self.norm = self.model.model.layers, self.model.model.norm
        width = config.hidden_size
        self.around = [
            1 + 0.3 * torch.randn(width),
            1 + 0.3 * torch.randn(width),
            torch.randn(width, 2 * width) * 0.2,
            1 + 0.3 * torch.randn(width),
        ]

    def write(self, folder: Path) -> Path:
        self.model.save_pretrained(folder)
        layer, own = LAST.format(last=self.last), MIMO if self.kind == "mimo" else LAST
        own, file = own.format(last=self.last), folder / "model.safetensors"
        tensors = {name.replace(layer, own): value for name, value in load_file(file).items()}
        names = [f"{name.format(last=self.last)}.weight" for name in NAMES[self.kind]]
        tensors |= dict(zip(names, self.around, strict=True))
        tensors[f"{own}embed_tokens.weight"] = torch.zeros(2, 2)  # a copy of the model's, not read
        save_file(tensors, file)
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": self.last, "model_type": self.kind}
        config |= {"num_nextn_predict_layers": 1}
        config.pop("layer_types", None)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def run(self, layers: slice, norm: torch.nn.Module, **given: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        inner.layers, inner.norm = self.layers[layers], norm
        hidden = inner(**given, use_cache=False).last_hidden_state[0]
        inner.layers, inner.norm = self.layers, self.norm
        return hidden

    @torch.no_grad()
    def drafts_behind(self, text: list[int]) -> list[int]:
        """By passes over the whole text; its last token is not computed by the target."""
        tokens = torch.tensor(text)
        hidden = self.run(slice(self.last), self.norm, input_ids=tokens[None, :-1])
        following, entering = tokens[1:], hidden
        joined = torch.zeros(0, hidden.shape[1])
        found: list[int] = []
        while len(found) < DRAFTS:
            joined = torch.cat((joined, self.joined(following, entering)))
            plain = torch.nn.Identity()
            h = self.run(slice(self.last, None), plain, inputs_embeds=joined[None])[-1:]
            normed = self.normed(h, self.around[3])
            found.append(int(self.model.lm_head(normed).argmax()))
            following = torch.tensor(found[-1:])
            entering = normed if self.kind == "mimo" else h
        return found

    def joined(self, following: torch.Tensor, entering: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.model.model.embed_tokens(following), self.around[0])
        g = self.normed(entering, self.around[1])
        both = (g, x) if self.kind == "mimo" else (x, g)
        return torch.cat(both, -1) @ self.around[2].T

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


@functools.cache
def reference(kind: str) -> Reference:
    return Reference(kind)


def engine_of(folder: Path, speculate: str, device: str = "cpu", **more: bool) -> Engine:
    checkpoint = open_checkpoint(folder)
    dtype, page = ("float32", PAGE) if device == "cpu" else ("bfloat16", 64)
    net = checkpoint.load(device, getattr(torch, dtype))
    config = EngineConfig(
        model=str(folder), device=device, dtype=dtype, block_size=page, max_num_seqs=4,
        max_num_batched_tokens=24, num_gpu_blocks_override=40, speculate=speculate,
        draft_tokens=DRAFTS if speculate != "off" else "auto", **more,
    )  # fmt: skip
    opened = OpenModel(folder.name, checkpoint.spec, None, (), checkpoint)
    return start_with(opened, Runnable(folder.name, net, "a test"), config).engine


def noted(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Fills with the text before each run of drafts, and the drafts."""
    seen = []
    settle = engine.scheduler.speculation.accept

    def note(request, drawn, drafts):
        seen.append(([*request.prompt, *request.outputs], list(drafts)))
        return settle(request, drawn, drafts)

    engine.scheduler.speculation.accept = note
    return seen


@pytest.mark.parametrize("kind", NAMES)
def test_the_engine_drafts_as_the_layer_over_the_whole_text(tmp_path, kind):
    """In chunks, over pages, behind drafts that held and did not; and the answers are those without drafts."""
    folder = reference(kind).write(tmp_path / kind)
    engine = engine_of(folder, "mtp")
    seen = noted(engine)
    prompts = [prompt_of(40, seed=3), prompt_of(7, seed=1)]
    requests = submit(engine, prompts, max_tokens=14)
    engine.run()
    plain = engine_of(folder, "off")
    wanted = submit(plain, prompts, max_tokens=14)
    plain.run()
    assert [r.outputs for r in requests] == [r.outputs for r in wanted]
    compared = [
        (drafts, reference(kind).drafts_behind(text)[: len(drafts)])
        for text, drafts in seen
        if drafts and (len(text) - 2) % PAGE + DRAFTS <= PAGE
    ]
    assert len(compared) > 10
    assert [found for found, _ in compared] == [due for _, due in compared]
    at_rest(engine)


@pytest.mark.parametrize(
    ("dropped", "what"),
    [
        ("input_proj", "no model.mtp_layers.0.input_proj.weight"),
        ("q_proj", "has no model.mtp"),
    ],
)
def test_a_checkpoint_without_such_a_layer_is_refused_by_name(tmp_path, dropped, what):
    folder = reference("mimo").write(tmp_path / "mimo")
    file = folder / "model.safetensors"
    kept = {n: v for n, v in load_file(file).items() if not ("mtp" in n and dropped in n)}
    save_file(kept, file)
    with pytest.raises(ConfigError, match=what):
        engine_of(folder, "mtp")


def test_random_weights_have_no_such_layer():
    with pytest.raises(ConfigError, match="no checkpoint that could have"):
        tiny_engine("llama", speculate="mtp")


@pytest.mark.gpu
def test_in_graphs_it_drafts_what_it_drafts_kernel_by_kernel(tmp_path):
    folder = reference("mimo-wide").write(tmp_path / "mimo")
    prompts, answers, drafts = [prompt_of(9, seed=9), prompt_of(70, seed=7)], {}, {}
    for how in ("off", "graphs", "eager"):
        who = "off" if how == "off" else "mtp"
        engine = engine_of(folder, who, "cuda", batch_invariant=True, enforce_eager=how == "eager")
        drafts[how] = noted(engine) if how != "off" else []
        requests = submit(engine, prompts, max_tokens=24)
        engine.run()
        assert [(len(one.outputs), one.error) for one in requests] == [(24, None)] * 2
        answers[how] = [request.outputs for request in requests]
    assert answers["graphs"] == answers["eager"] == answers["off"]
    assert drafts["graphs"] == drafts["eager"]
    assert len(drafts["eager"]) > 10

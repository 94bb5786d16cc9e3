"""How many pictures a second does a model that sees answer, and how near is its tower to the limit of the machine?

    python benchmarks/vision.py --shape qwen3-vl-8b --out benchmarks/h200/vision.json

Random weights of a released shape, noise as pictures, all requests at once: each has one picture, `--text` tokens of
text and `--outputs` tokens of answer. Every round has pictures of its own, so nothing is found in a cache. The tower is
timed alone as well; its floor is its FLOPs over `--tflops`.
"""

import argparse
import os
import statistics
import time
from typing import Any

import msgspec
import numpy as np
import torch

from cairn.bench.record import add_arguments, record
from cairn.models.build import ModelBuild
from cairn.models.families import from_hf
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.vision.cost import tower_flops
from cairn.models.vision.families import split_config
from cairn.models.vision.picture import Picture
from cairn.models.vision.prompt import rows_of
from cairn.models.vision.tiling_rules import ImageRules, layout_of
from cairn.models.vision.tower import Tower
from cairn.models.weights import fill_random, random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.media import NewRows, WaitingForRows, pieces_of
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with
from cairn.serve.engine.tower_runner import MOST_PATCHES, TowerRunner

ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-8b": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "rope_parameters": ROPE | {"mrope_section": [24, 20, 20]},
        },
        "vision_config": {"out_hidden_size": 4096, "depth": 27},
    },
    "tiny": {
        "model_type": "qwen3_vl",
        "image_token_id": 300,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 96,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 320,
            "max_position_embeddings": 4096,
            "rope_parameters": ROPE | {"mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "out_hidden_size": 96,
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "deepstack_visual_indexes": [0, 1],
        },
    },
}
RULES = ImageRules(
    "area", 0, 0, 3, (0.5,) * 3, (0.5,) * 3, cell=32, least_pixels=65536, most_pixels=16777216
)


class Bench:
    """A model of a shape behind an engine, with its tower."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        config, vision = split_config(SHAPES[options.shape])
        spec = msgspec.structs.replace(from_hf(config), deep_rows=len(vision.tower.deep_layers))
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = (
            random_model(spec, ModelBuild(device, dtype, fused=True)).requires_grad_(False).eval()
        )
        tower = Tower(vision, ModelBuild("meta", dtype, fused=True))
        fill_random(tower, tower.slots(), torch.device(device), 1)
        runnable = Runnable(options.shape, model, "random weights")
        runnable.tower = tower.requires_grad_(False).eval()
        opened = OpenModel(options.shape, spec, None, (), None)
        wanted = EngineConfig(
            model=options.shape,
            device=device,
            max_model_len=4096,
            max_num_seqs=max(options.requests, 8),
            load_in_advance=False,
        )
        started = start_with(opened, runnable, wanted, sole=True)
        self.engine: Engine = started.engine
        self.runner = TowerRunner(tower, RULES, self.engine.runner.write_piece)
        self.engine.media = WaitingForRows(
            self.engine.scheduler.queues.arena,
            self.runner.encode,
            self.runner.patches,
            MOST_PATCHES[self.runner.device.type],
        )
        self.vision, self.vocab, self.options = vision, spec.vocab, options

    def pictures(self) -> list[Picture]:
        """Noise of the asked size, as the rules resize it."""
        side = self.options.side
        tile = layout_of(RULES, side, side).tile
        made = []
        for _ in range(self.options.requests):
            pixels = os.urandom(tile.height * tile.width * 3)
            made.append(Picture(os.urandom(16), 1, tile.height, tile.width, pixels))
        return made

    def round(self) -> tuple[float, float]:
        """Seconds until the last answer ends, and until the last first token."""
        params = SamplingParams(temperature=0, max_tokens=self.options.outputs, ignore_eos=True)
        pictures, draw = self.pictures(), np.random.default_rng()
        began, requests = time.perf_counter(), []
        for at, picture in enumerate(pictures):
            rows = rows_of(self.vision, picture)
            text = draw.integers(0, self.vision.image_token, self.options.text).tolist()
            prompt = [*text[:4], *[self.vision.image_token] * rows, *text[4:]]
            pieces = pieces_of([picture], [[range(4, 4 + rows)]], self.vision)
            requests.append(Request(at, prompt, params, pieces=pieces, pictures=[picture]))
            self.engine.add(requests[-1])
        for _ in self.engine.run():
            pass
        seconds = time.perf_counter() - began
        ledgers = [request.ledger for request in requests]
        return seconds, max(one.first_token - one.arrived for one in ledgers)

    def tower_alone(self) -> float:
        """Seconds for all pictures, in the calls that the engine makes."""
        new = []
        for picture in self.pictures():
            rows = rows_of(self.vision, picture)
            one = NewRows(picture)
            one.parts = [(0, pieces_of([picture], [[range(rows)]], self.vision)[0])]
            new.append(one)
        began = time.perf_counter()
        self.runner.encode(new)
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def measured(options: argparse.Namespace) -> dict[str, object]:
    bench = Bench(options, "cuda" if torch.cuda.is_available() else "cpu")
    for _ in range(options.warm):
        bench.round()
    rounds = [bench.round() for _ in range(options.rounds)]
    tower_s = statistics.median(bench.tower_alone() for _ in range(options.rounds))
    seconds, first_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    picture = bench.pictures()[0]
    flops = options.requests * tower_flops(bench.vision, bench.runner.patches(picture))
    return {
        "shape": options.shape,
        "requests": options.requests,
        "pixels": f"{options.side}x{options.side}",
        "rows_per_picture": rows_of(bench.vision, picture),
        "text_tokens": options.text,
        "output_tokens": options.outputs,
        "seconds": seconds,
        "pictures_per_s": options.requests / seconds,
        "output_tokens_per_s": options.requests * options.outputs / seconds,
        "last_first_token_s": first_s,
        "tower_s": tower_s,
        "tower_tflops": flops / tower_s / 1e12,
        f"tower_share_of_{options.tflops:g}_tflops": flops / tower_s / 1e12 / options.tflops,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-vl-8b")
    parser.add_argument("--side", type=int, default=560, help="pixels along a side")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--text", type=int, default=64, help="tokens")
    parser.add_argument("--outputs", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--tflops", type=float, default=685.0, help="of large bfloat16 products")
    add_arguments(parser)
    options = parser.parse_args()
    record(measured(options), options)


if __name__ == "__main__":
    main()

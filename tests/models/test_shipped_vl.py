"""cairn-tiny-vl counts on pictures that it was never trained on, through the engine, as its card says."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL", reason="pictures are decoded by Pillow")
from PIL import Image

from cairn import LLM, SamplingParams
from cairn.models.hub import resolve

RECIPE = Path(__file__).parents[2] / "examples" / "cairn-tiny-vl"
SEED = 20_261_117  # of no training and no measurement
PICTURES = 48


@pytest.fixture(scope="module")
def drawn():
    sys.path.insert(0, str(RECIPE))
    import pictures

    yield pictures
    sys.path.remove(str(RECIPE))


def test_it_counts_red_circles_on_new_pictures(drawn):
    found = drawn.scenes(PICTURES, torch.Generator().manual_seed(SEED))
    pixels = drawn.draw(found).numpy()
    circles = (found.present_BK & (found.shape_BK == 0)).sum(1).tolist()
    red = (found.present_BK & (found.shape_BK == 0) & (found.color_BK == 0)).sum(1).tolist()
    shapes = [at for at, number in enumerate(found.number_B.tolist()) if number < 0]
    asked, wanted = [], []
    for at in shapes:
        picture = {"type": "image", "image": Image.fromarray(pixels[at])}
        for question, count in (("How many circles?", circles), ("How many red circles?", red)):
            content = [picture, {"type": "text", "text": question}]
            asked.append([{"role": "user", "content": content}])
            wanted.append(str(count[at]))
    with LLM("cairn-tiny-vl", device="cpu", num_gpu_blocks_override=1200) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        said = [one.outputs[0].text for one in llm.chat(asked, params, use_tqdm=False)]
    right = sum(one == count for one, count in zip(said, wanted, strict=True))
    assert right / len(wanted) > 0.65, f"{right} of {len(wanted)}; its card says 74%"
    assert any(count not in ("0", "1") for count in wanted)


def test_the_card_says_what_was_measured():
    folder = resolve("cairn-tiny-vl")
    last = json.loads((folder / "curve.json").read_text())["points"][-1]
    card = (folder / "MODEL_CARD.md").read_text()
    rows = [line for line in card.splitlines() if line.startswith("| ") and line.endswith("% |")]
    names = ("count", "exists", "color", "shape", "where", "number", "all")
    assert [f"{last[name]:.0%}" for name in names] == [row.split("|")[2].strip() for row in rows]

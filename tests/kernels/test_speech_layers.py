"""The compiled products and decoder layers of speech against the same formulas in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from cairn.kernels.cpu.speech_layers import DecoderLayers, DecoderShape, DecoderWeights
from cairn.kernels.cpu.tiled import Affine, TiledMap, has_tiles

HIDDEN, INNER, HEADS, WIDTH = 64, 160, 4, 16
LAYERS, CONTEXT, PLACES, VOCABULARY = 2, 21, 37, 53  # none of which fills its tiles
SHAPE = DecoderShape(HEADS, WIDTH, PLACES, WIDTH**-0.5, 1e-5)
TYPES = (torch.float32, torch.float16)


def needs(dtype):
    if not has_tiles(dtype, (HIDDEN, INNER, WIDTH)):
        pytest.skip(f"no kernel for {dtype} on this CPU")


class Draw:
    def __init__(self, dtype):
        self.dtype, self.chance = dtype, torch.Generator().manual_seed(0)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.chance)

    def affine(self, columns, depth, scale=1.0):
        weight = self.normal(columns, depth) * scale / math.sqrt(depth)
        return Affine(weight.to(self.dtype), self.normal(columns))

    def norm(self):
        return Affine(1 + 0.2 * self.normal(HIDDEN), 0.2 * self.normal(HIDDEN))

    def layer(self):
        sizes = [(3 * HIDDEN, HIDDEN, 2), *[(HIDDEN, HIDDEN)] * 3]
        wide = [(INNER, HIDDEN, 3), (HIDDEN, INNER)]
        products = [self.affine(*size) for size in (*sizes, *wide)]
        return DecoderWeights(*products, *(self.norm() for _ in range(3)))


def product(x, part):
    return F.linear(x, part.weight.double(), part.bias.double())


def normed(x, part):
    return F.layer_norm(x, x.shape[-1:], part.weight.double(), part.bias.double(), SHAPE.eps)


def split(x_SE):
    return x_SE.unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)


def attended(q, k, v, mask=None):
    scores = split(q) @ split(k).transpose(1, 2) * SHAPE.scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ split(v)).transpose(0, 1).flatten(1)


def reference(tokens, kv_of, layers, embedding, positions, norm):
    """One row whose tokens are all read at once, [S, V]."""
    x = embedding.double()[tokens] + positions.double()[: len(tokens)]
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for layer, kv in zip(layers, kv_of, strict=True):
        heads = product(normed(x, layer.norm), layer.qkv).chunk(3, -1)
        x = x + product(attended(*heads, causal), layer.out)
        q = product(normed(x, layer.look_norm), layer.look)
        x = x + product(attended(q, *kv.double().chunk(2, -1)), layer.look_out)
        inner = F.gelu(product(normed(x, layer.feed_forward_norm), layer.up))
        x = x + product(inner, layer.down)
    return normed(x, norm) @ embedding.double().t()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9])
def test_rows_in_any_slots_and_pieces_have_the_logits_of_float64(dtype, rows):
    """Of what is stored in float16 nothing but the sound is rounded, and the reference reads it so."""
    needs(dtype)
    draw = Draw(dtype)
    layers, norm = [draw.layer() for _ in range(LAYERS)], draw.norm()
    embedding, positions = draw.normal(VOCABULARY, HIDDEN).to(dtype), draw.normal(CONTEXT, HIDDEN)
    decoder = DecoderLayers(layers, embedding, positions, norm, SHAPE)
    kv_of = [
        [draw.normal(PLACES, 2 * HIDDEN).to(dtype).float() for _ in layers] for _ in range(rows)
    ]
    sounds = [decoder.sound() for _ in range(rows)]
    for sound, kvs in zip(sounds, kv_of, strict=True):
        for at, kv in enumerate(kvs):
            decoder.write_sound(kv, sound, at)
    texts = [torch.empty(2, rows + 1, HEADS, CONTEXT, WIDTH) for _ in layers]
    slots = torch.randperm(rows + 1, generator=draw.chance)[:rows].tolist()
    tokens = torch.randint(0, VOCABULARY, (rows, CONTEXT), generator=draw.chance)
    found, length = [], 0
    for piece in tokens.split([3, 1, 1, 10, CONTEXT - 15], 1):
        found.append(decoder.read(piece, texts, sounds, slots, length, last_only=False))
        length += piece.shape[1]
    for row, ours in enumerate(torch.cat(found, 1)):
        expected = reference(tokens[row], kv_of[row], layers, embedding, positions, norm)
        torch.testing.assert_close(ours.double(), expected, atol=2e-4, rtol=1e-4)
    again = decoder.read(tokens[:, -2:], texts, sounds, slots, CONTEXT - 2, last_only=True)
    assert torch.equal(again[:, 0], found[-1][:, -1])  # no row depends on how many are beside it
    assert again.shape == (rows, 1, VOCABULARY)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("gelu", [False, True])
def test_products_of_rows_that_overlap_are_convolutions(dtype, gelu):
    needs(dtype)
    draw = Draw(dtype)
    weight, bias = draw.normal(48, 16, 3).to(dtype), draw.normal(48)
    x = draw.normal(16, 150).to(dtype).float()
    expected = F.conv1d(x.double()[None], weight.double(), bias.double(), stride=2, padding=1)[0]
    expected = (F.gelu(expected) if gelu else expected).t()
    part = TiledMap(Affine(weight.transpose(1, 2).flatten(1), bias))
    found = part(F.pad(x.t(), (0, 0, 1, 1)), 75, 2 * 16, gelu)
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 2e-3)
    with pytest.raises(ValueError, match="76 rows"):
        part(F.pad(x.t(), (0, 0, 1, 1)), 76, 2 * 16)


def test_what_lies_outside_of_its_memory_is_refused():
    needs(torch.float32)
    draw = Draw(torch.float32)
    layers = [draw.layer()]
    decoder = DecoderLayers(
        layers, draw.normal(VOCABULARY, HIDDEN), draw.normal(CONTEXT, HIDDEN), draw.norm(), SHAPE
    )
    texts, sounds = [torch.empty(2, 1, HEADS, CONTEXT, WIDTH)], [decoder.sound()]
    one = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="22 tokens"):
        decoder.read(one, texts, sounds, [0], CONTEXT, last_only=True)
    with pytest.raises(ValueError, match="vocabulary of 53"):
        decoder.read(one + VOCABULARY, texts, sounds, [0], 0, last_only=True)
    with pytest.raises(ValueError, match="float32"):
        decoder.read(one, [texts[0].half()], sounds, [0], 0, last_only=True)

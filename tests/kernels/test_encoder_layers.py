"""The compiled layers of an encoder against the same formulas in float64, however the threads share them."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from cairn.kernels.cpu import compiled
from cairn.kernels.cpu.encoder_layers import (
    CHUNK_ROWS,
    EncoderLayers,
    EncoderShape,
    LayerWeights,
    chunks_of,
)
from cairn.kernels.cpu.tiled import Affine, has_tiles

HIDDEN, INNER, HEADS, WIDTH = 48, 400, 2, 32  # the inner width is no multiple of a depth of tiles
SIZES = (HIDDEN, INNER, WIDTH)
BOUNDS = {torch.float32: 2e-6, torch.float16: 5e-3}  # of the error against the whole


def needs(dtype):
    if not has_tiles(dtype, SIZES):
        pytest.skip(f"no kernel for {dtype} on this CPU")


def layers_of(dtype, count=3):
    chance = torch.Generator().manual_seed(0)

    def affine(rows, columns, scale):
        weight = torch.randn(rows, columns, generator=chance) * scale / math.sqrt(columns)
        return Affine(weight.to(dtype), torch.randn(rows, generator=chance).to(dtype))

    def norm():
        return Affine(torch.rand(HIDDEN, generator=chance) + 0.5, torch.randn(HIDDEN) * 0.1)

    joined = HEADS * WIDTH
    return [
        LayerWeights(
            affine(3 * joined, HIDDEN, 2),
            affine(HIDDEN, joined, 1),
            affine(INNER, HIDDEN, 4),  # wide enough for both tails of GELU
            affine(HIDDEN, INNER, 1),
            norm(),
            norm(),
        )
        for _ in range(count)
    ]


def reference(x_TD, lengths, layers, shape):
    def product(x, part):
        return F.linear(x, part.weight.double(), part.bias.double())

    def normed(x, part):
        return F.layer_norm(x, (HIDDEN,), part.weight.double(), part.bias.double(), shape.eps)

    def attended(x, layer):
        q, k, v = product(x, layer.qkv).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, WIDTH)).transpose(0, 1) for y in (q, k, v))
        shares = (q @ k.transpose(1, 2) * shape.scale).softmax(-1)
        return product((shares @ v).transpose(0, 1).flatten(1), layer.out)

    def fed(x, layer):
        return product(F.gelu(product(x, layer.up)), layer.down)

    made = []
    for x in x_TD.double().split(lengths):
        for layer in layers:
            one, two = layer.attention_norm, layer.feed_forward_norm
            if shape.norms == "post":
                x = normed(x + attended(x, layer), one)
                x = normed(x + fed(x, layer), two)
            else:
                x = x + attended(normed(x, one), layer)
                x = x + fed(normed(x, two), layer)
        made.append(x)
    return torch.cat(made)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("norms", ["post", "pre"])
@pytest.mark.parametrize("lengths", [[1], [7], [129], [5, 8, 1, 64, 65, 3, 90, 16]], ids=str)
def test_layers_are_those_of_float64(dtype, norms, lengths):
    needs(dtype)
    shape = EncoderShape(HEADS, WIDTH, WIDTH**-0.5, 1e-6, norms)
    weights = layers_of(dtype)
    x_TD = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = reference(x_TD, lengths, weights, shape)
    found = EncoderLayers(weights, shape)(x_TD.clone(), lengths)
    assert (found - expected).norm() < BOUNDS[dtype] * expected.norm()
    assert expected.std() > 0.1  # there is something to compare


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_text_is_the_same_to_the_bit_alone_among_others_and_with_any_threads(dtype):
    """Alone its layers are shared by the threads; among many it stays with one of them."""
    needs(dtype)
    layers = EncoderLayers(layers_of(dtype), EncoderShape(HEADS, WIDTH, 0.2, 1e-6, "post"))
    lengths = [30, 31, 5, 77, 12, 200, 8, 64, 1, 100]
    x_TD = torch.randn(sum(lengths), HIDDEN)
    together = layers(x_TD.clone(), lengths).split(lengths)
    for text, expected in zip(x_TD.split(lengths), together, strict=True):
        assert torch.equal(layers(text.clone(), [len(text)]), expected)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if threads == 1 else 1)
        again = layers(x_TD.clone(), lengths)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again, torch.cat(together))


def test_scores_and_activations_far_out_stay_finite():
    needs(torch.float32)
    shape = EncoderShape(HEADS, WIDTH, 3.0, 1e-6, "post")
    weights = layers_of(torch.float32, 1)
    weights[0] = weights[0]._replace(up=Affine(weights[0].up.weight * 30, weights[0].up.bias))
    x_TD = torch.randn(40, HIDDEN) * 10
    expected = reference(x_TD, [40], weights, shape)
    found = EncoderLayers(weights, shape)(x_TD.clone(), [40])
    torch.testing.assert_close(found, expected.float(), atol=1e-3, rtol=1e-3)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 9))
def test_chunks_hold_every_text_once_and_the_largest_come_first(lengths, threads):
    chunks = chunks_of(lengths, threads)
    assert sorted(text for first, last in chunks for text in range(first, last)) == [
        *range(len(lengths))
    ]
    rows = [sum(lengths[first:last]) for first, last in chunks]
    assert rows == sorted(rows, reverse=True)
    assert all(
        count <= CHUNK_ROWS or last - first == 1
        for count, (first, last) in zip(rows, chunks, strict=True)
    )


def test_a_library_is_compiled_again_when_any_of_its_sources_changes():
    found = {path.name for path in compiled.HERE.iterdir() if path.suffix in (".c", ".h")}
    assert found == set(compiled.SOURCES)

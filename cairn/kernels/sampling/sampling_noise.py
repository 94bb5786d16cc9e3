"""Noise for sampling: a function of (seed, position, token) alone. In torch: `noise_reference`.

    key      two words of (seed, position), once for a draw, by the rounds of pcg3d
    word     of the key and the token: three multiplications with shifts in between, once for every token
    noise    -log(-log(1 - v)), v = (word + 1/2) / 2^32: Gumbel, so that the largest score + noise is a softmax draw

pcg3d: Jarzynski and Olano, Hash Functions for GPU Rendering, 2020. The constants of `token_word` are those of the
lowbias32 mixer of Wellons' hash prospector, behind a golden-ratio step.
"""

import triton
import triton.language as tl


@triton.jit
def noise_key(seed, position):
    x = (seed >> 32).to(tl.uint32) * 1664525 + 1013904223
    y = position.to(tl.uint32) * 1664525 + 1013904223
    z = seed.to(tl.uint32) * 1664525 + 1013904223
    x += y * z
    y += z * x
    z += x * y
    x ^= x >> 16
    y ^= y >> 16
    z ^= z >> 16
    x += y * z
    y += z * x
    z += x * y
    return y, z


@triton.jit
def start_word(token):
    """A tile's tokens can share this: it is linear, but for the key that is added to it."""
    return token.to(tl.uint32) * 0x9E3779B1


@triton.jit
def mixed(word, key_z):
    """But for a last `word ^= word >> 16`: the upper half is final."""
    word = ((word ^ (word >> 15)) ^ key_z) * 0x7FEB352D
    return (word ^ (word >> 16)) * 0x846CA68B


@triton.jit
def _fast_log(x):
    """To 2e-7, relative or absolute; triton's own is a polynomial of 15 steps."""
    binary = tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return binary * 0.6931471805599453


@triton.jit
def noisy(score, coolness, word):
    """score / temperature + noise, of the word that `mixed` makes.

    The series keeps its precision where v is small, and that is where noise is large and decides.
    """
    word ^= word >> 16
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = 0.33333334 + v * (0.25 + v * (0.2 + v * 0.16666667))
    series = v * (1.0 + v * (0.5 + v * series))
    waiting = tl.where(v < 0.125, series, -_fast_log(1.0 - v))
    return tl.fma(score, coolness, -_fast_log(waiting))


@triton.jit
def may_exceed(score, sharpness, level, word):
    """Not less than -2^23 where score + noise may exceed a level, in units of log(2). Without a logarithm.

    -log(-log(1 - v)) <= -log(v), so that takes v <= exp(score / temperature - level). The upper half of the word is
    a v that is never too large, in units of 2^-16; as the low bits of a float it is 2^23 more.
    """
    v = ((word >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
    return tl.math.exp2(tl.fma(score, sharpness, 16.0 - level)) - v

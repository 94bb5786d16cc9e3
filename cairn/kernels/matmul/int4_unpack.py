# pyrefly: ignore-errors
"""4-bit weights of `int4_tiles` in shared memory -> the register operand of the tensor cores, in Gluon for sm_90.

    int4    a level in the low bits of bfloat16's 128 is 128 + level, and 136 less leaves level - 8 exactly
    e2m1    exponent and mantissa in the low bits of those of bfloat16: the number times 2^-126, exactly

Groups of 64 columns and more scale their product, which is not done here. Smaller ones scale the weights in bfloat16:
the scales of rows r and r + 8 share a word that all four threads of these rows read. Those of e2m1 are 2^117 times as
large as they should be: what comes out is 2^-9 of the weight, and no scale of up to 2^10 overflows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PIECE = gl.constexpr(64)  # rows of w that a warpgroup multiplies at once
_INT4 = """{
    .reg .b32 t1, t2, t3, c, s, z;
    shr.b32 t1, $4, 4;
    shr.b32 t2, $4, 8;
    shr.b32 t3, $4, 12;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $1, t1, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $2, t2, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $3, t3, 0x000f000f, 0x43004300, 0xea;
"""
_SUBTRACT = """    mov.b32 c, 0x43084308;
    sub.rn.bf16x2 $0, $0, c;
    sub.rn.bf16x2 $1, $1, c;
    sub.rn.bf16x2 $2, $2, c;
    sub.rn.bf16x2 $3, $3, c;
"""
_E2M1 = """{
    .reg .b32 t0, t1, t2, t3, s, z;
    shl.b32 $0, $4, 6;
    shl.b32 $1, $4, 2;
    shr.b32 $2, $4, 2;
    shr.b32 $3, $4, 6;
    and.b32 $0, $0, 0x01c001c0;
    and.b32 $1, $1, 0x01c001c0;
    and.b32 $2, $2, 0x01c001c0;
    and.b32 $3, $3, 0x01c001c0;
    shl.b32 t0, $4, 12;
    shl.b32 t1, $4, 8;
    shl.b32 t2, $4, 4;
    lop3.b32 $0, t0, 0x80008000, $0, 0xea;
    lop3.b32 $1, t1, 0x80008000, $1, 0xea;
    lop3.b32 $2, t2, 0x80008000, $2, 0xea;
    lop3.b32 $3, $4, 0x80008000, $3, 0xea;
"""
# The numbers come in the order of the operand: those of row r, of row r + 8, and both again 8 columns on.
_SCALE = """    prmt.b32 s, $5, $5, 0x1010;
    mul.rn.bf16x2 $0, $0, s;
    mul.rn.bf16x2 $2, $2, s;
    prmt.b32 s, $5, $5, 0x3232;
    mul.rn.bf16x2 $1, $1, s;
    mul.rn.bf16x2 $3, $3, s;
"""
_SCALE_AND_SHIFT = """    prmt.b32 s, $5, $5, 0x1010;
    prmt.b32 z, $6, $6, 0x1010;
    fma.rn.bf16x2 $0, $0, s, z;
    fma.rn.bf16x2 $2, $2, s, z;
    prmt.b32 s, $5, $5, 0x3232;
    prmt.b32 z, $6, $6, 0x3232;
    fma.rn.bf16x2 $1, $1, s, z;
    fma.rn.bf16x2 $3, $3, s, z;
"""
UNPACK = gl.constexpr(_INT4 + "}")  # 128 + level
UNPACK_CENTRED = gl.constexpr(_INT4 + _SUBTRACT + "}")  # level - 8
UNPACK_SCALED = gl.constexpr(_INT4 + _SUBTRACT + _SCALE + "}")
UNPACK_SHIFTED = gl.constexpr(_INT4 + _SUBTRACT + _SCALE_AND_SHIFT + "}")
UNPACK_FLOATS = gl.constexpr(_E2M1 + _SCALE + "}")
ONE = gl.constexpr("=&r,=&r,=&r,=&r,r")
TWO = gl.constexpr("=&r,=&r,=&r,=&r,r,r")
THREE = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r")


@gluon.jit
def unpacked(raw, layout: gl.constexpr, CENTRED: gl.constexpr):
    """Tiles of 2,048 bytes, 16 for each thread -> [64, UNIT] in the registers of the operand.

    The numbers are level - 8, or 128 + level where they are not CENTRED.
    """
    low, high = gl.inline_asm_elementwise(
        UNPACK_CENTRED if CENTRED else UNPACK,
        ONE,
        [_words(raw)],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return _operand(low, high, layout)


@gluon.jit
def unpacked_and_scaled(raw, scales, shifts, layout: gl.constexpr, KIND: gl.constexpr):
    """Tiles whose `scales` and perhaps `shifts`, [64, UNIT / 2] bytes, `of_words` has laid beside them."""
    words = _words(raw)
    here: gl.constexpr = words.type.layout
    scale = gl.convert_layout(scales, here)
    if KIND == "e2m1":
        gl.static_assert(shifts is None)
        low, high = gl.inline_asm_elementwise(
            UNPACK_FLOATS, TWO, [words, scale], (gl.bfloat16, gl.bfloat16), True, 4
        )
    elif shifts is None:
        low, high = gl.inline_asm_elementwise(
            UNPACK_SCALED, TWO, [words, scale], (gl.bfloat16, gl.bfloat16), True, 4
        )
    else:
        shift = gl.convert_layout(shifts, here)
        low, high = gl.inline_asm_elementwise(
            UNPACK_SHIFTED, THREE, [words, scale, shift], (gl.bfloat16, gl.bfloat16), True, 4
        )
    return _operand(low, high, layout)


@gluon.jit
def of_words(plane, TILES: gl.constexpr):
    """Scales of small groups in shared memory, rows of 128 bytes -> the four bytes that each word needs."""
    GROUPS: gl.constexpr = plane.shape[0] // TILES  # of a tile
    layout: gl.constexpr = _scale_layout(TILES, GROUPS)
    bytes_ = plane.load(gl.SliceLayout(2, layout)).expand_dims(2)
    # tile, warp, r, group, byte, pair -> tile, warp, r, pair, group, step, byte
    each = bytes_.broadcast_to([TILES * GROUPS, 128, 4]).reshape([TILES, 4, 8, GROUPS, 4, 4])
    each = each.permute((0, 1, 2, 5, 3, 4)).reshape([TILES, 4, 8, 4, GROUPS, 1, 4])
    wide = each.broadcast_to([TILES, 4, 8, 4, GROUPS, 4 // GROUPS, 4])
    return _in_word_order(wide.reshape([TILES, 4, 8, 4, 4, 2, 2]), TILES)


@gluon.constexpr_function
def _scale_layout(tiles, groups):
    """[rows of 128 bytes, 128, the four threads of a row]: each has the scales of its rows and of all groups."""
    at = [2**bit for bit in range(2 + groups.bit_length() - 1 + 5)]  # byte, group; r; warp

    def place(byte):
        return [byte // 128, byte % 128, 0]

    own, others = at[: len(at) - 5], at[len(at) - 5 :]
    registers = [place(byte) for byte in own]
    registers += [[groups * 2**bit, 0, 0] for bit in range(tiles.bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], *map(place, others[:3])]
    return gl.DistributedLinearLayout(
        registers, lanes, [place(byte) for byte in others[3:]], [], [tiles * groups, 128, 4]
    )


@gluon.jit
def _words(raw):
    TILES: gl.constexpr = raw.shape[0] // 16
    # tile, warp, r, pair, step of 16, odd, half
    return _in_word_order(raw.reshape([TILES, 4, 8, 4, 4, 2, 2]), TILES)


@gluon.jit
def _in_word_order(bytes_, TILES: gl.constexpr):
    """-> warp, row + 8, r | tile, step, pair, odd: `odd` and `row + 8` change places in a word, because the numbers
    that come out of it lie in the order of the operand."""
    return bytes_.permute((1, 5, 2, 0, 4, 3, 6)).reshape([PIECE, TILES * 32])


@gluon.jit
def _operand(low, high, layout: gl.constexpr):
    TILES: gl.constexpr = low.shape[1] // 32
    halves = gl.join(low, high).reshape([PIECE, TILES * 4, 8, 2]).permute((0, 1, 3, 2))
    return gl.convert_layout(halves.reshape([PIECE, TILES * 64]), layout, assert_trivial=True)

# pyrefly: ignore-errors
"""Packed weights of `tile_order` in shared memory -> the register operand of the tensor cores, in Gluon for sm_90.

    int4    a level in the low bits of bfloat16's 128 is 128 + level, and 136 less leaves level - 8 exactly
    int8    the same with seven bits; the sign bit, in the same place of another 128, is the 128 more to subtract
    e2m1    exponent and mantissa in the low bits of those of bfloat16: the number times 2^-126, exactly
    fp8     e4m3 in the same way: the number times 2^-120, which is then multiplied by 2^120

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
# Of a word of bytes: rows r and r + 8, and the next column.
_INT8 = """{
    .reg .b32 t1, c, s, z;
    shr.b32 t1, $2, 8;
    lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 c, $2, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 $0, $0, c;
    lop3.b32 $1, t1, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 c, t1, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 $1, $1, c;
"""
_FP8 = """{
    .reg .b32 t0, c, s, z;
    shl.b32 $0, $2, 4;
    shr.b32 $1, $2, 4;
    and.b32 $0, $0, 0x07f007f0;
    and.b32 $1, $1, 0x07f007f0;
    shl.b32 t0, $2, 8;
    lop3.b32 $0, t0, 0x80008000, $0, 0xea;
    lop3.b32 $1, $2, 0x80008000, $1, 0xea;
    mov.b32 c, 0x7b807b80;
    mul.rn.bf16x2 $0, $0, c;
    mul.rn.bf16x2 $1, $1, c;
"""
# The numbers come in the order of the operand: those of row r, of row r + 8, and of 4 bits both again 8 columns on.
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
_SCALE_BYTES = """    prmt.b32 s, $3, $3, 0x1010;
    mul.rn.bf16x2 $0, $0, s;
    prmt.b32 s, $3, $3, 0x3232;
    mul.rn.bf16x2 $1, $1, s;
"""
_SCALE_AND_SHIFT_BYTES = """    prmt.b32 s, $3, $3, 0x1010;
    prmt.b32 z, $4, $4, 0x1010;
    fma.rn.bf16x2 $0, $0, s, z;
    prmt.b32 s, $3, $3, 0x3232;
    prmt.b32 z, $4, $4, 0x3232;
    fma.rn.bf16x2 $1, $1, s, z;
"""
INT4_FROM_128 = gl.constexpr(_INT4 + "}")  # 128 + level
INT4 = gl.constexpr(_INT4 + _SUBTRACT + "}")
INT4_SCALED = gl.constexpr(_INT4 + _SUBTRACT + _SCALE + "}")
INT4_SHIFTED = gl.constexpr(_INT4 + _SUBTRACT + _SCALE_AND_SHIFT + "}")
E2M1_SCALED = gl.constexpr(_E2M1 + _SCALE + "}")
INT8 = gl.constexpr(_INT8 + "}")
INT8_SCALED = gl.constexpr(_INT8 + _SCALE_BYTES + "}")
INT8_SHIFTED = gl.constexpr(_INT8 + _SCALE_AND_SHIFT_BYTES + "}")
FP8 = gl.constexpr(_FP8 + "}")
FP8_SCALED = gl.constexpr(_FP8 + _SCALE_BYTES + "}")
FP8_SHIFTED = gl.constexpr(_FP8 + _SCALE_AND_SHIFT_BYTES + "}")


@gluon.jit
def unpacked(raw, layout: gl.constexpr, KIND: gl.constexpr, CENTRED: gl.constexpr):
    """Tiles of bytes, 16 of every 2,048 for each thread -> levels, [64, UNIT] in the registers of the operand.

    Those of int4 are level - 8, or 128 + level where they are not CENTRED.
    """
    if KIND == "fp8":
        PTX: gl.constexpr = FP8
    elif KIND == "int8":
        PTX: gl.constexpr = INT8
    elif CENTRED:
        PTX: gl.constexpr = INT4
    else:
        PTX: gl.constexpr = INT4_FROM_128
    return _operand(PTX, (_words(raw, of_bytes(KIND)),), layout, of_bytes(KIND))


@gluon.jit
def unpacked_and_scaled(raw, scales, shifts, layout: gl.constexpr, KIND: gl.constexpr):
    """Tiles whose `scales` and perhaps `shifts` `of_words` has laid beside them, four bytes for each word."""
    words = _words(raw, of_bytes(KIND))
    here: gl.constexpr = words.type.layout
    given = (words, gl.convert_layout(scales, here))
    if shifts is not None:
        given = given + (gl.convert_layout(shifts, here),)  # noqa: RUF005
    if KIND == "e2m1":
        gl.static_assert(shifts is None)
        PTX: gl.constexpr = E2M1_SCALED
    elif KIND == "fp8":
        PTX: gl.constexpr = FP8_SCALED if shifts is None else FP8_SHIFTED
    elif KIND == "int8":
        PTX: gl.constexpr = INT8_SCALED if shifts is None else INT8_SHIFTED
    else:
        PTX: gl.constexpr = INT4_SCALED if shifts is None else INT4_SHIFTED
    return _operand(PTX, given, layout, of_bytes(KIND))


@gluon.constexpr_function
def of_bytes(kind):
    """Return whether a level is a byte."""
    return kind in ("int8", "fp8")


@gluon.jit
def of_words(plane, TILES: gl.constexpr, BYTES: gl.constexpr):
    """Scales of small groups in shared memory, rows of 128 bytes -> the four bytes that each word needs."""
    GROUPS: gl.constexpr = plane.shape[0] // TILES  # of a tile
    WORDS: gl.constexpr = (8 if BYTES else 4) // GROUPS  # of a group
    layout: gl.constexpr = _scale_layout(TILES, GROUPS)
    bytes_ = plane.load(gl.SliceLayout(2, layout)).expand_dims(2)
    # tile, warp, r, group, byte, pair -> tile, warp, r, pair, group, word, byte
    each = bytes_.broadcast_to([TILES * GROUPS, 128, 4]).reshape([TILES, 4, 8, GROUPS, 4, 4])
    each = each.permute((0, 1, 2, 5, 3, 4)).reshape([TILES, 4, 8, 4, GROUPS, 1, 4])
    wide = each.broadcast_to([TILES, 4, 8, 4, GROUPS, WORDS, 4])
    if BYTES:
        halves = wide.reshape([TILES, 4, 8, 4, 2, 2, 2, 2, 2]).permute((0, 4, 1, 2, 3, 5, 6, 7, 8))
        beside = _in_byte_order(halves, TILES)
    else:
        beside = _in_word_order(wide.reshape([TILES, 4, 8, 4, 4, 2, 2]), TILES)
    return beside


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
def _words(raw, BYTES: gl.constexpr):
    if BYTES:
        TILES: gl.constexpr = raw.shape[0] // 32
        # tile, step of 32, warp, r, pair, step of 16, half, row + 8, odd
        words = _in_byte_order(raw.reshape([TILES, 2, 4, 8, 4, 2, 2, 2, 2]), TILES)
    else:
        TILES: gl.constexpr = raw.shape[0] // 16
        # tile, warp, r, pair, step of 16, odd, half
        words = _in_word_order(raw.reshape([TILES, 4, 8, 4, 4, 2, 2]), TILES)
    return words


# What comes out of a word lies in the order of the operand, whatever the order of its bytes is: `row + 8` and `odd`
# have changed places there.


@gluon.jit
def _in_word_order(bytes_, TILES: gl.constexpr):
    """-> warp, row + 8, r | tile, step, pair, odd: half of the columns; the others come out of the same words."""
    return bytes_.permute((1, 5, 2, 0, 4, 3, 6)).reshape([PIECE, TILES * 32])


@gluon.jit
def _in_byte_order(bytes_, TILES: gl.constexpr):
    """-> warp, row + 8, r | tile, steps of 32 and 16, half, pair, odd."""
    return bytes_.permute((2, 7, 3, 0, 1, 5, 6, 4, 8)).reshape([PIECE, TILES * 64])


@gluon.jit
def _operand(PTX: gl.constexpr, given, layout: gl.constexpr, BYTES: gl.constexpr):
    """What these instructions make of words and of what lies beside them."""
    COLUMNS: gl.constexpr = given[0].shape[1] * (1 if BYTES else 2)
    if BYTES:
        numbers = gl.inline_asm_elementwise(
            PTX, _constraints(2, len(given)), given, gl.bfloat16, True, 4
        )
    else:
        low, high = gl.inline_asm_elementwise(
            PTX, _constraints(4, len(given)), given, (gl.bfloat16, gl.bfloat16), True, 4
        )
        halves = gl.join(low, high).reshape([PIECE, COLUMNS // 16, 8, 2])
        numbers = halves.permute((0, 1, 3, 2)).reshape([PIECE, COLUMNS])
    return gl.convert_layout(numbers, layout, assert_trivial=True)


@gluon.constexpr_function
def _constraints(results, operands):
    """Register constraints of inline PTX whose results are written before all operands are read."""
    return ",".join(["=&r"] * results + ["r"] * operands)

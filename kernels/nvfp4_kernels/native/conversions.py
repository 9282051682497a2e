"""Blackwell's conversions to E2M1. The rest of the arithmetic is `triton/arithmetic.py`'s; so are the bits.

PTX ISA 9: `cvt.rn.satfinite.e2m1x2.f32 d, a, b` rounds to nearest even, saturates at 6 and puts a into the upper four bits.
`cvt.rs.satfinite.e2m1x4.f32 d, {a, b, e, f}, r` rounds stochastically (sm_100a, sm_103a; not sm_120a).
Triton's interpreter has neither: there the portable arithmetic gives the same codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvfp4_kernels.triton.arithmetic import ASM, nibbles_of, round_element

NEAREST, STOCHASTIC, HARDWARE = tl.constexpr("nearest"), tl.constexpr("stochastic"), tl.constexpr("hardware")


@triton.jit
def nearest8(y0, y1, y2, y3, y4, y5, y6, y7):
    """Eight codes in an int32, y0's lowest."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 p, q, r, s;
        cvt.rn.satfinite.e2m1x2.f32 p, $2, $1;
        cvt.rn.satfinite.e2m1x2.f32 q, $4, $3;
        cvt.rn.satfinite.e2m1x2.f32 r, $6, $5;
        cvt.rn.satfinite.e2m1x2.f32 s, $8, $7;
        mov.b32 $0, {p, q, r, s};
        }""",
        "=r,f,f,f,f,f,f,f,f",
        [y0, y1, y2, y3, y4, y5, y6, y7],
        tl.int32,
        True,
        1,
    )


@triton.jit
def stochastic8(y0, y1, y2, y3, y4, y5, y6, y7, low, high):
    """Eight codes in an int32, y0's lowest. Element i takes byte i of its word: `low` for the first four."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 p, q;
        cvt.rs.satfinite.e2m1x4.f32 p, {$4, $3, $2, $1}, $9;
        cvt.rs.satfinite.e2m1x4.f32 q, {$8, $7, $6, $5}, $10;
        mov.b32 $0, {p, q};
        }""",
        "=r,f,f,f,f,f,f,f,f,r,r",
        [y0, y1, y2, y3, y4, y5, y6, y7, low, high],
        tl.int32,
        True,
        1,
    )


@triton.jit
def codes8(v, FIRST: tl.constexpr, encode, random, ROUNDING: tl.constexpr):
    """Codes of v[FIRST] to v[FIRST + 7] in an int32. random: the block's four words."""
    if ROUNDING == STOCHASTIC or not ASM:
        word = tl.zeros_like(random[0])
        for i in tl.static_range(4):
            a, sign_a = round_element(v[FIRST + i], encode, random[FIRST // 4], i, ROUNDING != NEAREST)
            b, sign_b = round_element(
                v[FIRST + 4 + i], encode, random[FIRST // 4 + 1], i, ROUNDING != NEAREST
            )
            word |= nibbles_of(a, b, sign_a, sign_b, 4 * i, ROUNDING != NEAREST)
    else:
        # + 0.0: -0.0 has code 0, a small negative keeps its sign.
        y = ()
        for i in tl.static_range(8):
            y = y + (v[FIRST + i] * encode + 0.0,)  # noqa: RUF005
        if ROUNDING == NEAREST:
            word = nearest8(y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7])
        else:
            words = random[FIRST // 4], random[FIRST // 4 + 1]
            word = stochastic8(y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7], words[0], words[1])
    return word

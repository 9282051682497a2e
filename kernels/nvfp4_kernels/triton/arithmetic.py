"""Device functions: the arithmetic of `reference.py`, a value a lane.

Bits are a contract. Kernels that call these compile with `enable_fp_fusion=False`; every `tl.fma` here has an
exact product. The tricks, all exact:

- 1.5 x 2^22 x P added to a value of binade P (P = 1, 2, 4) leaves a unit of P/2, the E2M1 step: the addition rounds.
- 2^-126 x q has the E2M1 code of q below its exponent's top, bits 8..6 in bf16, since the subnormals of E2M1 and of
  bf16 then coincide; 2^-120 x s likewise has an E4M3 code in bits 26..20 in fp32.
- y + 0.0 clears the sign of -0.0, whose code is 0, and keeps that of a small negative, whose code is 8. It is an addition of
  its own: fused into y's product it would keep the sign of a product that underflows.
- The reciprocal is what `rcp.rn` computes, without its tests for operands that do not occur here.

Triton's interpreter has no inline assembly: there the same results come from plain operations.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions)
from __future__ import annotations

import os

import triton
import triton.language as tl

ASM = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")
FLT_MAX = tl.constexpr(3.4028234663852886e38)
ONE_SIXTH = tl.constexpr(1.0 / 6.0)
SIGN = tl.constexpr(-0x80000000)
EXPONENT = tl.constexpr(0x7F800000)
MAGIC = tl.constexpr(6291456.0)  # 1.5 x 2^22


@triton.jit
def as_int(v):
    return v.to(tl.int32, bitcast=True)


@triton.jit
def as_float(v):
    return v.to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(v):
    """1 / v, correctly rounded, for v from 2^-126 to 2^126; not finite for 0."""
    if ASM:
        r = tl.inline_asm_elementwise(
            "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; fma.rn.f32 e, r, $1, 0fBF800000; neg.f32 e, e; "
            "fma.rn.f32 $0, r, e, r; }",
            "=f,f", [v], tl.float32, True, 1,
        )  # fmt: skip
    else:
        r = tl.div_rn(1.0, v)
    return r


@triton.jit
def tensor_scales(amax):
    """(S_enc / 6, (S_dec, lift)) of a tensor; lift: a power of two with which scale x S_dec x lift is not subnormal."""
    s = tl.minimum(tl.div_rn(2688.0, amax), FLT_MAX)
    s = tl.where((amax == 0.0) | (s == 0.0), 1.0, s)
    decode = tl.div_rn(1.0, s)
    return s * ONE_SIXTH, (decode, tl.where(decode < 2.0**-100, 2.0**24, 1.0))


@triton.jit
def block_scale(block_amax, factor, decode):
    """(scale on the E4M3 grid, factor that the block's elements are multiplied with) of blocks."""
    s = tl.minimum(block_amax * factor, 448.0)
    # E4M3 keeps 3 bits below the leading one, and its step is 2^-9 at and below 2^-6 (exponent 121).
    magic = as_float((tl.maximum(as_int(s), 121 << 23) & EXPONENT) + ((20 << 23) + 0x400000))
    s = (s + magic) - magic
    unit, lift = decode
    # Of a scale 0 the reciprocal is not a number, and the minimum the other.
    return s, tl.minimum(reciprocal(s * unit * lift) * lift, FLT_MAX)


@triton.jit
def scale_byte(s):
    """E4M3 code, int32, of a scale on the grid."""
    return as_int(s * (2.0**-120)) >> 20


@triton.jit
def binade(a):
    """max(1, largest power of two not above a >= 0): twice the E2M1 step for a < 8."""
    return as_float(as_int(tl.maximum(a, 1.0)) & EXPONENT)


@triton.jit
def byte_magic(positive):
    """0x4B000000 in a register, which the compiler can't see through: as a constant it would take prmt's one immediate, and
    the selectors would be moved into registers instead. positive: any fp32 without a sign.
    """
    return (as_int(positive) >> 31) | 0x4B000000


@triton.jit
def random_fraction(word, BYTE: tl.constexpr, magic):
    """Byte BYTE of a 32-bit word, divided by 512, as fp32. magic: `byte_magic`."""
    if ASM:
        if BYTE == 0:
            v = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7440;", "=r,r,r", [word, magic], tl.int32, True, 1
            )
        elif BYTE == 1:
            v = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7441;", "=r,r,r", [word, magic], tl.int32, True, 1
            )
        elif BYTE == 2:
            v = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7442;", "=r,r,r", [word, magic], tl.int32, True, 1
            )
        else:
            v = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7443;", "=r,r,r", [word, magic], tl.int32, True, 1
            )
    else:
        v = ((word >> (8 * BYTE)) & 255) | 0x4B000000
    return tl.fma(as_float(v), 1.0 / 512, -16384.0)  # v is 2^23 + byte


@triton.jit
def round_element(x, encode, word, BYTE: tl.constexpr, STOCHASTIC: tl.constexpr, magic=0x4B000000):
    """y = x * encode, rounded: (magnitude, a fp32 whose sign bit is that of the code).

    `magnitudes_of` does the rest: it cuts at 6, and rounds a stochastic magnitude down to the grid.
    """
    y = x * encode
    a = tl.abs(y)
    p = binade(a)
    if STOCHASTIC:
        q = tl.fma(random_fraction(word, BYTE, magic), p, a)
    else:
        q = tl.fma(p, -MAGIC, tl.fma(p, MAGIC, a))
    return q, y + 0.0


@triton.jit
def magnitudes_of(a, b):
    """Two magnitudes from `round_element` as bf16 in an int32, at most 6. Truncation keeps all that rounding down needs."""
    return minimum_bf16x2(pack2(a, b), 0x40C040C0)


@triton.jit
def codes_of(a, b, STOCHASTIC: tl.constexpr):
    """The 3-bit codes of two magnitudes, in bits 8..6 and 24..22 of an int32: 2^-126 q in bf16."""
    w = magnitudes_of(a, b)
    if STOCHASTIC:
        # Two bits below the leading one tell on which side of each grid point t lies; below 1 the product keeps
        # 2^-7, so that it cannot round across 0.5.
        z = multiply_bf16x2(w & -0x1F0020, 0x00800080) & 0x01C001C0
    else:
        z = multiply_bf16x2(w, 0x00800080)
    return z


@triton.jit
def operands_of(a, b, sign_a, sign_b, scales, STOCHASTIC: tl.constexpr):
    """Two bf16 operands e2m1 * scale in an int32. scales: the two blocks' scales, bf16 in an int32."""
    if STOCHASTIC:
        q = multiply_bf16x2(codes_of(a, b, STOCHASTIC), 0x7E807E80)  # x 2^126
    else:
        q = magnitudes_of(a, b)
    return multiply_bf16x2(q, scales) | (pack2(sign_a, sign_b) & -0x7FFF8000)


@triton.jit
def nibbles_of(a, b, sign_a, sign_b, AT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Two 4-bit codes in bits AT.. and AT+16.. of an int32 (AT = 0, 4, 8, 12)."""
    signs = (pack2(sign_a, sign_b) >> 6) & 0x02000200
    pair = codes_of(a, b, STOCHASTIC) | signs
    if AT < 6:
        pair = pair >> (6 - AT)
    else:
        pair = pair << (AT - 6)
    return pair


@triton.jit
def minimum_bf16x2(a, b):
    """Minima of two pairs of bf16 >= 0, each in an int32; of a NaN and a number the number."""
    if ASM:
        r = tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        r = tl.minimum(a & 0x7FFF, b & 0x7FFF) | (tl.minimum((a >> 16) & 0x7FFF, b >> 16) << 16)
    return r


@triton.jit
def multiply_bf16x2(a, b):
    """Products of two pairs of bf16, each in an int32."""
    if ASM:
        r = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, -0x7FFF8000], tl.int32, True, 1
        )
    else:
        b = tl.zeros_like(a) + b
        low = _round_to_bf16(as_float(a << 16) * as_float(b << 16))
        high = _round_to_bf16(as_float(a & -0x10000) * as_float(b & -0x10000))
        r = pack2(low, high)
    return r


@triton.jit
def nibble_value(word, AT: tl.constexpr, scale):
    """e2m1 * scale of the code in bits AT..AT+3 of an int32. scale: 2^118 times an E4M3 number."""
    code = (word >> AT) & 7
    magnitude = as_float(code << 22) * scale * 256.0
    return as_float(as_int(magnitude) | ((word << (28 - AT)) & SIGN))


@triton.jit
def scale_value(byte):
    """2^118 times the E4M3 number with this code (int32)."""
    return as_float((byte & 127) << 20) * (2.0**120) * (2.0**118)


@triton.jit
def round_to_bf16(a, b):
    """Two fp32 tensors -> nearest bf16 numbers (ties to even), in an int32."""
    if ASM:
        r = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1)
    else:
        r = pack2(_round_to_bf16(a), _round_to_bf16(b))
    return r


@triton.jit
def unpack2(word):
    """Two bf16 numbers of an int32, as fp32."""
    return as_float(word << 16), as_float(word & -0x10000)


@triton.jit
def _round_to_bf16(v):
    b = as_int(v)
    return tl.where(v == v, as_float((b + 0x7FFF + ((b >> 16) & 1)) & -0x10000), v)


@triton.jit
def unpack4(word):
    """Four bf16 numbers of an int64, as fp32."""
    return unpack2(word.to(tl.int32)) + unpack2((word >> 32).to(tl.int32))


@triton.jit
def unpack_word(word, BF16: tl.constexpr):
    """The numbers of an int64 word, as fp32: four bf16 or two fp32."""
    if BF16:
        v = unpack4(word)
    else:
        v = (as_float(word.to(tl.int32)), as_float((word >> 32).to(tl.int32)))
    return v


@triton.jit
def largest(v):
    """max |v| of 16 tensors."""
    m = tl.abs(v[0])
    for i in tl.static_range(1, 16):
        m = tl.maximum(m, tl.abs(v[i]))
    return m


@triton.jit
def pack2(a, b):
    """The upper halves of two fp32 tensors in an int32: two numbers exact in bf16, or truncated to it."""
    if ASM:
        r = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,f,f", [a, b], tl.int32, True, 1)
    else:
        r = ((as_int(a) >> 16) & 0xFFFF) | (as_int(b) & -0x10000)
    return r


@triton.jit
def join_words(low, high):
    """Two int32 -> int64."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10: four uint32 counter words, two key words -> four int32 words."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return as_int(c0), as_int(c1), as_int(c2), as_int(c3)


@triton.jit
def key_word(field):
    """An int, or an integer in device memory, as uint32."""
    if field.dtype.is_ptr():
        field = tl.load(field)
    return field.to(tl.uint32)


@triton.jit
def load_key(key):
    """key with the fields read that lie in device memory."""
    seed, step, microbatch, tensor, role, first_row, first_block = key
    return (
        key_word(seed),
        key_word(step),
        key_word(microbatch),
        key_word(tensor),
        role,
        first_row,
        first_block,
    )


@triton.jit
def block_words(key, row, block):
    """The 16 random bytes of block `block` of row `row` as four words; see random_bits.py.

    key: (seed, step, micro-batch, tensor, role, first row, first block).
    """
    seed, step, microbatch, tensor, role, first_row, first_block = key
    return philox(
        (block + first_block).to(tl.uint32),
        (row + first_row).to(tl.uint32),
        key_word(step),
        key_word(microbatch),
        key_word(seed),
        key_word(tensor) * 4 + role.to(tl.uint32),
    )


@triton.jit
def butterfly(v, SIGNS: tl.constexpr):
    """The first three of the four stages of the 16-point Hadamard transform of 16 values, signs first.

    SIGNS: bit i is set where value i is negated.
    """
    s = ()
    for i in tl.static_range(16):
        s = s + ((v[i] * -1.0 if (SIGNS >> i) & 1 else v[i]),)  # Triton's -v is 0 - v, an addition
    for stage in tl.static_range(3):
        out = ()
        for i in tl.static_range(16):
            if (i >> stage) & 1:
                out = out + (s[i - (1 << stage)] - s[i],)
            else:
                out = out + (s[i] + s[i + (1 << stage)],)
        s = out
    return s


@triton.jit
def hadamard(v, SIGNS: tl.constexpr):
    """The 16-point random Hadamard transform of 16 values, as bf16 numbers in fp32.

    The last stage and x 0.25 are one fma: sums of bf16 numbers are multiples of 2^-133, so no quarter is rounded.
    """
    s = butterfly(v, SIGNS)
    quarter = ()
    for i in tl.static_range(8):
        quarter = quarter + (s[8 + i] * 0.25,)
    out = ()
    for i in tl.static_range(0, 8, 2):
        out = out + unpack2(
            round_to_bf16(tl.fma(s[i], 0.25, quarter[i]), tl.fma(s[i + 1], 0.25, quarter[i + 1]))
        )
    for i in tl.static_range(0, 8, 2):
        out = out + unpack2(
            round_to_bf16(
                tl.fma(s[i], 0.25, quarter[i] * -1.0), tl.fma(s[i + 1], 0.25, quarter[i + 1] * -1.0)
            )
        )
    return out

// NVFP4 quantize kernels for CPUs: the arithmetic of reference.py, one 16-element block a vector register.
//
// Bits are a contract: compiled without fast-math and without FMA contraction. One read of x serves the
// row-wise and the column-wise half; a column block's 16 tokens are 16 registers, so that its Hadamard
// butterfly, its maximum and its rounding run vertically, and its results lie with channels contiguous.

#include <cstdint>
#include <cstring>
#include <cmath>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));

static constexpr float kFltMax = 3.402823466e+38f;

enum Output { OPERAND_BF16 = 0, OPERAND_F32 = 1, CODES = 2 };

// One orientation of the result; enabled == 0 leaves it out. Layouts ([rows, cols] is x's shape):
//   rows:    operand [rows, cols], codes [rows, cols/2], scales [rows, cols/16]
//   columns: operand [rows, cols], codes [rows/2, cols], scales [rows/16, cols]   (token pairs share a byte)
struct Half {
  int64_t enabled;
  int64_t output;
  int64_t stochastic;
  int64_t hadamard;        // columns only
  const float* amax;       // the tensor's (for columns: after the transform)
  const int64_t* key;      // six words, see random_bits.py
  void* operand;
  uint8_t* codes;
  uint8_t* scales;
};

static inline f32x16 as_f(i32x16 v) { f32x16 r; memcpy(&r, &v, 64); return r; }
static inline i32x16 as_i(f32x16 v) { i32x16 r; memcpy(&r, &v, 64); return r; }
static inline f32x16 splat(float v) { return v - f32x16{}; }
static inline f32x16 vmin(f32x16 a, f32x16 b) { return a < b ? a : b; }
static inline f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }
static inline f32x16 vabs(f32x16 a) { return as_f(as_i(a) & 0x7fffffff); }
static inline i32x16 imax(i32x16 a, i32x16 b) { return a > b ? a : b; }

static inline f32x16 load(const uint16_t* p) {
  u16x16 h; memcpy(&h, p, 32);
  return as_f((i32x16)(__builtin_convertvector(h, u32x16) << 16));
}
static inline f32x16 load(const float* p) { f32x16 v; memcpy(&v, p, 64); return v; }

static inline void store_operand(void* base, int64_t index, f32x16 v, int64_t output) {
  if (output == OPERAND_F32) { memcpy((float*)base + index, &v, 64); return; }
  u16x16 h = __builtin_convertvector((u32x16)as_i(v) >> 16, u16x16);  // exact: at most 6 significant bits
  memcpy((uint16_t*)base + index, &h, 32);
}

static inline f32x16 round_to_bf16(f32x16 v) {  // nearest even; NaN stays NaN
  u32x16 b = (u32x16)as_i(v);
  u32x16 r = (b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000u;
  return v == v ? as_f((i32x16)r) : v;
}

// Largest value of each of 16 vectors: halves of two are compared in one vector, 15 comparisons in all.
static inline i32x16 reduce_rows(i32x16 v[16]) {
  const i32x16 a8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, b8 = a8 + 8;
  const i32x16 a4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, b4 = a4 + 4;
  const i32x16 a2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}, b2 = a2 + 2;
  const i32x16 a1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, b1 = a1 + 1;
  for (int i = 0; i < 8; i++) v[i] = imax(__builtin_shuffle(v[2 * i], v[2 * i + 1], a8), __builtin_shuffle(v[2 * i], v[2 * i + 1], b8));
  for (int i = 0; i < 4; i++) v[i] = imax(__builtin_shuffle(v[2 * i], v[2 * i + 1], a4), __builtin_shuffle(v[2 * i], v[2 * i + 1], b4));
  for (int i = 0; i < 2; i++) v[i] = imax(__builtin_shuffle(v[2 * i], v[2 * i + 1], a2), __builtin_shuffle(v[2 * i], v[2 * i + 1], b2));
  return imax(__builtin_shuffle(v[0], v[1], a1), __builtin_shuffle(v[0], v[1], b1));
}

// Largest absolute value, as bits: integer order is magnitude order, and NaN comes out on top.
static inline int32_t reduce_bits(i32x16 v) {
  i32x8 a, b; memcpy(&a, &v, 32); memcpy(&b, (char*)&v + 32, 32);
  a = a > b ? a : b;
  i32x4 c, d; memcpy(&c, &a, 16); memcpy(&d, (char*)&a + 16, 16);
  c = c > d ? c : d;
  int32_t m = c[0] > c[1] ? c[0] : c[1], n = c[2] > c[3] ? c[2] : c[3];
  return m > n ? m : n;
}

// Sixteen codes of one row -> eight bytes.
static inline void store_codes(uint8_t* out, i32x16 codes) {
  u64x8 pairs = (u64x8)codes;
  u8x8 packed = __builtin_convertvector(pairs | (pairs >> 28), u8x8);
  memcpy(out, &packed, 8);
}

struct TensorScale { float factor, decode; };

static inline TensorScale tensor_scale(float amax) {
  float s = 2688.0f / amax;
  if (s > kFltMax) s = kFltMax;
  if (amax == 0.0f || s == 0.0f) s = 1.0f;
  return {s * (1.0f / 6.0f), 1.0f / s};
}

// E4M3 scales of 16 blocks, as exact floats.
static inline f32x16 block_scale(f32x16 block_amax, TensorScale t) {
  f32x16 s = vmin(block_amax * t.factor, splat(448.0f));
  i32x16 e = imax((as_i(s) >> 23) & 255, i32x16{} + 121);  // at and below 2^-6 the step is 2^-9
  f32x16 magic = as_f((e - 3) << 23) * 12582912.0f;        // 1.5 x 2^23 steps: the sum rounds to the grid
  return (s + magic) - magic;
}

static inline f32x16 encode_factor(f32x16 scale, TensorScale t) {
  return vmin(1.0f / (scale * t.decode), splat(kFltMax));
}

static inline u8x16 scale_bytes(f32x16 s) {
  i32x16 normal = (as_i(s) >> 20) - (120 << 3);
  i32x16 subnormal = __builtin_convertvector(s * 512.0f, i32x16);
  i32x16 b = s < 0.015625f ? subnormal : normal;
  return __builtin_convertvector((u32x16)b & 255u, u8x16);
}

// max(1, largest power of two not above a): twice E2M1's step at a < 8.
static inline f32x16 binade(f32x16 a) { return as_f(as_i(vmax(a, splat(1.0f))) & 0x7f800000); }

// |y| <= 6 -> E2M1 magnitude: the sum with 1.5 x 2^23 steps rounds to nearest, ties to even.
static inline f32x16 round_nearest(f32x16 a) {
  f32x16 magic = binade(a) * 6291456.0f;
  return (a + magic) - magic;
}
// From 1 on the grid is what one bit below the leading one can say, below 1 it is 0 and 0.5.
static inline f32x16 round_stochastic(f32x16 a, f32x16 bytes) {
  f32x16 t = a + bytes * (1.0f / 512) * binade(a);
  f32x16 low = t >= 0.5f ? splat(0.5f) : f32x16{};
  return vmin(t < 1.0f ? low : as_f(as_i(t) & (int32_t)0xffc00000), splat(6.0f));
}

// x -> magnitude, and the code's sign in bit 31: adding 0 clears that of -0.0, whose code is 0.
static inline f32x16 quantize(f32x16 x, f32x16 encode, const f32x16* bytes, i32x16* sign) {
  f32x16 y = x * encode;
  *sign = as_i(y + 0.0f) & (int32_t)0x80000000;
  f32x16 a = vmin(vabs(y), splat(6.0f));
  return bytes ? round_stochastic(a, *bytes) : round_nearest(a);
}
static inline f32x16 operand(f32x16 q, i32x16 sign, f32x16 scale) { return as_f(as_i(q * scale) | sign); }

// From 1 on a code is the exponent and the bit below it; 0.5 has code 1.
static inline i32x16 code(f32x16 q, i32x16 sign) {
  return imax((as_i(q) >> 22) - 252, (q >= 0.5f) & 1) | (i32x16)((u32x16)sign >> 28);
}

// Philox4x32-10 for 16 counters at once.
static inline u64x8 mul32(u64x8 a, uint64_t m) {  // of the low halves
#ifdef __AVX512F__
  return (u64x8)_mm512_mul_epu32((__m512i)a, (__m512i)(u64x8{} + m));
#else
  return (a & 0xffffffffu) * m;
#endif
}
static inline void mul_hi_lo(u32x16 a, uint64_t m, u32x16* hi, u32x16* lo) {
  u64x8 even = mul32((u64x8)a, m), odd = mul32((u64x8)a >> 32, m);
  const u64x8 low = u64x8{} + 0xffffffffu;
  *hi = (u32x16)((even >> 32) | (odd & ~low));
  *lo = (u32x16)((even & low) | (odd << 32));
}
static inline void philox(u32x16 c[4], uint32_t k0, uint32_t k1) {
  for (int i = 0; i < 10; i++) {
    u32x16 h0, l0, h1, l1;
    mul_hi_lo(c[0], 0xD2511F53u, &h0, &l0);
    mul_hi_lo(c[2], 0xCD9E8D57u, &h1, &l1);
    u32x16 n0 = h1 ^ c[1] ^ k0, n2 = h0 ^ c[3] ^ k1;
    c[0] = n0; c[1] = l1; c[2] = n2; c[3] = l0;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
}
static inline u32x16 iota() { return u32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// The random bytes of 16 rows' block at col, four rows a vector; key: six words, see random_bits.py.
static inline void row_words(const int64_t* k, int64_t row, int64_t col, u32x16 words[4]) {
  u32x16 c[4] = {u32x16{} + (uint32_t)(k[5] + col / 16), iota() + (uint32_t)(k[4] + row),
                 u32x16{} + (uint32_t)k[2], u32x16{} + (uint32_t)k[3]};
  philox(c, (uint32_t)k[0], (uint32_t)k[1]);
  const i32x16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
  const i32x16 first = {0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23}, second = first + 8;
  u32x16 a = __builtin_shuffle(c[0], c[1], low), b = __builtin_shuffle(c[2], c[3], low);
  u32x16 d = __builtin_shuffle(c[0], c[1], high), e = __builtin_shuffle(c[2], c[3], high);
  words[0] = __builtin_shuffle(a, b, first); words[1] = __builtin_shuffle(a, b, second);
  words[2] = __builtin_shuffle(d, e, first); words[3] = __builtin_shuffle(d, e, second);
}
// The random words of 16 channels' block of 16 tokens: token i takes byte i % 4 of word i / 4.
static inline void column_words(const int64_t* k, int64_t row, int64_t col, u32x16 c[4]) {
  c[0] = u32x16{} + (uint32_t)(k[5] + row / 16); c[1] = iota() + (uint32_t)(k[4] + col);
  c[2] = u32x16{} + (uint32_t)k[2]; c[3] = u32x16{} + (uint32_t)k[3];
  philox(c, (uint32_t)k[0], (uint32_t)k[1]);
}

// Up to 16 rows of one block column, row-wise. `index` addresses element (row, col) of x.
template <typename T>
static void rows_tile(const T* x, int64_t cols, int64_t row, int64_t col, int height, const Half& h, TensorScale t) {
  f32x16 v[16];
  i32x16 bits[16];
  for (int r = 0; r < 16; r++) {
    v[r] = load(x + (row + (r < height ? r : 0)) * cols + col);
    bits[r] = as_i(v[r]) & 0x7fffffff;
  }
  f32x16 block_amax = as_f(reduce_rows(bits));
  f32x16 scales = block_scale(block_amax, t), encodes = encode_factor(scales, t);
  float scale[16], encode[16];
  memcpy(scale, &scales, 64); memcpy(encode, &encodes, 64);
  u32x16 words[4];
  if (h.stochastic) row_words(h.key, row, col, words);
  u8x16 bytes_of_scale = scale_bytes(scales);
  for (int r = 0; r < height; r++) {
    f32x16 random;
    if (h.stochastic) {
      u8x16 b; memcpy(&b, (char*)words + 16 * r, 16);
      random = __builtin_convertvector(b, f32x16);
    }
    i32x16 sign;
    f32x16 q = quantize(v[r], splat(encode[r]), h.stochastic ? &random : nullptr, &sign);
    if (h.output == CODES) {
      store_codes(h.codes + (row + r) * (cols / 2) + col / 2, code(q, sign));
      h.scales[(row + r) * (cols / 16) + col / 16] = bytes_of_scale[r];
    } else {
      store_operand(h.operand, (row + r) * cols + col, operand(q, sign, splat(scale[r])), h.output);
    }
  }
}

// The first three of the four stages of the Hadamard transform, signs first.
static inline void butterfly(f32x16 v[16], const float* signs) {
  for (int i = 0; i < 16; i++) v[i] = v[i] * signs[i];
#pragma GCC unroll 3
  for (int s = 1; s < 8; s *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (!(i & s)) {
        f32x16 a = v[i], b = v[i + s];
        v[i] = a + b; v[i + s] = a - b;
      }
}
static inline void hadamard(f32x16 v[16], const float* signs) {
  butterfly(v, signs);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    f32x16 a = v[i], b = v[i + 8];
    v[i] = round_to_bf16((a + b) * 0.25f); v[i + 8] = round_to_bf16((a - b) * 0.25f);
  }
}

// 16 rows (tokens) x 16 columns (channels), column-wise: lane = channel, register = token.
template <typename T>
static void columns_tile(const T* x, int64_t cols, int64_t row, int64_t col, const Half& h, TensorScale t, const float* signs) {
  f32x16 v[16];
  for (int r = 0; r < 16; r++) v[r] = load(x + (row + r) * cols + col);
  if (h.hadamard) hadamard(v, signs);
  i32x16 bits{};
  for (int r = 0; r < 16; r++) bits = imax(bits, as_i(v[r]) & 0x7fffffff);
  f32x16 scale = block_scale(as_f(bits), t), encode = encode_factor(scale, t);
  u32x16 c[4];
  if (h.stochastic) column_words(h.key, row, col, c);
  u32x16 low{};
  for (int r = 0; r < 16; r++) {
    f32x16 random;
    if (h.stochastic) random = __builtin_convertvector((i32x16)((c[r / 4] >> (8 * (r % 4))) & 255u), f32x16);
    i32x16 sign;
    f32x16 q = quantize(v[r], encode, h.stochastic ? &random : nullptr, &sign);
    if (h.output == CODES) {
      u32x16 k = (u32x16)code(q, sign);
      if (r % 2 == 0) { low = k; continue; }
      u8x16 packed = __builtin_convertvector(low | (k << 4), u8x16);
      memcpy(h.codes + (row + r) / 2 * cols + col, &packed, 16);
    } else {
      store_operand(h.operand, (row + r) * cols + col, operand(q, sign, scale), h.output);
    }
  }
  if (h.output == CODES) {
    u8x16 b = scale_bytes(scale);
    memcpy(h.scales + row / 16 * cols + col, &b, 16);
  }
}

template <typename T>
static void quantize_halves(const T* x, int64_t rows, int64_t cols, const Half* r, const Half* c, const float* signs) {
  TensorScale tr = r->enabled ? tensor_scale(*r->amax) : TensorScale{};
  TensorScale tc = c->enabled ? tensor_scale(*c->amax) : TensorScale{};
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row += 16) {
    int height = rows - row < 16 ? (int)(rows - row) : 16;
    for (int64_t col = 0; col < cols; col += 16) {
      if (r->enabled) rows_tile(x, cols, row, col, height, *r, tr);
      if (c->enabled) columns_tile(x, cols, row, col, *c, tc, signs);
    }
  }
}

// The transform's rounding is monotonic, so the maximum alone is rounded; its last stage is max(|a + b|, |a - b|) = |a| + |b|.
template <typename T>
static void amax_pair(const T* x, int64_t rows, int64_t cols, int hadamard, const float* signs, float* out) {
  int32_t raw = 0, transformed = 0;
#pragma omp parallel for schedule(static) reduction(max : raw, transformed)
  for (int64_t row = 0; row < rows; row += 16) {
    int height = rows - row < 16 ? (int)(rows - row) : 16;
    i32x16 m{}, n{};
    for (int64_t col = 0; col < cols; col += 16) {
      f32x16 v[16];
      for (int r = 0; r < height; r++) {
        v[r] = load(x + (row + r) * cols + col);
        m = imax(m, as_i(v[r]) & 0x7fffffff);
      }
      if (hadamard) {
        butterfly(v, signs);
        for (int r = 0; r < 8; r++) n = imax(n, as_i(vabs(v[r]) + vabs(v[r + 8])));
      }
    }
    int32_t a = reduce_bits(m), b = reduce_bits(as_i(round_to_bf16(as_f(n) * 0.25f)));
    raw = a > raw ? a : raw;
    transformed = b > transformed ? b : transformed;
  }
  memcpy(out, &raw, 4);
  memcpy(out + 1, &transformed, 4);
}

template <typename T>
static void quantize_square(const T* x, int64_t rows, int64_t cols, const Half* h) {
  TensorScale t = tensor_scale(*h->amax);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row += 16)
    for (int64_t col = 0; col < cols; col += 16) {
      f32x16 v[16];
      i32x16 bits{};
      for (int r = 0; r < 16; r++) {
        v[r] = load(x + (row + r) * cols + col);
        bits = imax(bits, as_i(v[r]) & 0x7fffffff);
      }
      int32_t m = reduce_bits(bits);
      float amax; memcpy(&amax, &m, 4);
      f32x16 scale = block_scale(splat(amax), t), encode = encode_factor(scale, t);
      uint8_t byte = scale_bytes(scale)[0];
      for (int r = 0; r < 16; r++) {
        i32x16 sign;
        f32x16 q = quantize(v[r], encode, nullptr, &sign);
        if (h->output == CODES) {
          store_codes(h->codes + (row + r) * (cols / 2) + col / 2, code(q, sign));
          h->scales[(row + r) * (cols / 16) + col / 16] = byte;
        } else {
          store_operand(h->operand, (row + r) * cols + col, operand(q, sign, scale), h->output);
        }
      }
    }
}

static inline f32x16 scale_value(u8x16 b) {
  i32x16 i = (i32x16)__builtin_convertvector(b, u32x16) & 127;
  f32x16 normal = as_f((i << 20) + (120 << 23));
  f32x16 subnormal = __builtin_convertvector(i, f32x16) * (1.0f / 512);
  return i < 8 ? subnormal : normal;
}

static inline f32x16 element_value(i32x16 c) {
  const f32x16 values = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return __builtin_shuffle(values, c);  // takes the index modulo 16
}

// ---- MXFP4 and blockwise FP8 (blockscaled.py): power-of-two scales, any of the blocks 1 x n, n x 1, n x n ----

struct PowerOfTwo { int32_t round_up, offset, least; };  // see BlockFormat in blockscaled.py
enum Element { E2M1 = 0, E4M3 = 1 };

static inline i32x16 scale_code(i32x16 amax_bits, PowerOfTwo f) {
  i32x16 code = imax(((amax_bits + f.round_up) >> 23) - f.offset, i32x16{} + f.least);
  return amax_bits >= 0x7f800000 ? i32x16{} + 255 : code;
}
static inline f32x16 scale_of(i32x16 code) { return as_f(code == 255 ? i32x16{} + 0x7fc00000 : code << 23); }
static inline f32x16 inverse_of(i32x16 code) { return as_f(((254 - code) & 255) << 23); }

template <int element>
static inline f32x16 round_element(f32x16 v, f32x16 inverse, const f32x16* bytes, i32x16* sign) {
  if (element == E2M1) return quantize(v, inverse, bytes, sign);
  f32x16 y = v * inverse, a = vabs(y);
  *sign = as_i(y) & (int32_t)0x80000000;
  i32x16 e = imax((as_i(a) >> 23) & 255, i32x16{} + 121);
  f32x16 magic = as_f((e - 3) << 23) * 12582912.0f;
  return (a + magic) - magic;
}

// One vector of 16 elements of a row: operand, or codes when its pairs lie along the row.
template <int element>
static inline void store_row(void* out, int64_t output, int64_t index, f32x16 q, i32x16 sign, f32x16 scale) {
  if (output != CODES) { store_operand(out, index, operand(q, sign, scale), output); return; }
  if (element == E2M1) { store_codes((uint8_t*)out + index / 2, code(q, sign)); return; }
  u8x16 b = scale_bytes(q) | __builtin_convertvector((u32x16)sign >> 24, u8x16);
  memcpy((uint8_t*)out + index, &b, 16);
}

template <typename T, int element>
static void blocks_in_rows(const T* x, int64_t rows, int64_t cols, int64_t n, PowerOfTwo f, const int64_t* key, int64_t output, void* out, uint8_t* scales) {
  int64_t across = (cols + n - 1) / n;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row += 16)
    for (int64_t b = 0; b < across; b++) {
      int height = rows - row < 16 ? (int)(rows - row) : 16;
      int64_t end = (b + 1) * n < cols ? (b + 1) * n : cols;
      i32x16 bits[16] = {};
      for (int r = 0; r < height; r++)
        for (int64_t col = b * n; col < end; col += 16) bits[r] = imax(bits[r], as_i(load(x + (row + r) * cols + col)) & 0x7fffffff);
      i32x16 codes = scale_code(reduce_rows(bits), f);
      f32x16 scale = scale_of(codes), inverse = inverse_of(codes);
      if (output == CODES) for (int r = 0; r < height; r++) scales[(row + r) * across + b] = (uint8_t)codes[r];
      for (int64_t col = b * n; col < end; col += 16) {
        u32x16 words[4];
        if (key) row_words(key, row, col, words);
        for (int r = 0; r < height; r++) {
          f32x16 random;
          if (key) { u8x16 w; memcpy(&w, (char*)words + 16 * r, 16); random = __builtin_convertvector(w, f32x16); }
          i32x16 sign;
          f32x16 q = round_element<element>(load(x + (row + r) * cols + col), splat(inverse[r]), key ? &random : nullptr, &sign);
          store_row<element>(out, output, (row + r) * cols + col, q, sign, splat(scale[r]));
        }
      }
    }
}

template <typename T, int element>
static void blocks_in_columns(const T* x, int64_t rows, int64_t cols, int64_t n, PowerOfTwo f, const int64_t* key, int64_t output, void* out, uint8_t* scales) {
#pragma omp parallel for schedule(static)
  for (int64_t top = 0; top < rows; top += n)
    for (int64_t col = 0; col < cols; col += 16) {
      int64_t end = top + n < rows ? top + n : rows;
      i32x16 bits{};
      for (int64_t r = top; r < end; r++) bits = imax(bits, as_i(load(x + r * cols + col)) & 0x7fffffff);
      i32x16 codes = scale_code(bits, f);
      f32x16 scale = scale_of(codes), inverse = inverse_of(codes);
      if (output == CODES) {
        u8x16 b = __builtin_convertvector((u32x16)codes, u8x16);
        memcpy(scales + top / n * cols + col, &b, 16);
      }
      u32x16 c[4], low{};
      for (int64_t r = top; r < end; r++) {
        if (key && r % 16 == 0) column_words(key, r, col, c);
        f32x16 random;
        if (key) random = __builtin_convertvector((i32x16)((c[r % 16 / 4] >> (8 * (r % 4))) & 255u), f32x16);
        i32x16 sign;
        f32x16 q = round_element<element>(load(x + r * cols + col), inverse, key ? &random : nullptr, &sign);
        if (output != CODES || element == E4M3) { store_row<element>(out, output, r * cols + col, q, sign, scale); continue; }
        u32x16 k = (u32x16)code(q, sign);
        if (r % 2 == 0) { low = k; continue; }
        u8x16 packed = __builtin_convertvector(low | (k << 4), u8x16);
        memcpy((uint8_t*)out + r / 2 * cols + col, &packed, 16);
      }
    }
}

template <typename T, int element>
static void square_blocks(const T* x, int64_t rows, int64_t cols, int64_t n, PowerOfTwo f, int64_t output, void* out, uint8_t* scales) {
  int64_t across = (cols + n - 1) / n;
#pragma omp parallel for schedule(static)
  for (int64_t top = 0; top < rows; top += n)
    for (int64_t b = 0; b < across; b++) {
      int64_t bottom = top + n < rows ? top + n : rows, end = (b + 1) * n < cols ? (b + 1) * n : cols;
      i32x16 bits{};
      for (int64_t r = top; r < bottom; r++)
        for (int64_t col = b * n; col < end; col += 16) bits = imax(bits, as_i(load(x + r * cols + col)) & 0x7fffffff);
      i32x16 codes = scale_code(i32x16{} + reduce_bits(bits), f);
      f32x16 scale = scale_of(codes), inverse = inverse_of(codes);
      if (output == CODES) scales[top / n * across + b] = (uint8_t)codes[0];
      for (int64_t r = top; r < bottom; r++)
        for (int64_t col = b * n; col < end; col += 16) {
          i32x16 sign;
          f32x16 q = round_element<element>(load(x + r * cols + col), inverse, nullptr, &sign);
          store_row<element>(out, output, r * cols + col, q, sign, scale);
        }
    }
}

template <typename T, int element>
static void quantize_blocks(const T* x, int64_t rows, int64_t cols, int64_t height, int64_t width, PowerOfTwo f, const int64_t* key, int64_t output, void* out, uint8_t* scales) {
  if (height == 1) blocks_in_rows<T, element>(x, rows, cols, width, f, key, output, out, scales);
  else if (width == 1) blocks_in_columns<T, element>(x, rows, cols, height, f, key, output, out, scales);
  else square_blocks<T, element>(x, rows, cols, height, f, output, out, scales);
}

template <int element>
static void expand_blocks(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols, int64_t n, int64_t output, void* out) {
#pragma omp parallel for schedule(static)
  for (int64_t top = 0; top < rows; top += n)
    for (int64_t col = 0; col < cols; col += 16) {
      int64_t end = top + n < rows ? top + n : rows;
      u8x16 b; memcpy(&b, scales + top / n * cols + col, 16);
      f32x16 scale = scale_of((i32x16)__builtin_convertvector(b, u32x16));
      for (int64_t r = top; r < end; r++) {
        u8x16 p; memcpy(&p, codes + (element == E2M1 ? r / 2 : r) * cols + col, 16);
        i32x16 c = (i32x16)__builtin_convertvector(p, u32x16);
        f32x16 v;
        if (element == E2M1) v = element_value(r % 2 ? c >> 4 : c);
        else { f32x16 m = scale_value(p); v = as_f(as_i(m) | ((c & 128) << 24)); }
        store_operand(out, r * cols + col, v * scale, output);
      }
    }
}

extern "C" {

// dtype: 0 bf16, 1 fp32. signs: 16 floats of the Hadamard transform, null where none is wanted.
void nvfp4_amax(const void* x, int dtype, int64_t rows, int64_t cols, const float* signs, float* out) {
  if (dtype == 0) amax_pair((const uint16_t*)x, rows, cols, signs != nullptr, signs, out);
  else amax_pair((const float*)x, rows, cols, signs != nullptr, signs, out);
}

void nvfp4_quantize(const void* x, int dtype, int64_t rows, int64_t cols, const Half* r, const Half* c, const float* signs) {
  if (dtype == 0) quantize_halves((const uint16_t*)x, rows, cols, r, c, signs);
  else quantize_halves((const float*)x, rows, cols, r, c, signs);
}

void nvfp4_quantize_square(const void* x, int dtype, int64_t rows, int64_t cols, const Half* h) {
  if (dtype == 0) quantize_square((const uint16_t*)x, rows, cols, h);
  else quantize_square((const float*)x, rows, cols, h);
}

// Column codes [rows/2, cols] and scales [rows/16, cols] -> operand [rows, cols].
void nvfp4_expand_columns(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols, int output, void* operand) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row += 16)
    for (int64_t col = 0; col < cols; col += 16) {
      u8x16 b; memcpy(&b, scales + row / 16 * cols + col, 16);
      f32x16 scale = scale_value(b);
      for (int r = 0; r < 16; r += 2) {
        u8x16 p; memcpy(&p, codes + (row + r) / 2 * cols + col, 16);
        i32x16 c = (i32x16)__builtin_convertvector(p, u32x16);
        store_operand(operand, (row + r) * cols + col, element_value(c) * scale, output);
        store_operand(operand, (row + r + 1) * cols + col, element_value(c >> 4) * scale, output);
      }
    }
}

// Blocks of height x width, one of them 1, or both n. Layouts as x's; scales [rows / height, cols / width], rounded up.
void nvfp4_quantize_blocks(const void* x, int dtype, int64_t rows, int64_t cols, int64_t height, int64_t width, int element,
                           int32_t round_up, int32_t offset, int32_t least, const int64_t* key, int64_t output, void* out, uint8_t* scales) {
  PowerOfTwo f{round_up, offset, least};
  if (dtype == 0 && element == E2M1) quantize_blocks<uint16_t, E2M1>((const uint16_t*)x, rows, cols, height, width, f, key, output, out, scales);
  else if (dtype == 0) quantize_blocks<uint16_t, E4M3>((const uint16_t*)x, rows, cols, height, width, f, key, output, out, scales);
  else if (element == E2M1) quantize_blocks<float, E2M1>((const float*)x, rows, cols, height, width, f, key, output, out, scales);
  else quantize_blocks<float, E4M3>((const float*)x, rows, cols, height, width, f, key, output, out, scales);
}

// Column codes and scales [rows / n, cols] -> operand [rows, cols].
void nvfp4_expand_blocks(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols, int64_t n, int element, int64_t output, void* out) {
  if (element == E2M1) expand_blocks<E2M1>(codes, scales, rows, cols, n, output, out);
  else expand_blocks<E4M3>(codes, scales, rows, cols, n, output, out);
}

// The 32-point transform of each 32 rows of a column; rows % 32 == 0, cols % 16 == 0; x, out: bf16 [rows, cols].
void nvfp4_hadamard32(const uint16_t* x, int64_t rows, int64_t cols, const float* signs, uint16_t* out) {
#pragma omp parallel for schedule(static)
  for (int64_t top = 0; top < rows; top += 32)
    for (int64_t col = 0; col < cols; col += 16) {
      f32x16 v[32];
      for (int i = 0; i < 32; i++) v[i] = load(x + (top + i) * cols + col) * signs[i];
      for (int s = 1; s < 32; s *= 2)
        for (int i = 0; i < 32; i++)
          if (!(i & s)) {
            f32x16 a = v[i], b = v[i + s];
            v[i] = a + b; v[i + s] = a - b;
          }
      for (int i = 0; i < 32; i++) store_operand(out, (top + i) * cols + col, round_to_bf16(v[i] * 0.17677669529663687f), OPERAND_BF16);
    }
}

}  // extern "C"

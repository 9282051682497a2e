// NVFP4 quantize kernels for CPUs: the arithmetic of reference.py, one 16-element block a vector register.
//
// Bits are a contract: compiled without fast-math and without FMA contraction. One read of x serves the
// row-wise and the column-wise half; a column block's 16 tokens are 16 registers, so that its Hadamard
// butterfly, its maximum and its rounding run vertically, and its results lie with channels contiguous.

#include <cstdint>
#include <cstring>
#include <cmath>

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint64_t u64x16 __attribute__((vector_size(128)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
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
  u8x16 c = __builtin_convertvector((u32x16)codes, u8x16);
  u16x8 pair; memcpy(&pair, &c, 16);
  u8x8 packed = __builtin_convertvector((pair & 15) | ((pair >> 8) << 4), u8x8);
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

// |y| -> E2M1 magnitude. The exponent's step and the magic-number sum round to nearest, ties to even.
static inline f32x16 exponent_step(f32x16 a) {
  i32x16 e = imax((as_i(a) >> 23) & 255, i32x16{} + 127);
  return as_f((e - 1) << 23);
}
static inline f32x16 round_nearest(f32x16 a) {
  f32x16 magic = exponent_step(a) * 12582912.0f;
  return (a + magic) - magic;
}
static inline f32x16 round_stochastic(f32x16 a, f32x16 bytes) {
  f32x16 t = a + bytes * (1.0f / 256) * exponent_step(a);
  i32x16 e = imax((as_i(t) >> 23) & 255, i32x16{} + 127);
  f32x16 inverse = as_f((255 - e) << 23);                    // 1 / step: exact
  f32x16 floor = __builtin_convertvector(__builtin_convertvector(t * inverse, i32x16), f32x16);
  return vmin(floor * as_f((e - 1) << 23), splat(6.0f));
}

static inline f32x16 quantize(f32x16 x, f32x16 encode, const f32x16* bytes, i32x16* sign) {
  f32x16 y = vmax(vmin(x * encode, splat(6.0f)), splat(-6.0f));
  *sign = y < 0.0f;
  f32x16 a = vabs(y);
  return bytes ? round_stochastic(a, *bytes) : round_nearest(a);
}

static inline i32x16 code(f32x16 q, i32x16 sign) {
  f32x16 c = q < 2.0f ? q * 2.0f : (q < 4.0f ? q + 2.0f : q * 0.5f + 4.0f);
  return __builtin_convertvector(c, i32x16) | (sign & 8);
}

// Philox4x32-10 for 16 counters at once.
static inline void mul_hi_lo(u32x16 a, uint64_t m, u32x16* hi, u32x16* lo) {
  u64x16 p = __builtin_convertvector(a, u64x16) * m;
  *lo = __builtin_convertvector(p, u32x16);
  *hi = __builtin_convertvector(p >> 32, u32x16);
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

// Up to 16 rows of one block column, row-wise. `index` addresses element (row, col) of x.
template <typename T>
static void rows_tile(const T* x, int64_t cols, int64_t row, int64_t col, int height, const Half& h, TensorScale t) {
  f32x16 v[16];
  int32_t amax_bits[16] = {};
  for (int r = 0; r < height; r++) {
    v[r] = load(x + (row + r) * cols + col);
    amax_bits[r] = reduce_bits(as_i(v[r]) & 0x7fffffff);
  }
  f32x16 block_amax; memcpy(&block_amax, amax_bits, 64);
  f32x16 scales = block_scale(block_amax, t), encodes = encode_factor(scales, t);
  float scale[16], encode[16];
  memcpy(scale, &scales, 64); memcpy(encode, &encodes, 64);
  uint32_t words[16][4];
  if (h.stochastic) {
    const int64_t* k = h.key;
    u32x16 c[4] = {u32x16{} + (uint32_t)(k[5] + col / 16), iota() + (uint32_t)(k[4] + row),
                   u32x16{} + (uint32_t)k[2], u32x16{} + (uint32_t)k[3]};
    philox(c, (uint32_t)k[0], (uint32_t)k[1]);
    uint32_t lanes[4][16]; memcpy(lanes, c, 256);
    for (int r = 0; r < 16; r++) for (int w = 0; w < 4; w++) words[r][w] = lanes[w][r];
  }
  u8x16 bytes_of_scale = scale_bytes(scales);
  for (int r = 0; r < height; r++) {
    f32x16 random;
    if (h.stochastic) {
      u8x16 b; memcpy(&b, words[r], 16);
      random = __builtin_convertvector(b, f32x16);
    }
    i32x16 sign;
    f32x16 q = quantize(v[r], splat(encode[r]), h.stochastic ? &random : nullptr, &sign);
    if (h.output == CODES) {
      store_codes(h.codes + (row + r) * (cols / 2) + col / 2, code(q, sign));
      h.scales[(row + r) * (cols / 16) + col / 16] = bytes_of_scale[r];
    } else {
      f32x16 o = q * scale[r];
      store_operand(h.operand, (row + r) * cols + col, sign ? -o : o, h.output);
    }
  }
}

static inline void butterfly(f32x16 v[16], const float* signs) {
  for (int i = 0; i < 16; i++) v[i] = v[i] * signs[i];
#pragma GCC unroll 4
  for (int s = 1; s < 16; s *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (!(i & s)) {
        f32x16 a = v[i], b = v[i + s];
        v[i] = a + b; v[i + s] = a - b;
      }
  for (int i = 0; i < 16; i++) v[i] = round_to_bf16(v[i] * 0.25f);
}

// 16 rows (tokens) x 16 columns (channels), column-wise: lane = channel, register = token.
template <typename T>
static void columns_tile(const T* x, int64_t cols, int64_t row, int64_t col, const Half& h, TensorScale t, const float* signs) {
  f32x16 v[16];
  for (int r = 0; r < 16; r++) v[r] = load(x + (row + r) * cols + col);
  if (h.hadamard) butterfly(v, signs);
  i32x16 bits{};
  for (int r = 0; r < 16; r++) bits = imax(bits, as_i(v[r]) & 0x7fffffff);
  f32x16 scale = block_scale(as_f(bits), t), encode = encode_factor(scale, t);
  u32x16 c[4];
  if (h.stochastic) {
    const int64_t* k = h.key;
    c[0] = u32x16{} + (uint32_t)(k[5] + row / 16); c[1] = iota() + (uint32_t)(k[4] + col);
    c[2] = u32x16{} + (uint32_t)k[2]; c[3] = u32x16{} + (uint32_t)k[3];
    philox(c, (uint32_t)k[0], (uint32_t)k[1]);
  }
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
      f32x16 o = q * scale;
      store_operand(h.operand, (row + r) * cols + col, sign ? -o : o, h.output);
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
        for (int r = 0; r < 16; r++) n = imax(n, as_i(v[r]) & 0x7fffffff);
      }
    }
    int32_t a = reduce_bits(m), b = reduce_bits(n);
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
          f32x16 o = q * scale;
          store_operand(h->operand, (row + r) * cols + col, sign ? -o : o, h->output);
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
  i32x16 m = c & 7;
  f32x16 f = __builtin_convertvector(m, f32x16);
  f32x16 q = m < 4 ? f * 0.5f : (m < 6 ? f - 2.0f : f * 2.0f - 8.0f);
  return (c & 8) != 0 ? -q : q;
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
        store_operand(operand, (row + r) * cols + col, element_value(c & 15) * scale, output);
        store_operand(operand, (row + r + 1) * cols + col, element_value(c >> 4) * scale, output);
      }
    }
}

}  // extern "C"

// Sixteen-lane vectors: the only file that knows instruction sets.
//
// Vectors are GCC vector extensions, which compile for any target; AVX-512 intrinsics replace the few operations
// where the compiler would not find the instruction by itself.
//
// Matrices that are multiplied are stored in 32-bit units along the summed dimension: one float, or two
// neighbouring bfloat16. Kernels that move units around are therefore the same for both types.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define TOKENMILL_AVX512 1
#if defined(__AVX512BF16__)
#define TOKENMILL_AVX512_BF16 1
#endif
#endif

#define TOKENMILL_INLINE inline __attribute__((always_inline))

namespace tokenmill {

constexpr int kLanes = 16;

using F32x16 = float __attribute__((vector_size(64)));
using I32x16 = int32_t __attribute__((vector_size(64)));
using U32x16 = uint32_t __attribute__((vector_size(64)));
using U16x16 = uint16_t __attribute__((vector_size(32)));

struct BFloat16 {
  uint16_t bits;
};

// One value; a bfloat16 is the upper half of a float.
template <class Out, class In>
TOKENMILL_INLINE Out convert(In value) {
  if constexpr (std::is_same_v<Out, In>) {
    return value;
  } else {
    static_assert(std::is_same_v<Out, float> && std::is_same_v<In, BFloat16>);
    return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
  }
}

// Elements of T in one 32-bit unit.
template <class T>
constexpr int kUnitSize = 4 / sizeof(T);

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

TOKENMILL_INLINE F32x16 splat(float value) { return F32x16{} + value; }

template <class V, class T>
TOKENMILL_INLINE V load_bits(const T* from) {
  V vector;
  std::memcpy(&vector, from, sizeof(V));
  return vector;
}

template <class V, class T>
TOKENMILL_INLINE void store_bits(T* to, V vector) {
  std::memcpy(to, &vector, sizeof(V));
}

TOKENMILL_INLINE F32x16 load(const float* from) { return load_bits<F32x16>(from); }

TOKENMILL_INLINE F32x16 load(const BFloat16* from) {
  return (F32x16)(__builtin_convertvector(load_bits<U16x16>(from), U32x16) << 16);
}

TOKENMILL_INLINE void store(float* to, F32x16 values) { store_bits(to, values); }

// Rounds to nearest even; NaN stays NaN.
TOKENMILL_INLINE void store(BFloat16* to, F32x16 values) {
#if TOKENMILL_AVX512_BF16
  store_bits(to, (__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
  const U32x16 bits = (U32x16)values;
  const U32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32x16 quiet = (bits >> 16) | 0x40;
  const U32x16 chosen = (U32x16)(values != values) & quiet | ~(U32x16)(values != values) & rounded;
  store_bits(to, __builtin_convertvector(chosen, U16x16));
#endif
}

// The first `count` lanes, 0 <= count <= 16; the others are zero.
template <class T>
TOKENMILL_INLINE F32x16 load_partial(const T* from, int count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}

template <class T>
TOKENMILL_INLINE void store_partial(T* to, F32x16 values, int count) {
  T lanes[kLanes];
  store(lanes, values);
  std::memcpy(to, lanes, count * sizeof(T));
}

TOKENMILL_INLINE F32x16 multiply_add(F32x16 a, F32x16 b, F32x16 c) {
#if TOKENMILL_AVX512
  return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

TOKENMILL_INLINE F32x16 maximum(F32x16 a, F32x16 b) {
#if TOKENMILL_AVX512
  return (F32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

TOKENMILL_INLINE float sum_lanes(F32x16 v) {
#if TOKENMILL_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += v[lane];
  return total;
#endif
}

TOKENMILL_INLINE float max_lanes(F32x16 v) {
#if TOKENMILL_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  float highest = v[0];
  for (int lane = 1; lane < kLanes; ++lane) highest = v[lane] > highest ? v[lane] : highest;
  return highest;
#endif
}

// 1 / v for v >= 1, to float32 accuracy.
TOKENMILL_INLINE F32x16 reciprocal(F32x16 v) {
#if TOKENMILL_AVX512
  const F32x16 guess = (F32x16)_mm512_rcp14_ps((__m512)v);
  return guess * (F32x16)_mm512_fnmadd_ps((__m512)v, (__m512)guess, _mm512_set1_ps(2.0f));
#else
  return 1.0f / v;
#endif
}

// 2 ** x by a minimax polynomial on [-0.5, 0.5]: relative error 3e-6 for BFloat16 results, 2e-9 plus rounding for
// float ones. x <= 127; large negative x gives 0 or less than 1e-37.
template <class T>
TOKENMILL_INLINE F32x16 exp2(F32x16 x) {
#if TOKENMILL_AVX512
  const F32x16 whole = (F32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = x < -126.0f ? splat(-126.0f) : x;
  const F32x16 whole = (x + 12582912.0f) - 12582912.0f;
#endif
  const F32x16 f = x - whole;
  F32x16 power;
  if constexpr (sizeof(T) == 2) {
    power = multiply_add(splat(0.00957010221f), f, splat(0.0559178591f));
    power = multiply_add(power, f, splat(0.240247443f));
    power = multiply_add(power, f, splat(0.693121791f));
    power = multiply_add(power, f, splat(0.999999285f));
  } else {
    power = multiply_add(splat(0.000153458124f), f, splat(0.00133999309f));
    power = multiply_add(power, f, splat(0.00961848907f));
    power = multiply_add(power, f, splat(0.0555032864f));
    power = multiply_add(power, f, splat(0.240226462f));
    power = multiply_add(power, f, splat(0.693147182f));
    power = multiply_add(power, f, splat(1.0f));
  }
#if TOKENMILL_AVX512
  return (F32x16)_mm512_scalef_ps((__m512)power, (__m512)whole);
#else
  const I32x16 exponent = __builtin_convertvector(whole, I32x16) + 127;
  return power * (F32x16)(exponent << 23);
#endif
}

constexpr float kLog2e = 1.44269504088896341f;

// x * sigmoid(x), as accurate as T.
template <class T>
TOKENMILL_INLINE F32x16 silu(F32x16 x) {
  const F32x16 limited = x < -88.0f ? splat(-88.0f) : x;
  return x * reciprocal(1.0f + exp2<T>(limited * -kLog2e));
}

// tanh(x), as accurate as T.
template <class T>
TOKENMILL_INLINE F32x16 tanh(F32x16 x) {
  const F32x16 magnitude = x < 0.0f ? -x : x;
  const F32x16 capped = magnitude > 20.0f ? splat(20.0f) : magnitude;
  const F32x16 result = 1.0f - 2.0f * reciprocal(1.0f + exp2<T>(capped * (2.0f * kLog2e)));
  return x < 0.0f ? -result : result;
}

// Lane l of the result is lane mask[l] of a (0..15) or of b (16..31).
TOKENMILL_INLINE I32x16 shuffle(I32x16 a, I32x16 b, I32x16 mask) {
#if defined(__clang__)
  I32x16 result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = mask[lane] < kLanes ? a[mask[lane]] : b[mask[lane] - kLanes];
  return result;
#else
  return __builtin_shuffle(a, b, mask);
#endif
}

template <int Step, int... Lane>
TOKENMILL_INLINE void exchange(I32x16& a, I32x16& b, std::integer_sequence<int, Lane...>) {
  const I32x16 low = shuffle(a, b, I32x16{((Lane & Step) ? kLanes + Lane - Step : Lane)...});
  const I32x16 high = shuffle(a, b, I32x16{((Lane & Step) ? kLanes + Lane : Lane + Step)...});
  a = low;
  b = high;
}

template <int Step>
TOKENMILL_INLINE void exchange_rows(I32x16 (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    if (!(row & Step)) exchange<Step>(rows[row], rows[row + Step], std::make_integer_sequence<int, kLanes>{});
  }
}

// Transposes a 16 x 16 matrix of 32-bit values.
TOKENMILL_INLINE void transpose(I32x16 (&rows)[kLanes]) {
  exchange_rows<8>(rows);
  exchange_rows<4>(rows);
  exchange_rows<2>(rows);
  exchange_rows<1>(rows);
}

template <int Step>
TOKENMILL_INLINE void fold(F32x16* rows) {
#pragma GCC unroll 16
  for (int row = 0; row < Step; ++row) {
    I32x16 a = (I32x16)rows[row], b = (I32x16)rows[row + Step];
    exchange<Step>(a, b, std::make_integer_sequence<int, kLanes>{});
    rows[row] = (F32x16)a + (F32x16)b;
  }
}

// Lane l of the result is the sum of all lanes of rows[l]. Destroys rows.
TOKENMILL_INLINE F32x16 sum_rows(F32x16 (&rows)[kLanes]) {
  fold<8>(rows);
  fold<4>(rows);
  fold<2>(rows);
  fold<1>(rows);
  return rows[0];
}

// sum += a * b over the elements of a unit; `a` is one unit for all lanes.
template <class T>
TOKENMILL_INLINE F32x16 dot(F32x16 sum, I32x16 a, I32x16 b) {
  if constexpr (sizeof(T) == 4) {
    return multiply_add((F32x16)a, (F32x16)b, sum);
  } else {
#if TOKENMILL_AVX512_BF16
    return (F32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    constexpr int32_t kHigh = static_cast<int32_t>(0xffff0000u);
    sum = multiply_add((F32x16)(a << 16), (F32x16)(b << 16), sum);
    return multiply_add((F32x16)(a & kHigh), (F32x16)(b & kHigh), sum);
#endif
  }
}

// Units of two rows of bfloat16 that follow each other along the summed dimension: lane l holds low[l], high[l].
TOKENMILL_INLINE I32x16 pair_bits(U16x16 low, U16x16 high) {
#if TOKENMILL_AVX512
  const __m512i rows = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
  const I32x16 lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i order = (__m512i)(lanes | (lanes + kLanes) << 16);
  return (I32x16)_mm512_permutexvar_epi16(order, rows);
#else
  return (I32x16)(__builtin_convertvector(low, U32x16) | (__builtin_convertvector(high, U32x16) << 16));
#endif
}

TOKENMILL_INLINE I32x16 pair_values(const BFloat16* first, const BFloat16* second) {
  return pair_bits(load_bits<U16x16>(first), load_bits<U16x16>(second));
}

TOKENMILL_INLINE I32x16 pair_values(F32x16 first, F32x16 second) {
  U16x16 low, high;
  store(reinterpret_cast<BFloat16*>(&low), first);
  store(reinterpret_cast<BFloat16*>(&high), second);
  return pair_bits(low, high);
}

// Starts to fetch a cache line to the first or the second level. A function that does nothing else must be inlined too:
// GCC sees no effect in it and would drop calls to it.
TOKENMILL_INLINE void prefetch_near(const void* address) { __builtin_prefetch(address, 0, 3); }
TOKENMILL_INLINE void prefetch_far(const void* address) { __builtin_prefetch(address, 0, 2); }

// For memory that will be written.
TOKENMILL_INLINE void prefetch_write(const void* address) { __builtin_prefetch(address, 1, 3); }

}  // namespace tokenmill

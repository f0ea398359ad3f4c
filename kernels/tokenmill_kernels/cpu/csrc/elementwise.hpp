// Everything between the products: norms, SiLU gate, rotary embedding and the write to the paged cache. Row by row.
#pragma once

#include <cmath>

#include "vec.hpp"

namespace tokenmill {

// Calls body(i, count) for every 16 lanes of [0, n); count < 16 only at the end.
template <class Body>
TOKENMILL_INLINE void for_lanes(int n, Body&& body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, n - i);
}

template <class T>
TOKENMILL_INLINE F32x16 load_lanes(const T* from, int count) {
  return count == kLanes ? load(from) : load_partial(from, count);
}

template <class T>
TOKENMILL_INLINE void store_lanes(T* to, F32x16 values, int count) {
  if (count == kLanes) {
    store(to, values);
  } else {
    store_partial(to, values, count);
  }
}

// 1 / root-mean-square of x[n].
template <class T>
float inverse_rms(const T* x, int n, float eps) {
  F32x16 squares{};
  for_lanes(n, [&](int i, int count) {
    const F32x16 v = load_lanes(x + i, count);
    squares = multiply_add(v, v, squares);
  });
  return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(n) + eps);
}

// out[n] = x / rms(x) * weight.
template <class In, class T>
void rms_norm_row(const In* x, const T* weight, T* out, int n, float eps) {
  const float scale = inverse_rms(x, n, eps);
  for_lanes(n, [&](int i, int count) {
    store_lanes(out + i, load_lanes(x + i, count) * scale * load_lanes(weight + i, count), count);
  });
}

// residual[n] += x, rounded to T; out[n] = norm of that sum.
template <class T>
void add_rms_norm_row(const T* x, T* residual, const T* weight, T* out, int n, float eps) {
  for_lanes(n, [&](int i, int count) {
    store_lanes(residual + i, load_lanes(x + i, count) + load_lanes(residual + i, count), count);
  });
  rms_norm_row(residual, weight, out, n, eps);
}

// out[n] = silu(gate_up[0 : n]) * gate_up[n : 2n].
template <class T>
void silu_mul_row(const T* gate_up, T* out, int n) {
  for_lanes(n, [&](int i, int count) {
    store_lanes(out + i, silu<T>(load_lanes(gate_up + i, count)) * load_lanes(gate_up + n + i, count), count);
  });
}

constexpr int kMaxHeadDim = 512;

// One head of a query or key, in place: RMS norm when `norm` is not null, then rotation of the first 2 * half
// dimensions by the angles whose cosines and sines are given.
template <class T>
void rotate_head(T* head, int head_dim, const float* cosines, const float* sines, int half, const T* norm, float eps) {
  alignas(64) float values[kMaxHeadDim];
  const float scale = norm == nullptr ? 1.0f : inverse_rms(head, head_dim, eps);
  for_lanes(head_dim, [&](int i, int count) {
    F32x16 v = load_lanes(head + i, count);
    if (norm != nullptr) v = v * scale * load_lanes(norm + i, count);
    store_lanes(values + i, v, count);
  });
  for_lanes(half, [&](int i, int count) {
    const F32x16 c = load_lanes(cosines + i, count), s = load_lanes(sines + i, count);
    const F32x16 first = load_lanes(values + i, count), second = load_lanes(values + half + i, count);
    store_lanes(head + i, first * c - second * s, count);
    store_lanes(head + half + i, second * c + first * s, count);
  });
  if (norm == nullptr) return;
  for_lanes(head_dim - 2 * half, [&](int i, int count) {
    store_lanes(head + 2 * half + i, load_lanes(values + 2 * half + i, count), count);
  });
}

// Heads of all tokens of a step: head h of token t begins at data + t * token_stride + h * head_stride.
template <class T>
struct Heads {
  T* data;
  ptrdiff_t token_stride;
  ptrdiff_t head_stride;
  int count;

  T* at(int token, int head) const { return data + token * token_stride + head * head_stride; }
};

// Keys or values of one layer; the `head_dim` elements of a cached row are contiguous.
template <class T>
struct PagedCache {
  T* data;
  ptrdiff_t block_stride;
  ptrdiff_t row_stride;
  ptrdiff_t head_stride;

  T* at(int64_t block, int offset, int head) const {
    return data + block * block_stride + offset * row_stride + head * head_stride;
  }
};

template <class T>
struct RotaryTable {
  const float* cos_sin;  // [max_position][2 * half]
  int half;
  const T* q_norm;  // [head_dim] or null
  const T* k_norm;
  float eps;
};

// Rotates one token's queries and keys and writes its keys and values to `slot` (nowhere when it is negative).
template <class T>
void rotary_kv_write_token(int token, int position, int64_t slot, const Heads<T>& q, const Heads<T>& k,
                           const Heads<const T>& v, const RotaryTable<T>& table, const PagedCache<T>& keys,
                           const PagedCache<T>& values, int block_size, int head_dim) {
  const float* cosines = table.cos_sin + static_cast<ptrdiff_t>(position) * 2 * table.half;
  const float* sines = cosines + table.half;
  for (int head = 0; head < q.count; ++head) {
    rotate_head(q.at(token, head), head_dim, cosines, sines, table.half, table.q_norm, table.eps);
  }
  for (int head = 0; head < k.count; ++head) {
    rotate_head(k.at(token, head), head_dim, cosines, sines, table.half, table.k_norm, table.eps);
    if (slot < 0) continue;
    const int64_t block = slot / block_size;
    const int offset = static_cast<int>(slot % block_size);
    std::memcpy(keys.at(block, offset, head), k.at(token, head), head_dim * sizeof(T));
    std::memcpy(values.at(block, offset, head), v.at(token, head), head_dim * sizeof(T));
  }
}

}  // namespace tokenmill

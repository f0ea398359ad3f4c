#include "api.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.hpp"
#include "convert.hpp"
#include "decoder.hpp"
#include "elementwise.hpp"
#include "gemm.hpp"

namespace tokenmill {
namespace {

// Values that are worth waking the other threads for.
constexpr int64_t kParallelValues = 32768;

template <class Body>
void with_dtype(int32_t dtype, Body&& body) {
  if (dtype == TOKENMILL_BFLOAT16) {
    body(BFloat16{});
  } else {
    body(float{});
  }
}

template <class Body>
void run_rows(int num_rows, int64_t row_values, Body&& body) {
  const auto region = [&](Worker& worker) { worker.for_each(num_rows, body); };
  if (num_rows * row_values < kParallelValues) {
    ThreadPool::run_alone(region);
  } else {
    ThreadPool::instance().run(region);
  }
}

template <class Body>
int guard(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

template <class T>
void pack(const T* weight, int64_t row_stride, int out_features, int in_features, int first_panel, int panel_step,
          T* packed) {
  const int units = in_features / kUnitSize<T>;
  run_rows(ceil_div(out_features, kLanes), static_cast<int64_t>(kLanes) * in_features, [&](int index) {
    int32_t* panel = reinterpret_cast<int32_t*>(packed) +
                     (first_panel + static_cast<ptrdiff_t>(index) * panel_step) * units * kLanes;
    const int rows = std::min(kLanes, out_features - index * kLanes);
    for (int row = 0; row < rows; ++row) {
      const int32_t* from = reinterpret_cast<const int32_t*>(weight + (index * kLanes + row) * row_stride);
      for (int unit = 0; unit < units; ++unit) panel[unit * kLanes + row] = from[unit];
    }
  });
}

template <class T>
Rows<T> input_rows(const TokenmillLinear& linear) {
  return {static_cast<const T*>(linear.x), static_cast<ptrdiff_t>(linear.x_stride), linear.num_rows};
}

template <class T>
PackedMatrix<T> packed_weight(const TokenmillLinear& linear) {
  return {static_cast<const T*>(linear.weight), linear.out_features, linear.in_features};
}

template <class Out, class T>
void linear_to(const TokenmillLinear& linear) {
  const StoreBlock<Out, T> finish{static_cast<Out*>(linear.out), static_cast<ptrdiff_t>(linear.out_stride),
                                  static_cast<const T*>(linear.bias), linear.out_features};
  const auto region = [&](Worker& worker) {
    multiply(worker, input_rows<T>(linear), packed_weight<T>(linear), finish);
  };
  if (static_cast<int64_t>(linear.in_features) * linear.out_features < kParallelValues) {
    ThreadPool::run_alone(region);
  } else {
    ThreadPool::instance().run(region);
  }
}

// The best entry so far of one row, per lane.
struct Best {
  F32x16 values;
  I32x16 features;
  I32x16 invalid;  // lanes that met a NaN
};

struct TrackBest {
  Best* best;  // [num_rows]
  int out_features;

  TOKENMILL_INLINE void prepare(int, int, int, int) const {}

  // Threads see features out of order: of equals the lower feature must win.
  void operator()(const Block& block) const {
    for (int column = 0; column < block.columns; column += kLanes) {
      const int feature = block.first_column + column;
      const I32x16 features = I32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + feature;
      const I32x16 valid = features < out_features;
      for (int row = 0; row < block.rows; ++row) {
        Best& seen = best[block.first_row + row];
        const F32x16 values = load(block.values + row * block.stride + column);
        const I32x16 better = (values > seen.values) | ((values == seen.values) & (features < seen.features));
        seen.values = better & valid ? values : seen.values;
        seen.features = better & valid ? features : seen.features;
        seen.invalid |= values != values;
      }
    }
  }
};

int64_t winner(const std::vector<Best>& best, int row, int num_rows, int num_threads) {
  float highest = -INFINITY;
  int64_t feature = INT32_MAX;
  for (int thread = 0; thread < num_threads; ++thread) {
    const Best& seen = best[static_cast<size_t>(thread) * num_rows + row];
    for (int lane = 0; lane < kLanes; ++lane) {
      if (seen.invalid[lane]) return -1;
      if (seen.values[lane] > highest || (seen.values[lane] == highest && seen.features[lane] < feature)) {
        highest = seen.values[lane];
        feature = seen.features[lane];
      }
    }
  }
  return feature;
}

template <class T>
void linear_argmax(const TokenmillLinear& linear) {
  ThreadPool& pool = ThreadPool::instance();
  const int num_rows = linear.num_rows, num_threads = pool.num_threads();
  const Best nothing{splat(-INFINITY), I32x16{} + INT32_MAX, I32x16{}};
  std::vector<Best> best(static_cast<size_t>(num_threads) * num_rows, nothing);
  int64_t* out = static_cast<int64_t*>(linear.out);
  pool.run([&](Worker& worker) {
    Best* own = best.data() + static_cast<size_t>(worker.index()) * num_rows;
    multiply(worker, input_rows<T>(linear), packed_weight<T>(linear), TrackBest{own, linear.out_features});
    worker.for_each(num_rows, [&](int row) { out[row] = winner(best, row, num_rows, num_threads); });
  });
}

template <class T>
void rotary_kv_write(const AttentionShape& shape, const TokenmillRotary& rotary) {
  const Heads<T> q = heads_of<T>(rotary.q, shape.num_heads), k = heads_of<T>(rotary.k, shape.num_kv_heads);
  const Heads<const T> v = heads_of<const T>(rotary.v, shape.num_kv_heads);
  const RotaryTable<T> table{rotary.cos_sin, rotary.rotary_dim / 2, static_cast<const T*>(rotary.q_norm),
                             static_cast<const T*>(rotary.k_norm), rotary.eps};
  const PagedCache<T> keys = paged_cache<T>(rotary.keys), values = paged_cache<T>(rotary.values);
  const int64_t row_values = static_cast<int64_t>(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
  run_rows(rotary.num_tokens, row_values, [&](int token) {
    rotary_kv_write_token(token, rotary.positions[token], rotary.slot_mapping[token], q, k, v, table, keys, values,
                          shape.block_size, shape.head_dim);
  });
}

template <class T>
void paged_attention(const AttentionShape& shape, const AttentionBatch& batch, const TokenmillAttention& attention) {
  ThreadPool& pool = ThreadPool::instance();
  AttentionPlan plan;
  AttentionWorkspace workspace;
  plan.build(batch, shape, nullptr);
  workspace.reserve(plan, shape, pool.num_threads());
  const AttentionLayer<T> layer{heads_of<const T>(attention.q, shape.num_heads),
                                heads_of<T>(attention.out, shape.num_heads),
                                paged_cache<const T>(attention.keys),
                                paged_cache<const T>(attention.values),
                                attention.scale,
                                attention.window,
                                attention.soft_cap};
  pool.run([&](Worker& worker) { attend(worker, plan, workspace, batch, shape, layer); });
}

}  // namespace
}  // namespace tokenmill

using namespace tokenmill;

void tokenmill_set_num_threads(int32_t count) { ThreadPool::instance().set_num_threads(count); }

int32_t tokenmill_num_threads() { return ThreadPool::instance().num_threads(); }

void tokenmill_pack(int32_t dtype, const void* weight, int64_t row_stride, int32_t out_features, int32_t in_features,
                    int32_t first_panel, int32_t panel_step, void* packed) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    pack(static_cast<const T*>(weight), row_stride, out_features, in_features, first_panel, panel_step,
         static_cast<T*>(packed));
  });
}

void tokenmill_packed_rows(int32_t dtype, const void* packed, int32_t in_features, const int64_t* ids,
                           int32_t num_ids, void* out) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const PackedMatrix<T> table{static_cast<const T*>(packed), 0, in_features};
    run_rows(num_ids, in_features, [&](int row) {
      copy_packed_row(table, ids[row], static_cast<T*>(out) + static_cast<ptrdiff_t>(row) * in_features);
    });
  });
}

void tokenmill_linear(const TokenmillLinear* linear) {
  with_dtype(linear->dtype, [&](auto zero) {
    using T = decltype(zero);
    if (linear->out_dtype == linear->dtype) {
      linear_to<T, T>(*linear);
    } else {
      linear_to<float, T>(*linear);
    }
  });
}

int tokenmill_linear_argmax(const TokenmillLinear* linear) {
  return guard([&] { with_dtype(linear->dtype, [&](auto zero) { linear_argmax<decltype(zero)>(*linear); }); });
}

void tokenmill_rms_norm(int32_t dtype, const void* x, int64_t x_stride, const void* weight, void* out,
                        int32_t num_rows, int32_t size, float eps) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    run_rows(num_rows, size, [&](int row) {
      rms_norm_row(static_cast<const T*>(x) + row * x_stride, static_cast<const T*>(weight),
                   static_cast<T*>(out) + static_cast<ptrdiff_t>(row) * size, size, eps);
    });
  });
}

void tokenmill_add_rms_norm(int32_t dtype, const void* x, int64_t x_stride, void* residual, int64_t residual_stride,
                            const void* weight, void* out, int32_t num_rows, int32_t size, float eps) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    run_rows(num_rows, size, [&](int row) {
      add_rms_norm_row(static_cast<const T*>(x) + row * x_stride, static_cast<T*>(residual) + row * residual_stride,
                       static_cast<const T*>(weight), static_cast<T*>(out) + static_cast<ptrdiff_t>(row) * size, size,
                       eps);
    });
  });
}

void tokenmill_silu_mul(int32_t dtype, const void* gate_up, int64_t stride, void* out, int32_t num_rows,
                        int32_t size) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    run_rows(num_rows, 2 * size, [&](int row) {
      silu_mul_row(static_cast<const T*>(gate_up) + row * stride,
                   static_cast<T*>(out) + static_cast<ptrdiff_t>(row) * size, size);
    });
  });
}

void tokenmill_rotary_kv_write(int32_t dtype, const TokenmillAttentionShape* shape, const TokenmillRotary* rotary) {
  with_dtype(dtype, [&](auto zero) { rotary_kv_write<decltype(zero)>(attention_shape(*shape), *rotary); });
}

int tokenmill_paged_attention(int32_t dtype, const TokenmillAttentionShape* shape,
                              const TokenmillAttentionBatch* batch, const TokenmillAttention* attention) {
  return guard([&] {
    with_dtype(dtype, [&](auto zero) {
      paged_attention<decltype(zero)>(attention_shape(*shape), attention_batch(*batch), *attention);
    });
  });
}

void* tokenmill_decoder_create(const TokenmillDecoderShape* shape, const TokenmillDecoderLayer* layers) {
  void* decoder = nullptr;
  guard([&] { decoder = make_decoder(*shape, layers).release(); });
  return decoder;
}

void tokenmill_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

int tokenmill_decoder_forward(void* decoder, const TokenmillStep* step) {
  return guard([&] { static_cast<Decoder*>(decoder)->forward(*step); });
}

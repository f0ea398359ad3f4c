#include "decoder.hpp"

#include <algorithm>
#include <vector>

#include "attention.hpp"
#include "convert.hpp"
#include "elementwise.hpp"
#include "gemm.hpp"
#include "memory.hpp"

namespace tokenmill {
namespace {

// Adds a block of the product to the residual stream, which is kept in float32.
template <class T>
struct AddToResidual {
  float* residual;
  const T* bias;
  int hidden_size;

  TOKENMILL_INLINE void prepare(int row, int rows, int column, int columns) const {
    fetch_rows(residual + static_cast<ptrdiff_t>(row) * hidden_size + column, hidden_size, rows,
               std::min(columns, hidden_size - column));
  }

  void operator()(const Block& block) const {
    for (int column = 0; column < block.columns; column += kLanes) {
      const int feature = block.first_column + column;
      const int valid = std::min(kLanes, hidden_size - feature);
      const F32x16 offset = bias == nullptr ? F32x16{} : load_lanes(bias + feature, valid);
      for (int row = 0; row < block.rows; ++row) {
        float* to = residual + static_cast<ptrdiff_t>(block.first_row + row) * hidden_size + feature;
        const F32x16 sum = load_lanes(to, valid) + load(block.values + row * block.stride + column) + offset;
        store_lanes(to, sum, valid);
      }
    }
  }
};

// Columns of the block alternate: 16 gates, their 16 ups. Writes silu(gate) * up.
template <class T>
struct StoreGated {
  T* out;
  const T* gate_bias;
  const T* up_bias;
  int intermediate_size;

  TOKENMILL_INLINE void prepare(int row, int rows, int column, int columns) const {
    fetch_rows(out + static_cast<ptrdiff_t>(row) * intermediate_size + column / 2, intermediate_size, rows,
               std::min(columns / 2, intermediate_size - column / 2));
  }

  void operator()(const Block& block) const {
    for (int column = 0; column < block.columns; column += 2 * kLanes) {
      const int feature = (block.first_column + column) / 2;
      const int valid = std::min(kLanes, intermediate_size - feature);
      const F32x16 gate_offset = gate_bias == nullptr ? F32x16{} : load_lanes(gate_bias + feature, valid);
      const F32x16 up_offset = up_bias == nullptr ? F32x16{} : load_lanes(up_bias + feature, valid);
      for (int row = 0; row < block.rows; ++row) {
        const float* from = block.values + row * block.stride + column;
        const F32x16 gate = load(from) + gate_offset, up = load(from + kLanes) + up_offset;
        T* to = out + static_cast<ptrdiff_t>(block.first_row + row) * intermediate_size + feature;
        store_lanes(to, silu<T>(gate) * up, valid);
      }
    }
  }
};

// Calls body(row) for every row, split among threads in runs of neighbouring rows.
template <class Body>
void for_rows(Worker& worker, int num_rows, Body&& body) {
  const int run = std::clamp(num_rows / (8 * worker.count()), 1, 16);
  worker.for_each(ceil_div(num_rows, run), [&](int task) {
    for (int row = task * run; row < std::min(num_rows, (task + 1) * run); ++row) body(row);
  });
}

template <class T>
class DecoderOf final : public Decoder {
 public:
  DecoderOf(const TokenmillDecoderShape& shape, const TokenmillDecoderLayer* layers)
      : shape_(shape), attention_(attention_shape(shape.attention)), layers_(layers, layers + shape.num_layers) {}

  void forward(const TokenmillStep& step) override {
    const AttentionBatch batch = attention_batch(step.attention);
    prepare(step, batch);
    ThreadPool::instance().run([&](Worker& worker) {
      embed(worker, step);
      for (int index = 0; index + 1 < shape_.num_layers; ++index) {
        attend_layer(worker, step, batch, plan_, layers_[index]);
        feed_forward(worker, layers_[index], attended_, residual_, step.num_tokens);
        if (index < step.num_added_layers) add(worker, step, index);
      }
      const TokenmillDecoderLayer& last = layers_.back();
      attend_layer(worker, step, batch, last_plan_, last);
      if (step.output_rows == nullptr) {
        feed_forward(worker, last, attended_, residual_, step.num_tokens);
        finish(worker, step, residual_);
      } else {
        select(worker, step);
        feed_forward(worker, last, selected_attended_, selected_residual_, step.num_outputs);
        finish(worker, step, selected_residual_);
      }
    });
  }

 private:
  int qkv_size() const { return (attention_.num_heads + 2 * attention_.num_kv_heads) * attention_.head_dim; }
  int attended_size() const { return attention_.num_heads * attention_.head_dim; }

  // Everything that may allocate.
  void prepare(const TokenmillStep& step, const AttentionBatch& batch) {
    plan_.build(batch, attention_, nullptr);
    if (step.output_rows == nullptr) {
      last_plan_ = plan_;
    } else {
      wanted_.assign(step.num_tokens, 0);
      for (int i = 0; i < step.num_outputs; ++i) wanted_[step.output_rows[i]] = 1;
      last_plan_.build(batch, attention_, wanted_.data());
    }
    workspace_.reserve(plan_, attention_, ThreadPool::instance().num_threads());
    for (const bool measure : {true, false}) {
      Carver carver(measure ? nullptr : memory_.data());
      const size_t tokens = step.num_tokens, outputs = step.output_rows == nullptr ? 0 : step.num_outputs;
      residual_ = carver.take<float>(tokens * shape_.hidden_size);
      normed_ = carver.take<T>(tokens * shape_.hidden_size);
      qkv_ = carver.take<T>(tokens * qkv_size());
      attended_ = carver.take<T>(tokens * attended_size());
      gated_ = carver.take<T>(tokens * shape_.intermediate_size);
      selected_residual_ = carver.take<float>(outputs * shape_.hidden_size);
      selected_attended_ = carver.take<T>(outputs * attended_size());
      if (measure) memory_.reserve(carver.used());
    }
  }

  PackedMatrix<T> matrix(const void* packed, int out_features, int in_features) const {
    return {static_cast<const T*>(packed), out_features, in_features};
  }

  void embed(Worker& worker, const TokenmillStep& step) {
    const PackedMatrix<T> table = matrix(shape_.embedding, shape_.vocab_size, shape_.hidden_size);
    for_rows(worker, step.num_tokens, [&](int row) {
      float* to = residual_ + static_cast<ptrdiff_t>(row) * shape_.hidden_size;
      if (step.embeddings == nullptr) {
        copy_packed_row(table, step.input_ids[row], to);
        return;
      }
      const T* from = static_cast<const T*>(step.embeddings) + static_cast<ptrdiff_t>(row) * shape_.hidden_size;
      for (int i = 0; i < shape_.hidden_size; ++i) to[i] = convert<float>(from[i]);
    });
  }

  // From the residual stream to `attended_`; keys and values go to the cache.
  void attend_layer(Worker& worker, const TokenmillStep& step, const AttentionBatch& batch, const AttentionPlan& plan,
                    const TokenmillDecoderLayer& layer) {
    const int hidden = shape_.hidden_size, dim = attention_.head_dim, width = qkv_size();
    norm(worker, layer.input_norm, residual_, step.num_tokens);
    multiply(worker, Rows<T>{normed_, hidden, step.num_tokens}, matrix(layer.qkv, width, hidden),
             StoreBlock<T, T>{qkv_, width, static_cast<const T*>(layer.qkv_bias), width});
    const Heads<T> q{qkv_, width, dim, attention_.num_heads};
    const Heads<T> k{qkv_ + attended_size(), width, dim, attention_.num_kv_heads};
    const Heads<const T> v{k.data + attention_.num_kv_heads * dim, width, dim, attention_.num_kv_heads};
    const PagedCache<T> keys = paged_cache<T>(layer.keys), values = paged_cache<T>(layer.values);
    const float* cos_sin = step.cos_sin == nullptr ? shape_.cos_sin : step.cos_sin;
    const RotaryTable<T> table{cos_sin, shape_.rotary_dim / 2, static_cast<const T*>(layer.q_norm),
                               static_cast<const T*>(layer.k_norm), shape_.eps};
    for_rows(worker, step.num_tokens, [&](int row) {
      rotary_kv_write_token(row, step.positions[row], step.slot_mapping[row], q, k, v, table, keys, values,
                            attention_.block_size, dim);
    });
    const AttentionLayer<T> task{{qkv_, width, dim, attention_.num_heads},
                                 {attended_, attended_size(), dim, attention_.num_heads},
                                 paged_cache<const T>(layer.keys),
                                 paged_cache<const T>(layer.values),
                                 shape_.scale,
                                 layer.window,
                                 shape_.soft_cap};
    attend(worker, plan, workspace_, batch, attention_, task);
  }

  void norm(Worker& worker, const void* weight, const float* residual, int num_rows) {
    const int hidden = shape_.hidden_size;
    for_rows(worker, num_rows, [&](int row) {
      const ptrdiff_t at = static_cast<ptrdiff_t>(row) * hidden;
      rms_norm_row(residual + at, static_cast<const T*>(weight), normed_ + at, hidden, shape_.eps);
    });
  }

  // Output projection and the gated feed-forward, both added to `residual`.
  void feed_forward(Worker& worker, const TokenmillDecoderLayer& layer, const T* attended, float* residual,
                    int num_rows) {
    const int hidden = shape_.hidden_size, inner = shape_.intermediate_size;
    multiply(worker, Rows<T>{attended, attended_size(), num_rows}, matrix(layer.output, hidden, attended_size()),
             AddToResidual<T>{residual, static_cast<const T*>(layer.output_bias), hidden});
    norm(worker, layer.post_attention_norm, residual, num_rows);
    multiply(worker, Rows<T>{normed_, hidden, num_rows},
             matrix(layer.gate_up, 2 * ceil_div(inner, kLanes) * kLanes, hidden),
             StoreGated<T>{gated_, static_cast<const T*>(layer.gate_bias), static_cast<const T*>(layer.up_bias),
                           inner});
    multiply(worker, Rows<T>{gated_, inner, num_rows}, matrix(layer.down, hidden, inner),
             AddToResidual<T>{residual, static_cast<const T*>(layer.down_bias), hidden});
  }

  // What the step brings for some tokens behind this layer.
  void add(Worker& worker, const TokenmillStep& step, int layer) {
    const ptrdiff_t hidden = shape_.hidden_size;
    for_rows(worker, step.num_added, [&](int row) {
      const T* from = static_cast<const T*>(step.added) + row * static_cast<ptrdiff_t>(step.added_stride) +
                      layer * hidden;
      float* to = residual_ + static_cast<ptrdiff_t>(step.added_tokens[row]) * hidden;
      for (ptrdiff_t i = 0; i < hidden; ++i) to[i] += convert<float>(from[i]);
    });
  }

  // Only the wanted rows go on after the last attention.
  void select(Worker& worker, const TokenmillStep& step) {
    for_rows(worker, step.num_outputs, [&](int row) {
      const ptrdiff_t from = step.output_rows[row];
      std::copy_n(residual_ + from * shape_.hidden_size, shape_.hidden_size,
                  selected_residual_ + static_cast<ptrdiff_t>(row) * shape_.hidden_size);
      std::copy_n(attended_ + from * attended_size(), attended_size(),
                  selected_attended_ + static_cast<ptrdiff_t>(row) * attended_size());
    });
  }

  void finish(Worker& worker, const TokenmillStep& step, const float* residual) {
    for_rows(worker, step.num_outputs, [&](int row) {
      const ptrdiff_t at = static_cast<ptrdiff_t>(row) * shape_.hidden_size;
      rms_norm_row(residual + at, static_cast<const T*>(shape_.final_norm), static_cast<T*>(step.out) + at,
                   shape_.hidden_size, shape_.eps);
    });
  }

  TokenmillDecoderShape shape_;
  AttentionShape attention_;
  std::vector<TokenmillDecoderLayer> layers_;
  AttentionPlan plan_;
  AttentionPlan last_plan_;
  AttentionWorkspace workspace_;
  std::vector<uint8_t> wanted_;
  Buffer memory_;
  float* residual_ = nullptr;       // [tokens, hidden]
  T* normed_ = nullptr;             // [tokens, hidden]
  T* qkv_ = nullptr;                // [tokens, (H + 2 KH) * D]
  T* attended_ = nullptr;           // [tokens, H * D]
  T* gated_ = nullptr;              // [tokens, intermediate]
  float* selected_residual_ = nullptr;
  T* selected_attended_ = nullptr;
};

}  // namespace

std::unique_ptr<Decoder> make_decoder(const TokenmillDecoderShape& shape, const TokenmillDecoderLayer* layers) {
  if (shape.dtype == TOKENMILL_BFLOAT16) return std::make_unique<DecoderOf<BFloat16>>(shape, layers);
  return std::make_unique<DecoderOf<float>>(shape, layers);
}

}  // namespace tokenmill

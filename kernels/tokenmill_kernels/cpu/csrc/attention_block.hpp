// Attention of a block of queries of one request and one KV head: prefill.
//
// Up to 64 (token, query head) pairs sit in the lanes of the vectors. Scores come out as [key, lane] and the output as
// [dimension, lane], so that the softmax runs down the lanes and both products are the tiles of `tile.hpp`.
#pragma once

#include <algorithm>

#include "attention.hpp"
#include "tile.hpp"

namespace tokenmill {

constexpr int kBlockLanes = 64;
constexpr int kBlockKeys = 512;

// Stands for minus infinity: far below any score, and its differences are numbers.
constexpr float kMasked = -1e30f;

template <class T>
struct BlockScratch {
  int32_t* queries;  // [panel][head_dim units][16]
  T* keys;           // [key][head_dim]
  int32_t* values;   // [key units][head_dim]
  float* scores;     // [key][lane]
  int32_t* weights;  // [panel][key units][16]
  float* sums;       // [head_dim][lane]
  float* maxima;     // [lane]
  float* totals;     // [lane]
  float* rescale;    // [lane]

  BlockScratch(Carver& carver, const AttentionShape& shape)
      : queries(carver.take<int32_t>(kBlockLanes * shape.head_dim)),
        keys(carver.take<T>(kBlockKeys * shape.head_dim)),
        values(carver.take<int32_t>(kBlockKeys * shape.head_dim)),
        scores(carver.take<float>(kBlockKeys * kBlockLanes)),
        weights(carver.take<int32_t>(kBlockKeys * kBlockLanes)),
        sums(carver.take<float>(shape.head_dim * kBlockLanes)),
        maxima(carver.take<float>(kBlockLanes)),
        totals(carver.take<float>(kBlockLanes)),
        rescale(carver.take<float>(kBlockLanes)) {}
};

template <class T, int Panels>
class BlockKernel {
 public:
  BlockKernel(const AttentionTask& task, const AttentionBatch& batch, const AttentionShape& shape,
              const AttentionLayer<T>& layer, char* memory)
      : task_(task), batch_(batch), shape_(shape), layer_(layer), carver_(memory), scratch_(carver_, shape) {
    // Position of the block's first query.
    first_position_ = batch.seq_lens[task.request] -
                      (batch.query_start_loc[task.request + 1] - task.first_token);
    last_position_ = first_position_ + task.num_tokens - 1;
    for (int lane = 0; lane < kWidth; ++lane) {
      positions_[lane] = first_position_ + std::min(lane / shape.group(), task.num_tokens - 1);
    }
  }

  void run() {
    pack_queries();
    std::fill_n(scratch_.sums, shape_.head_dim * kWidth, 0.0f);
    std::fill_n(scratch_.maxima, kWidth, kMasked);
    std::fill_n(scratch_.totals, kWidth, 0.0f);
    const int oldest = layer_.window > 0 ? std::max(0, first_position_ - layer_.window + 1) : 0;
    // Blocks of keys begin at multiples of their size wherever a chunk begins: chunking does not change results.
    for (int key = oldest / kBlockKeys * kBlockKeys; key <= last_position_; key += kBlockKeys) {
      const int num_keys = std::min(kBlockKeys, last_position_ + 1 - key);
      gather(key, num_keys);
      score(num_keys);
      if (layer_.soft_cap > 0) cap_scores(num_keys);
      const bool future = key + num_keys - 1 > first_position_;
      const bool past = layer_.window > 0 && key <= last_position_ - layer_.window;
      if (future || past) mask_scores(key, num_keys);
      for (int panel = 0; panel < Panels; ++panel) weigh(panel, num_keys);
      add_values(num_keys);
    }
    for (int panel = 0; panel < Panels; ++panel) write_panel(panel);
  }

 private:
  static constexpr int kWidth = Panels * kLanes;

  int units() const { return shape_.head_dim / kUnitSize<T>; }

  // Row of the lane's query or output; lanes past the last pair repeat the last token's first head.
  template <class U>
  U* lane_row(const Heads<U>& heads, int lane) const {
    const int token = lane / shape_.group(), head = lane % shape_.group();
    if (token >= task_.num_tokens) return heads.at(task_.first_token, task_.kv_head * shape_.group());
    return heads.at(task_.first_token + token, task_.kv_head * shape_.group() + head);
  }

  void pack_queries() {
    for (int panel = 0; panel < Panels; ++panel) {
      for (int unit = 0; unit < units(); unit += kLanes) {
        const int count = std::min(kLanes, units() - unit);
        I32x16 rows[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
          const T* from = lane_row(layer_.q, panel * kLanes + lane) + unit * kUnitSize<T>;
          if (count == kLanes) {
            rows[lane] = load_bits<I32x16>(from);
          } else {
            rows[lane] = I32x16{};
            std::memcpy(&rows[lane], from, count * sizeof(int32_t));
          }
        }
        transpose(rows);
        int32_t* to = scratch_.queries + (panel * units() + unit) * kLanes;
        for (int i = 0; i < count; ++i) store_bits(to + i * kLanes, rows[i]);
      }
    }
  }

  // Copies keys together and interleaves values to units.
  void gather(int first_key, int num_keys) {
    const int32_t* table = batch_.block_tables + task_.request * batch_.table_stride;
    const int dim = shape_.head_dim;
    const T* value_rows[kBlockKeys + 1];
    for (int i = 0; i < num_keys; ++i) {
      const int block = table[(first_key + i) / shape_.block_size], offset = (first_key + i) % shape_.block_size;
      std::memcpy(scratch_.keys + i * dim, layer_.keys.at(block, offset, task_.kv_head), dim * sizeof(T));
      value_rows[i] = layer_.values.at(block, offset, task_.kv_head);
    }
    value_rows[num_keys] = value_rows[num_keys - 1];  // its weight is zero when the number of keys is odd
    for (int i = 0; i < num_keys; i += kUnitSize<T>) {
      int32_t* to = scratch_.values + i / kUnitSize<T> * dim;
      if constexpr (sizeof(T) == 4) {
        std::memcpy(to, value_rows[i], dim * sizeof(T));
      } else {
        int d = 0;
        for (; d + kLanes <= dim; d += kLanes) {
          store_bits(to + d, pair_values(value_rows[i] + d, value_rows[i + 1] + d));
        }
        for (; d < dim; ++d) to[d] = value_rows[i][d].bits | value_rows[i + 1][d].bits << 16;
      }
    }
  }

  void score(int num_keys) {
    const int32_t* rows = reinterpret_cast<const int32_t*>(scratch_.keys);
    const TilePanels queries{scratch_.queries, static_cast<ptrdiff_t>(units()) * kLanes};
    for (int key = 0; key < num_keys;) {
      const int count = tile_rows(num_keys - key, kMaxTileRows<Panels>);
      product_tile<T, Panels>(count, {rows + key * units(), units(), 1}, queries, units(), {},
                              scratch_.scores + key * kWidth);
      key += count;
    }
  }

  void cap_scores(int num_keys) {
    const float inward = layer_.scale / layer_.soft_cap, outward = layer_.soft_cap / layer_.scale;
    for (int i = 0; i < num_keys * kWidth; i += kLanes) {
      store(scratch_.scores + i, tanh<T>(load(scratch_.scores + i) * inward) * outward);
    }
  }

  void mask_scores(int first_key, int num_keys) {
    const float lowest = kMasked / layer_.scale;
    for (int panel = 0; panel < Panels; ++panel) {
      const I32x16 newest = load_bits<I32x16>(positions_ + panel * kLanes);
      const I32x16 oldest = newest - (layer_.window > 0 ? layer_.window : last_position_ + 1);
      for (int i = 0; i < num_keys; ++i) {
        float* at = scratch_.scores + i * kWidth + panel * kLanes;
        const int32_t key = first_key + i;
        const F32x16 value = load(at);
        store(at, (newest < key) | (oldest >= key) ? splat(lowest) : value);
      }
    }
  }

  // Online softmax of one panel: scores become weights, maxima and totals move on.
  void weigh(int panel, int num_keys) {
    const float* scores = scratch_.scores + panel * kLanes;
    const F32x16 scale = splat(layer_.scale * kLog2e);
    F32x16 highest = load(scores);
    for (int i = 1; i < num_keys; ++i) highest = maximum(highest, load(scores + i * kWidth));
    const F32x16 before = load(scratch_.maxima + panel * kLanes);
    const F32x16 maximum_now = maximum(before, highest * scale);
    const F32x16 factor = exp2<T>(before - maximum_now);
    F32x16 total = load(scratch_.totals + panel * kLanes) * factor;
    int32_t* to = scratch_.weights + panel * (kBlockKeys / kUnitSize<T>)*kLanes;
    for (int i = 0; i < num_keys; i += kUnitSize<T>) {
      const F32x16 weight = exp2<T>(multiply_add(load(scores + i * kWidth), scale, -maximum_now));
      total += weight;
      if constexpr (sizeof(T) == 4) {
        store_bits(to, weight);
      } else {
        F32x16 second{};
        if (i + 1 < num_keys) second = exp2<T>(multiply_add(load(scores + (i + 1) * kWidth), scale, -maximum_now));
        total += second;
        store_bits(to, pair_values(weight, second));
      }
      to += kLanes;
    }
    store(scratch_.maxima + panel * kLanes, maximum_now);
    store(scratch_.totals + panel * kLanes, total);
    store(scratch_.rescale + panel * kLanes, factor);
  }

  void add_values(int num_keys) {
    const int dim = shape_.head_dim;
    const TilePanels weights{scratch_.weights, kBlockKeys / kUnitSize<T> * kLanes};
    for (int d = 0; d < dim;) {
      const int count = tile_rows(dim - d, kMaxTileRows<Panels>);
      rescaled_tile<T, Panels>(count, {scratch_.values + d, 1, dim}, weights, ceil_div(num_keys, kUnitSize<T>),
                               scratch_.rescale, scratch_.sums + d * kWidth);
      d += count;
    }
  }

  void write_panel(int panel) {
    const int pairs = std::min(kLanes, task_.num_tokens * shape_.group() - panel * kLanes);
    const F32x16 factor = 1.0f / load(scratch_.totals + panel * kLanes);
    for (int d = 0; d < shape_.head_dim; d += kLanes) {
      const int count = std::min(kLanes, shape_.head_dim - d);
      I32x16 rows[kLanes] = {};
      for (int i = 0; i < count; ++i) {
        rows[i] = (I32x16)(load(scratch_.sums + (d + i) * kWidth + panel * kLanes) * factor);
      }
      transpose(rows);
      for (int lane = 0; lane < pairs; ++lane) {
        store_lanes(lane_row(layer_.out, panel * kLanes + lane) + d, (F32x16)rows[lane], count);
      }
    }
  }

  const AttentionTask& task_;
  const AttentionBatch& batch_;
  const AttentionShape& shape_;
  const AttentionLayer<T>& layer_;
  Carver carver_;
  BlockScratch<T> scratch_;
  int first_position_;
  int last_position_;
  int32_t positions_[kWidth];
};

template <class T>
void attend_block(const AttentionTask& task, const AttentionBatch& batch, const AttentionShape& shape,
                  const AttentionLayer<T>& layer, char* scratch) {
  const int lanes = task.num_tokens * shape.group();
  if (lanes > 2 * kLanes) {
    BlockKernel<T, 4>(task, batch, shape, layer, scratch).run();
  } else if (lanes > kLanes) {
    BlockKernel<T, 2>(task, batch, shape, layer, scratch).run();
  } else {
    BlockKernel<T, 1>(task, batch, shape, layer, scratch).run();
  }
}

}  // namespace tokenmill

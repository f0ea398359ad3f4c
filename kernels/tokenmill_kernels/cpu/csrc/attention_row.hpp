// Attention of one query of one request and one KV head over one piece of its context: decode.
//
// Reads each cached row once and in order, with all query heads of the group against it: the loop is bound by memory.
#pragma once

#include <algorithm>

#include "attention.hpp"
#include "attention_block.hpp"

namespace tokenmill {

// How far ahead keys are fetched: the time of a memory access. Values are fetched while keys are scored.
constexpr int kPrefetchKeys = 64;

template <class T>
struct RowScratch {
  float* scores;  // [head of the group][key]
  T* weights;     // [head of the group][key]
  float* sums;    // [head of the group][head_dim + 2], as AttentionWorkspace::partial

  RowScratch(Carver& carver, const AttentionShape& shape)
      : scores(carver.take<float>(shape.group() * kContextPiece)),
        weights(carver.take<T>(shape.group() * kContextPiece)),
        sums(carver.take<float>(shape.group() * (shape.head_dim + 2))) {}
};

template <class T>
class RowKernel {
 public:
  RowKernel(const AttentionTask& task, const AttentionBatch& batch, const AttentionShape& shape,
            const AttentionLayer<T>& layer, char* memory)
      : task_(task),
        shape_(shape),
        layer_(layer),
        table_(batch.block_tables + task.request * batch.table_stride),
        carver_(memory),
        scratch_(carver_, shape) {
    const int seq_len = batch.seq_lens[task.request];
    const int oldest = layer.window > 0 ? std::max(0, seq_len - layer.window) : 0;
    first_ = std::max(task.piece * kContextPiece, oldest);
    end_ = std::min((task.piece + 1) * kContextPiece, seq_len);
    base_ = first_ / kLanes * kLanes;
  }

  // Leaves unnormalised sums, maximum and total of head `h` at sums(h).
  void run() {
    if (first_ >= end_) {
      for (int head = 0; head < shape_.group(); ++head) {
        std::fill_n(sums(head), shape_.head_dim, 0.0f);
        sums(head)[shape_.head_dim] = kMasked;
        sums(head)[shape_.head_dim + 1] = 0.0f;
      }
      return;
    }
    for (int key = base_; key < end_ && key < base_ + kPrefetchKeys; key += kLanes) prefetch_rows(layer_.keys, key);
    for (int key = base_; key < end_; key += kLanes) {
      prefetch_rows(layer_.keys, key + kPrefetchKeys);
      prefetch_rows(layer_.values, key);
      score_keys(key);
    }
    for (int head = 0; head < shape_.group(); ++head) weigh(head);
    for (int head = 0; head < shape_.group(); head += 4) {
      switch (std::min(4, shape_.group() - head)) {
        case 1: add_values<1>(head); break;
        case 2: add_values<2>(head); break;
        case 3: add_values<3>(head); break;
        default: add_values<4>(head);
      }
    }
  }

  float* sums(int head) const { return scratch_.sums + head * (shape_.head_dim + 2); }

 private:
  const T* rows_at(const PagedCache<const T>& cache, int key) const {
    return cache.at(table_[key / shape_.block_size], key % shape_.block_size, task_.kv_head);
  }

  // The 16 rows from `key` on lie in one block.
  TOKENMILL_INLINE void prefetch_rows(const PagedCache<const T>& cache, int key) const {
    if (key >= end_) return;
    const T* rows = rows_at(cache, key);
    for (int row = 0; row < kLanes; ++row) {
      const char* from = reinterpret_cast<const char*>(rows + row * cache.row_stride);
      for (size_t byte = 0; byte < shape_.head_dim * sizeof(T); byte += 64) prefetch_near(from + byte);
    }
  }

  void score_keys(int key) {
    switch (shape_.head_dim * sizeof(T) / sizeof(F32x16)) {
      case 2: return score_keys_of<2>(key);
      case 4: return score_keys_of<4>(key);
      default: return score_keys_of<0>(key);
    }
  }

  // `Vectors`: vectors in a row, 0 when known only at run time.
  template <int Vectors>
  void score_keys_of(int key) {
    const T* rows = rows_at(layer_.keys, key);
    const int vectors = Vectors > 0 ? Vectors : shape_.head_dim * sizeof(T) / sizeof(F32x16);
    constexpr int kStep = kLanes * kUnitSize<T>;
    for (int head = 0; head < shape_.group(); ++head) {
      const T* query = layer_.q.at(task_.first_token, task_.kv_head * shape_.group() + head);
      F32x16 products[kLanes];
#pragma GCC unroll 16
      for (int row = 0; row < kLanes; ++row) {
        F32x16 sum{};
        for (int v = 0; v < vectors; ++v) {
          sum = dot<T>(sum, load_bits<I32x16>(query + v * kStep),
                       load_bits<I32x16>(rows + row * layer_.keys.row_stride + v * kStep));
        }
        products[row] = sum;
      }
      F32x16 scores = sum_rows(products) * layer_.scale;
      if (layer_.soft_cap > 0) scores = tanh<T>(scores * (1.0f / layer_.soft_cap)) * layer_.soft_cap;
      store(scratch_.scores + head * kContextPiece + key - base_, mask(scores * kLog2e, key));
    }
  }

  F32x16 mask(F32x16 scores, int key) const {
    if (key >= first_ && key + kLanes <= end_) return scores;
    const I32x16 keys = I32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + key;
    return (keys < first_) | (keys >= end_) ? splat(kMasked) : scores;
  }

  void weigh(int head) {
    const float* scores = scratch_.scores + head * kContextPiece;
    T* weights = scratch_.weights + head * kContextPiece;
    F32x16 highest = load(scores), total{};
    for (int i = kLanes; i < end_ - base_; i += kLanes) highest = maximum(highest, load(scores + i));
    const float top = max_lanes(highest);
    for (int i = 0; i < end_ - base_; i += kLanes) {
      const F32x16 weight = exp2<T>(load(scores + i) - top);
      total += weight;
      store(weights + i, weight);
    }
    sums(head)[shape_.head_dim] = top;
    sums(head)[shape_.head_dim + 1] = sum_lanes(total);
  }

  template <int NumHeads>
  void add_values(int head) {
    int d = 0;
    for (; d + 4 * kLanes <= shape_.head_dim; d += 4 * kLanes) add_values_at<NumHeads, 4>(head, d);
    for (; d < shape_.head_dim; d += 2 * kLanes) add_values_at<NumHeads, 2>(head, d);
  }

  template <int NumHeads, int Vectors>
  void add_values_at(int head, int d) {
    F32x16 sums_now[NumHeads][Vectors] = {};
    for (int key = base_; key < end_; key += kLanes) {
      const T* rows = rows_at(layer_.values, key) + d;
      const T* weights = scratch_.weights + head * kContextPiece + key - base_;
      const int count = std::min(kLanes, end_ - key);
      for (int row = 0; row < count; row += kUnitSize<T>) {
        const T* first = rows + row * layer_.values.row_stride;
        // The weight of a row past the end is zero; its contents may be anything, so the row before stands in.
        const T* second = row + 1 < count ? first + layer_.values.row_stride : first;
        I32x16 values[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
          if constexpr (sizeof(T) == 4) {
            values[v] = load_bits<I32x16>(first + v * kLanes);
          } else {
            values[v] = pair_values(first + v * kLanes, second + v * kLanes);
          }
        }
#pragma GCC unroll 4
        for (int h = 0; h < NumHeads; ++h) {
          const I32x16 weight = I32x16{} + load_bits<int32_t>(weights + h * kContextPiece + row);
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; ++v) sums_now[h][v] = dot<T>(sums_now[h][v], weight, values[v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < NumHeads; ++h) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) store(sums(head + h) + d + v * kLanes, sums_now[h][v]);
    }
  }

  const AttentionTask& task_;
  const AttentionShape& shape_;
  const AttentionLayer<T>& layer_;
  const int32_t* table_;
  Carver carver_;
  RowScratch<T> scratch_;
  int first_;  // first visible key of the piece
  int end_;
  int base_;  // where the vectors of 16 keys begin
};

// Merges the partial results of all pieces of one query head, in order, and writes the output row.
template <class T>
void merge_pieces(const AttentionTask& task, const AttentionShape& shape, const AttentionLayer<T>& layer,
                  const AttentionWorkspace& workspace) {
  const int dim = shape.head_dim;
  for (int head = 0; head < shape.group(); ++head) {
    float* merged = workspace.partial(task.merge, 0, head);
    for (int piece = 1; piece < task.num_pieces; ++piece) {
      const float* next = workspace.partial(task.merge, piece, head);
      const float top = std::max(merged[dim], next[dim]);
      const float keep = exp2<float>(splat(merged[dim] - top))[0], add = exp2<float>(splat(next[dim] - top))[0];
      for (int d = 0; d < dim; d += kLanes) store(merged + d, load(merged + d) * keep + load(next + d) * add);
      merged[dim] = top;
      merged[dim + 1] = merged[dim + 1] * keep + next[dim + 1] * add;
    }
    T* out = layer.out.at(task.first_token, task.kv_head * shape.group() + head);
    const float factor = 1.0f / merged[dim + 1];
    for (int d = 0; d < dim; d += kLanes) store(out + d, load(merged + d) * factor);
  }
}

template <class T>
void attend_row(const AttentionTask& task, const AttentionBatch& batch, const AttentionShape& shape,
                const AttentionLayer<T>& layer, const AttentionWorkspace& workspace, char* memory) {
  RowKernel<T> kernel(task, batch, shape, layer, memory);
  kernel.run();
  const int dim = shape.head_dim;
  for (int head = 0; head < shape.group(); ++head) {
    const float* sums = kernel.sums(head);
    if (task.num_pieces > 1) {
      std::copy_n(sums, dim + 2, workspace.partial(task.merge, task.piece, head));
      continue;
    }
    T* out = layer.out.at(task.first_token, task.kv_head * shape.group() + head);
    const float factor = 1.0f / sums[dim + 1];
    for (int d = 0; d < dim; d += kLanes) store(out + d, load(sums + d) * factor);
  }
  if (task.num_pieces == 1) return;
  std::atomic<int>& finished = workspace.finished(task.merge);
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < task.num_pieces) return;
  finished.store(0, std::memory_order_relaxed);
  merge_pieces(task, shape, layer, workspace);
}

}  // namespace tokenmill

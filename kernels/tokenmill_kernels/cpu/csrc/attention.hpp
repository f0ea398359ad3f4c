// Causal attention over the paged cache for any mix of prefill chunks and decodes.
//
// Work is split into tasks that do not depend on the layer: `AttentionPlan` is built once per step. A request with
// several new tokens is cut into blocks of queries; one with a single token is cut along its context into pieces of
// fixed length, whose partial results are merged in order, so results depend neither on batching nor on threads.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "elementwise.hpp"
#include "memory.hpp"
#include "pool.hpp"

namespace tokenmill {

// The step's requests, as `tokenmill_kernels.ops.paged_attention` describes them.
struct AttentionBatch {
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  ptrdiff_t table_stride;
  int num_requests;
};

struct AttentionShape {
  int num_heads;
  int num_kv_heads;
  int head_dim;  // even, at most kMaxHeadDim
  int block_size;

  int group() const { return num_heads / num_kv_heads; }
};

template <class T>
struct AttentionLayer {
  Heads<const T> q;
  Heads<T> out;
  PagedCache<const T> keys;
  PagedCache<const T> values;
  float scale;
  int window;      // keys a query sees, itself included; 0 for all
  float soft_cap;  // 0 for none
};

constexpr int kContextPiece = 512;  // keys per task of a decode

struct AttentionTask {
  int request;
  int kv_head;
  int first_token;  // row of the first query
  int num_tokens;   // 1 with `row_kernel`
  int piece;        // which piece of the context; 0 unless `row_kernel`
  int num_pieces;
  int merge;  // index among the (request, KV head) pairs that have several pieces
  bool row_kernel;
};

class AttentionPlan {
 public:
  // `wanted` (may be null) marks the rows whose result is needed: other query blocks are left out.
  void build(const AttentionBatch& batch, const AttentionShape& shape, const uint8_t* wanted);

  const std::vector<AttentionTask>& tasks() const { return tasks_; }
  int num_merges() const { return num_merges_; }
  int max_pieces() const { return max_pieces_; }

 private:
  void add_decode(int request, int token, int seq_len, const AttentionShape& shape);
  void add_chunk(int request, int first_token, int num_tokens, const AttentionShape& shape, const uint8_t* wanted);

  std::vector<AttentionTask> tasks_;
  int num_merges_ = 0;
  int max_pieces_ = 1;
};

// Memory of the attention tasks of a step; grows, never shrinks.
class AttentionWorkspace {
 public:
  // `elements`: size in bytes of an element of the cache.
  void reserve(const AttentionPlan& plan, const AttentionShape& shape, int num_threads);

  char* scratch(int thread) const { return scratch_.data() + thread * scratch_bytes_; }
  // Partial result of one query head over one piece: head_dim sums, then the maximum and the sum of weights.
  float* partial(int merge, int piece, int head) const {
    return partials_.as<float>() + ((static_cast<ptrdiff_t>(merge) * max_pieces_ + piece) * group_ + head) * partial_;
  }
  std::atomic<int>& finished(int merge) const { return finished_[merge]; }

 private:
  Buffer scratch_;
  Buffer partials_;
  std::unique_ptr<std::atomic<int>[]> finished_;
  size_t scratch_bytes_ = 0;
  int num_finished_ = 0;
  int max_pieces_ = 1;
  int group_ = 1;
  int partial_ = 0;
};

template <class T>
void attend(Worker& worker, const AttentionPlan& plan, const AttentionWorkspace& workspace,
            const AttentionBatch& batch, const AttentionShape& shape, const AttentionLayer<T>& layer);

}  // namespace tokenmill

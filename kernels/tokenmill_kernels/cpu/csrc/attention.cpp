#include "attention.hpp"

#include <algorithm>

#include "attention_block.hpp"
#include "attention_row.hpp"

namespace tokenmill {
namespace {

bool row_kernel_fits(const AttentionShape& shape) {
  return shape.head_dim % 32 == 0 && shape.block_size % kLanes == 0;
}

}  // namespace

void AttentionPlan::build(const AttentionBatch& batch, const AttentionShape& shape, const uint8_t* wanted) {
  tasks_.clear();
  num_merges_ = 0;
  max_pieces_ = 1;
  for (const bool decodes : {false, true}) {
    for (int request = 0; request < batch.num_requests; ++request) {
      const int first = batch.query_start_loc[request];
      const int num_tokens = batch.query_start_loc[request + 1] - first;
      const int seq_len = batch.seq_lens[request];
      const bool decode = num_tokens == 1 && row_kernel_fits(shape);
      if (num_tokens <= 0 || seq_len <= 0 || decode != decodes) continue;
      if (!decode) {
        add_chunk(request, first, num_tokens, shape, wanted);
      } else if (wanted == nullptr || wanted[first]) {
        add_decode(request, first, seq_len, shape);
      }
    }
  }
}

void AttentionPlan::add_decode(int request, int token, int seq_len, const AttentionShape& shape) {
  const int num_pieces = ceil_div(seq_len, kContextPiece);
  max_pieces_ = std::max(max_pieces_, num_pieces);
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const int merge = num_pieces > 1 ? num_merges_++ : 0;
    for (int piece = 0; piece < num_pieces; ++piece) {
      tasks_.push_back({request, kv_head, token, 1, piece, num_pieces, merge, true});
    }
  }
}

void AttentionPlan::add_chunk(int request, int first_token, int num_tokens, const AttentionShape& shape,
                              const uint8_t* wanted) {
  const int block = kBlockLanes / shape.group();
  const int num_blocks = ceil_div(num_tokens, block);
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    // The last block has the longest context: long tasks first, so that threads finish together.
    for (int index = num_blocks - 1; index >= 0; --index) {
      const int first = first_token + index * block;
      const int count = std::min(block, num_tokens - index * block);
      const auto is_wanted = [](uint8_t mark) { return mark != 0; };
      if (wanted != nullptr && std::none_of(wanted + first, wanted + first + count, is_wanted)) continue;
      tasks_.push_back({request, kv_head, first, count, 0, 1, 0, false});
    }
  }
}

void AttentionWorkspace::reserve(const AttentionPlan& plan, const AttentionShape& shape, int num_threads) {
  Carver block, row;
  BlockScratch<float>(block, shape);
  RowScratch<float>(row, shape);
  scratch_bytes_ = std::max(block.used(), row.used());
  scratch_.reserve(scratch_bytes_ * num_threads);
  max_pieces_ = plan.max_pieces();
  group_ = shape.group();
  partial_ = shape.head_dim + 2;
  partials_.reserve(static_cast<size_t>(plan.num_merges()) * max_pieces_ * group_ * partial_ * sizeof(float));
  if (plan.num_merges() > num_finished_) {
    num_finished_ = plan.num_merges();
    finished_ = std::make_unique<std::atomic<int>[]>(num_finished_);
  }
}

template <class T>
void attend(Worker& worker, const AttentionPlan& plan, const AttentionWorkspace& workspace,
            const AttentionBatch& batch, const AttentionShape& shape, const AttentionLayer<T>& layer) {
  worker.for_each(static_cast<int>(plan.tasks().size()), [&](int index) {
    const AttentionTask& task = plan.tasks()[index];
    char* scratch = workspace.scratch(worker.index());
    if (task.row_kernel) {
      attend_row(task, batch, shape, layer, workspace, scratch);
    } else {
      attend_block(task, batch, shape, layer, scratch);
    }
  });
}

template void attend(Worker&, const AttentionPlan&, const AttentionWorkspace&, const AttentionBatch&,
                     const AttentionShape&, const AttentionLayer<float>&);
template void attend(Worker&, const AttentionPlan&, const AttentionWorkspace&, const AttentionBatch&,
                     const AttentionShape&, const AttentionLayer<BFloat16>&);

}  // namespace tokenmill

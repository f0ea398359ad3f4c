// From the structs of the C interface to the typed ones.
#pragma once

#include "api.h"
#include "attention.hpp"

namespace tokenmill {

inline AttentionShape attention_shape(const TokenmillAttentionShape& shape) {
  return {shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size};
}

inline AttentionBatch attention_batch(const TokenmillAttentionBatch& batch) {
  return {batch.query_start_loc, batch.seq_lens, batch.block_tables, static_cast<ptrdiff_t>(batch.table_stride),
          batch.num_requests};
}

template <class T>
PagedCache<T> paged_cache(const TokenmillCache& cache) {
  return {static_cast<T*>(cache.data), static_cast<ptrdiff_t>(cache.block_stride),
          static_cast<ptrdiff_t>(cache.row_stride), static_cast<ptrdiff_t>(cache.head_stride)};
}

template <class T>
Heads<T> heads_of(const TokenmillHeads& heads, int count) {
  return {static_cast<T*>(heads.data), static_cast<ptrdiff_t>(heads.token_stride),
          static_cast<ptrdiff_t>(heads.head_stride), count};
}

}  // namespace tokenmill

// Draws the next token of each row of logits: temperature, min-p, top-k, top-p, then the inverse of the cumulative
// distribution in vocabulary order. Scores tokens: log-probability, rank, and the most likely ones beside them.
// Gives minus infinity to tokens that are not allowed. What comes out for a row depends on that row alone.
//
// Weights are relative to the most likely token, so the largest is 1. Nothing is sorted: filters become a threshold,
// found by selection among the few weights that can matter.

#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "memory.hpp"
#include "pool.hpp"
#include "vec.hpp"

namespace tokenmill {
namespace {

constexpr int kChunk = 256;
constexpr float kLowest = -126.0f;  // binary logarithm of the smallest weight that is not 0

struct Filter {
  int64_t top_k;
  float top_p;
  float min_p;
};

// Memory of one thread, for rows of one length.
struct Scratch {
  Buffer memory;
  int num_chunks = 0;
  float* weights = nullptr;  // padded with zeros to whole chunks
  float* chosen = nullptr;
  float* chunk_max = nullptr;
  double* chunk_sum = nullptr;

  void fit(int vocab_size) {
    num_chunks = ceil_div(vocab_size, kChunk);
    const size_t padded = static_cast<size_t>(num_chunks) * kChunk;
    memory.reserve(num_chunks * (sizeof(double) + sizeof(float)) + 2 * padded * sizeof(float));
    chunk_sum = memory.as<double>();
    weights = reinterpret_cast<float*>(chunk_sum + num_chunks);
    chosen = weights + padded;
    chunk_max = chosen + padded;
  }
};

float row_max(const float* logits, int vocab_size) {
  F32x16 highest = splat(-INFINITY);
  int index = 0;
  for (; index + kLanes <= vocab_size; index += kLanes) highest = maximum(highest, load(logits + index));
  float result = max_lanes(highest);
  for (; index < vocab_size; ++index) result = std::max(result, logits[index]);
  return result;
}

TOKENMILL_INLINE F32x16 weigh(F32x16 logits, float shift, float scale) {
  const F32x16 exponent = (logits - shift) * scale;
  const F32x16 limited = exponent < kLowest ? splat(kLowest) : exponent;
  return exponent < kLowest ? F32x16{} : exp2<float>(limited);
}

// Fills weights, chunk maxima and chunk sums; returns the sum of all, which is not a number if a logit spoils the row.
double weigh_row(const float* logits, int vocab_size, float temperature, Scratch& scratch) {
  const float shift = row_max(logits, vocab_size);
  const float scale = kLog2e / temperature;
  double total = 0;
  for (int chunk = 0; chunk < scratch.num_chunks; ++chunk) {
    F32x16 sum{}, highest{};
    for (int lane = 0; lane < kChunk; lane += kLanes) {
      const int index = chunk * kChunk + lane;
      const int left = vocab_size - index;
      F32x16 weights{};
      if (left >= kLanes) {
        weights = weigh(load(logits + index), shift, scale);
      } else if (left > 0) {
        F32x16 padded = splat(-INFINITY);
        std::memcpy(&padded, logits + index, left * sizeof(float));
        weights = weigh(padded, shift, scale);
      }
      store(scratch.weights + index, weights);
      sum += weights;
      highest = maximum(highest, weights);
    }
    scratch.chunk_max[chunk] = max_lanes(highest);
    scratch.chunk_sum[chunk] = sum_lanes(sum);
    total += scratch.chunk_sum[chunk];
  }
  return total;
}

double sum(const float* values, int64_t count) {
  double total = 0;
  for (int64_t index = 0; index < count; ++index) total += values[index];
  return total;
}

// Copies the weights of at least `bound` to `chosen`; returns how many.
int64_t choose(Scratch& scratch, float bound) {
  float* out = scratch.chosen;
  for (int chunk = 0; chunk < scratch.num_chunks; ++chunk) {
    if (scratch.chunk_max[chunk] < bound) continue;
    const float* weights = scratch.weights + static_cast<ptrdiff_t>(chunk) * kChunk;
    for (int lane = 0; lane < kChunk; ++lane) {
      *out = weights[lane];
      out += weights[lane] >= bound;
    }
  }
  return out - scratch.chosen;
}

// The largest of `values` such that those at least as large have `mass` together; reorders them.
float mass_threshold(float* values, int64_t count, double mass) {
  float threshold = 0;
  while (count > 0) {
    const float first = values[0], middle = values[count / 2], last = values[count - 1];
    const float pivot = std::max(std::min(first, middle), std::min(std::max(first, middle), last));
    float* const above_end = std::partition(values, values + count, [=](float value) { return value > pivot; });
    float* const equal_end = std::partition(above_end, values + count, [=](float value) { return value == pivot; });
    const double above = sum(values, above_end - values);
    const double equal = static_cast<double>(pivot) * static_cast<double>(equal_end - above_end);
    if (above >= mass && above_end > values) {
      count = above_end - values;
      continue;
    }
    threshold = pivot;
    if (above + equal >= mass) break;
    mass -= above + equal;
    count -= equal_end - values;
    values = equal_end;
  }
  return threshold;
}

// A lower bound of the k-th largest weight: as many are at least as large as the k-th largest maximum of a chunk.
float top_bound(int64_t k, Scratch& scratch) {
  if (k > scratch.num_chunks) return 0;
  std::copy(scratch.chunk_max, scratch.chunk_max + scratch.num_chunks, scratch.chosen);
  float* const kth = scratch.chosen + (k - 1);
  std::nth_element(scratch.chosen, kth, scratch.chosen + scratch.num_chunks, std::greater<>());
  return *kth;
}

// The smallest weight that the filters keep; what ties with it is kept too.
float threshold(const Filter& filter, int vocab_size, double total, Scratch& scratch) {
  const bool cuts_count = filter.top_k < vocab_size;
  float bound = std::min(filter.min_p, 1.0f);
  if (cuts_count) {
    bound = std::max(bound, top_bound(filter.top_k, scratch));
  } else if (bound <= 0) {
    // All weights under this together are less than what top_p leaves out.
    bound = static_cast<float>((1.0 - filter.top_p) * total / vocab_size * 0.999);
  }
  float* const chosen = scratch.chosen;
  int64_t count = choose(scratch, bound);
  if (cuts_count && filter.top_k < count) {
    std::nth_element(chosen, chosen + (filter.top_k - 1), chosen + count, std::greater<>());
    bound = chosen[filter.top_k - 1];
    count = std::partition(chosen, chosen + count, [=](float value) { return value >= bound; }) - chosen;
  }
  if (filter.top_p >= 1.0f) return bound;
  const double remaining = cuts_count || filter.min_p > 0 ? sum(chosen, count) : total;
  return mass_threshold(chosen, count, filter.top_p * remaining);
}

// Sets the chunk sums to those of the weights of at least `bound`; returns the sum of all.
double keep(float bound, Scratch& scratch) {
  double total = 0;
  for (int chunk = 0; chunk < scratch.num_chunks; ++chunk) {
    F32x16 kept{};
    if (scratch.chunk_max[chunk] >= bound) {
      const float* weights = scratch.weights + static_cast<ptrdiff_t>(chunk) * kChunk;
      for (int lane = 0; lane < kChunk; lane += kLanes) {
        const F32x16 values = load(weights + lane);
        kept += values >= bound ? values : F32x16{};
      }
    }
    scratch.chunk_sum[chunk] = sum_lanes(kept);
    total += scratch.chunk_sum[chunk];
  }
  return total;
}

// First token at which the running sum of the weights of at least `bound` exceeds `target`.
int find(double target, float bound, const Scratch& scratch) {
  int chunk = 0, last_chunk = 0;
  double before = 0;
  for (; chunk < scratch.num_chunks; ++chunk) {
    if (before + scratch.chunk_sum[chunk] > target) break;
    before += scratch.chunk_sum[chunk];
    if (scratch.chunk_sum[chunk] > 0) last_chunk = chunk;
  }
  // Rounding can leave the target at the very end.
  if (chunk == scratch.num_chunks) chunk = last_chunk;
  const float* weights = scratch.weights + static_cast<ptrdiff_t>(chunk) * kChunk;
  int token = 0;
  for (int lane = 0; lane < kChunk; ++lane) {
    if (weights[lane] < bound || weights[lane] <= 0) continue;
    token = chunk * kChunk + lane;
    before += weights[lane];
    if (before > target) break;
  }
  return token;
}

int draw(const float* logits, int vocab_size, float temperature, const Filter& filter, double u, Scratch& scratch) {
  double total = weigh_row(logits, vocab_size, temperature, scratch);
  if (!std::isfinite(total)) return -1;
  float bound = 0;
  if (filter.top_k < vocab_size || filter.top_p < 1.0f || filter.min_p > 0) {
    bound = threshold(filter, vocab_size, total, scratch);
    total = keep(bound, scratch);
  }
  return find(u * total, bound, scratch);
}

// Row `row` of the answer to `rows`. Rows that are not numbers get scores that are none.
void score(const TokenmillScore& rows, int row, Scratch& scratch) {
  const float* logits = rows.logits + row * rows.row_stride;
  const int64_t own = rows.own[row];
  int32_t* const token_ids = rows.token_ids + static_cast<ptrdiff_t>(row) * (1 + rows.num_top);
  float* const logprobs = rows.logprobs + static_cast<ptrdiff_t>(row) * (1 + rows.num_top);

  const double total = weigh_row(logits, rows.vocab_size, 1.0f, scratch);
  const double log_total = row_max(logits, rows.vocab_size) + std::log(total);
  int more_likely = 0;
  for (int token = 0; token < rows.vocab_size; ++token) more_likely += logits[token] > logits[own];
  rows.ranks[row] = 1 + more_likely;
  token_ids[0] = static_cast<int32_t>(own);
  logprobs[0] = static_cast<float>(logits[own] - log_total);
  if (rows.num_top == 0) return;

  // `chosen` holds token ids here, in the order of the vocabulary. Weights of 0 may hide different logits.
  const float bound = std::isfinite(total) ? top_bound(rows.num_top, scratch) : 0;
  int32_t* const tokens = reinterpret_cast<int32_t*>(scratch.chosen);
  int count = 0;
  for (int chunk = 0; chunk < scratch.num_chunks; ++chunk) {
    if (scratch.chunk_max[chunk] < bound) continue;
    const int first = chunk * kChunk, end = std::min(first + kChunk, rows.vocab_size);
    for (int token = first; token < end; ++token) {
      tokens[count] = token;
      count += !(scratch.weights[token] < bound);
    }
  }
  // A total order, so that nothing but the row decides; what is not a number comes last.
  const auto before = [logits](int32_t a, int32_t b) {
    const float first = std::isnan(logits[a]) ? -INFINITY : logits[a];
    const float second = std::isnan(logits[b]) ? -INFINITY : logits[b];
    return first != second ? first > second : a < b;
  };
  std::partial_sort(tokens, tokens + rows.num_top, tokens + count, before);
  for (int top = 0; top < rows.num_top; ++top) {
    token_ids[1 + top] = tokens[top];
    logprobs[1 + top] = static_cast<float>(logits[tokens[top]] - log_total);
  }
}

// 32 tokens for each word of `bits`; most words allow all tokens, or none.
void mask(float* logits, const int32_t* bits, int vocab_size) {
  for (int first = 0; first < vocab_size; first += 32) {
    const uint32_t word = static_cast<uint32_t>(bits[first / 32]);
    if (word == ~0u) continue;
    float* const group = logits + first;
    const int count = std::min(32, vocab_size - first);
    for (int place = 0; place < count; ++place) group[place] = word >> place & 1 ? group[place] : -INFINITY;
  }
}

// Calls body(row, scratch) for every row, on all threads. 0, or 1 if memory ran out.
template <class Body>
int32_t run_rows(int num_rows, int vocab_size, const Body& body) {
  static std::mutex mutex;
  static std::vector<Scratch> scratches;
  const std::lock_guard lock(mutex);
  try {
    ThreadPool& pool = ThreadPool::instance();
    scratches.resize(pool.num_threads());
    for (Scratch& scratch : scratches) scratch.fit(vocab_size);
    pool.run([&](Worker& worker) {
      worker.for_each(num_rows, [&](int row) { body(row, scratches[worker.index()]); });
    });
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace
}  // namespace tokenmill

int32_t tokenmill_draw(const TokenmillDraw* rows) {
  using namespace tokenmill;
  return run_rows(rows->num_rows, rows->vocab_size, [rows](int row, Scratch& scratch) {
    const Filter filter{rows->top_k[row], rows->top_p[row], rows->min_p[row]};
    const float* logits = rows->logits + rows->rows[row] * rows->row_stride;
    rows->tokens[row] = draw(logits, rows->vocab_size, rows->temperature[row], filter, rows->u[row], scratch);
  });
}

int32_t tokenmill_score(const TokenmillScore* rows) {
  using namespace tokenmill;
  return run_rows(rows->num_rows, rows->vocab_size, [rows](int row, Scratch& scratch) { score(*rows, row, scratch); });
}

int32_t tokenmill_mask(const TokenmillMask* rows) {
  using namespace tokenmill;
  const int num_words = ceil_div(rows->vocab_size, 32);
  return run_rows(rows->num_rows, rows->vocab_size, [rows, num_words](int row, Scratch&) {
    mask(rows->logits + rows->rows[row] * rows->row_stride, rows->bits + static_cast<ptrdiff_t>(row) * num_words,
         rows->vocab_size);
  });
}

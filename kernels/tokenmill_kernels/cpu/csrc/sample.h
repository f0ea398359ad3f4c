// Interface of sample.cpp, mirrored by sampling.py.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const float* logits;
  int64_t row_stride;
  const int64_t* rows;       // [num_rows] which rows of logits
  const float* temperature;  // [num_rows], as all below
  const int64_t* top_k;      // at least 1; vocab_size or more keeps all
  const float* top_p;        // 1 keeps all
  const float* min_p;        // 0 keeps all
  const double* u;           // in [0, 1)
  int32_t* tokens;           // out; -1 for a row that is not a distribution
  int32_t num_rows;
  int32_t vocab_size;
} TokenmillDraw;

typedef struct {
  const float* logits;
  int64_t row_stride;
  const int64_t* own;   // [num_rows] the token that each row is asked about
  int32_t* token_ids;   // out: [num_rows, 1 + num_top] own token, then the most likely ones
  float* logprobs;      // out: [num_rows, 1 + num_top]
  int32_t* ranks;       // out: [num_rows] 1 plus the number of tokens more likely than the own one
  int32_t num_rows;
  int32_t vocab_size;
  int32_t num_top;      // at most vocab_size
} TokenmillScore;

typedef struct {
  float* logits;
  int64_t row_stride;
  const int32_t* rows;  // [num_rows] which rows of logits
  const int32_t* bits;  // [num_rows, ceil(vocab_size / 32)] bit i % 32 of word i / 32 is set if token i is allowed
  int32_t num_rows;
  int32_t vocab_size;
} TokenmillMask;

// All give 0, or 1 if memory ran out.
__attribute__((visibility("default"))) int32_t tokenmill_draw(const TokenmillDraw* rows);
__attribute__((visibility("default"))) int32_t tokenmill_score(const TokenmillScore* rows);
__attribute__((visibility("default"))) int32_t tokenmill_mask(const TokenmillMask* rows);

#ifdef __cplusplus
}
#endif

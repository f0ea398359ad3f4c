/* The C interface of the library; `library.py` mirrors it with ctypes.
 *
 * Pointers are to contiguous rows unless a stride (in elements) is given. Arrays of weights and activations have the
 * element type `dtype`. Nothing is checked here: the Python side does. Functions that return int give 0, or 1 when
 * memory ran out.
 */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TOKENMILL_API __attribute__((visibility("default")))

enum TokenmillDtype { TOKENMILL_FLOAT32 = 0, TOKENMILL_BFLOAT16 = 1 };

/* Keys or values of one layer: element (block, row, head, d) is at
 * data[block * block_stride + row * row_stride + head * head_stride + d]. */
typedef struct {
  void* data;
  int64_t block_stride;
  int64_t row_stride;
  int64_t head_stride;
} TokenmillCache;

/* Element (token, head, d) is at data[token * token_stride + head * head_stride + d]. */
typedef struct {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
} TokenmillHeads;

typedef struct {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
} TokenmillAttentionShape;

/* The requests of a step; see tokenmill_kernels.ops.paged_attention. */
typedef struct {
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  int64_t table_stride;
  int32_t num_requests;
} TokenmillAttentionBatch;

typedef struct {
  TokenmillHeads q;
  TokenmillHeads k;
  TokenmillHeads v;
  TokenmillCache keys;
  TokenmillCache values;
  const float* cos_sin;
  const int32_t* positions;
  const int64_t* slot_mapping;
  const void* q_norm; /* or null */
  const void* k_norm; /* or null */
  float eps;
  int32_t rotary_dim;
  int32_t num_tokens;
} TokenmillRotary;

typedef struct {
  TokenmillHeads q;
  TokenmillHeads out;
  TokenmillCache keys;
  TokenmillCache values;
  float scale;
  float soft_cap; /* 0: none */
  int32_t window; /* 0: none */
} TokenmillAttention;

typedef struct {
  const void* x;
  int64_t x_stride; /* even for bfloat16 */
  const void* weight; /* packed */
  const void* bias;   /* or null */
  void* out;
  int64_t out_stride;
  int32_t num_rows;
  int32_t in_features;
  int32_t out_features;
  int32_t dtype;
  int32_t out_dtype; /* dtype, or float32 */
} TokenmillLinear;

typedef struct {
  int32_t dtype;
  int32_t hidden_size;
  int32_t intermediate_size;
  int32_t num_layers;
  int32_t vocab_size;
  int32_t rotary_dim;
  float eps;
  float scale;
  float soft_cap;
  const float* cos_sin;
  const void* embedding;  /* packed [vocab_size, hidden_size] */
  const void* final_norm; /* [hidden_size] */
  TokenmillAttentionShape attention;
} TokenmillDecoderShape;

/* Weights are packed, biases and q_norm, k_norm may be null. Panels of gate and up alternate in `gate_up`. */
typedef struct {
  const void* input_norm;
  const void* qkv;
  const void* qkv_bias;
  const void* output;
  const void* output_bias;
  const void* post_attention_norm;
  const void* gate_up;
  const void* gate_bias;
  const void* up_bias;
  const void* down;
  const void* down_bias;
  const void* q_norm;
  const void* k_norm;
  TokenmillCache keys;
  TokenmillCache values;
  int32_t window;
} TokenmillDecoderLayer;

typedef struct {
  const int32_t* input_ids;
  const int32_t* positions;
  const int64_t* slot_mapping;
  const int32_t* output_rows; /* ascending rows whose hidden state is wanted; null for all */
  void* out;                  /* [num_outputs, hidden_size] */
  const void* embeddings;     /* [num_tokens, hidden_size] instead of the rows of `input_ids`; null for these */
  const float* cos_sin;       /* what `positions` name rows of, instead of the decoder's own table; null for that */
  /* Behind layer l of the first `num_added_layers`, fewer than there are, the `hidden_size` values that begin at
   * added + r * added_stride + l * hidden_size are added to token added_tokens[r] (no two alike). */
  const void* added;
  const int64_t* added_tokens;
  int64_t added_stride;
  int32_t num_added;
  int32_t num_added_layers;
  int32_t num_tokens;
  int32_t num_outputs;
  TokenmillAttentionBatch attention;
} TokenmillStep;

TOKENMILL_API void tokenmill_set_num_threads(int32_t count);
TOKENMILL_API int32_t tokenmill_num_threads(void);

/* Writes source feature f to panel first_panel + f / 16 * panel_step of `packed`, which must be zeroed when the last
 * panel is not full. */
TOKENMILL_API void tokenmill_pack(int32_t dtype, const void* weight, int64_t row_stride, int32_t out_features,
                                  int32_t in_features, int32_t first_panel, int32_t panel_step, void* packed);
/* out[i] = row ids[i] of a packed matrix. */
TOKENMILL_API void tokenmill_packed_rows(int32_t dtype, const void* packed, int32_t in_features, const int64_t* ids,
                                         int32_t num_ids, void* out);
TOKENMILL_API void tokenmill_linear(const TokenmillLinear* linear);
/* `out` is int64 [num_rows]; -1 for a row with a NaN. */
TOKENMILL_API int tokenmill_linear_argmax(const TokenmillLinear* linear);
TOKENMILL_API void tokenmill_rms_norm(int32_t dtype, const void* x, int64_t x_stride, const void* weight, void* out,
                                      int32_t num_rows, int32_t size, float eps);
TOKENMILL_API void tokenmill_add_rms_norm(int32_t dtype, const void* x, int64_t x_stride, void* residual,
                                          int64_t residual_stride, const void* weight, void* out, int32_t num_rows,
                                          int32_t size, float eps);
TOKENMILL_API void tokenmill_silu_mul(int32_t dtype, const void* gate_up, int64_t stride, void* out, int32_t num_rows,
                                      int32_t size);
TOKENMILL_API void tokenmill_rotary_kv_write(int32_t dtype, const TokenmillAttentionShape* shape,
                                             const TokenmillRotary* rotary);
TOKENMILL_API int tokenmill_paged_attention(int32_t dtype, const TokenmillAttentionShape* shape,
                                            const TokenmillAttentionBatch* batch, const TokenmillAttention* attention);

/* The decoder keeps the pointers it is given; `layers` itself is copied. Null when memory ran out. */
TOKENMILL_API void* tokenmill_decoder_create(const TokenmillDecoderShape* shape, const TokenmillDecoderLayer* layers);
TOKENMILL_API void tokenmill_decoder_destroy(void* decoder);
TOKENMILL_API int tokenmill_decoder_forward(void* decoder, const TokenmillStep* step);

#ifdef __cplusplus
}
#endif

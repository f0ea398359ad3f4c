// A whole dense decoder stack, from token ids to the final norm, in one parallel region.
#pragma once

#include <memory>

#include "api.h"

namespace tokenmill {

class Decoder {
 public:
  virtual ~Decoder() = default;

  // Calls must not overlap. Throws std::bad_alloc before anything is written to the cache.
  virtual void forward(const TokenmillStep& step) = 0;
};

std::unique_ptr<Decoder> make_decoder(const TokenmillDecoderShape& shape, const TokenmillDecoderLayer* layers);

}  // namespace tokenmill

// The innermost loops of every matrix product: a tile of a few rows times 1, 2 or 4 panels of 16 columns, whose sums
// stay in registers for the whole summed dimension.
#pragma once

#include "vec.hpp"

namespace tokenmill {

// Rows that fit the register file next to one row of the other operand.
#if TOKENMILL_AVX512 || defined(__aarch64__)
template <int Panels>
constexpr int kMaxTileRows = Panels == 4 ? 6 : 12;
#else
template <int Panels>
constexpr int kMaxTileRows = Panels == 4 ? 2 : Panels == 2 ? 3 : 6;
#endif

// Rows of the next tile when `left` rows are to be covered by tiles of nearly equal height, at most `limit`.
constexpr int tile_rows(int left, int limit) { return ceil_div(left, ceil_div(left, limit)); }

// Unit (row, k) lies at data[row * row_stride + k * step].
struct TileRows {
  const int32_t* data;
  ptrdiff_t row_stride;
  ptrdiff_t step;
};

// Unit (k, column) of panel p lies at data[p * panel_stride + k * 16 + column].
struct TilePanels {
  const int32_t* data;
  ptrdiff_t panel_stride;
};

// Cache lines that are fetched while the tile is computed.
struct Upcoming {
  const char* data = nullptr;
  int lines = 0;
};

// out[num_rows][Panels * 16] = rows times panels over `units`; 1 <= num_rows <= kMaxTileRows<Panels>.
template <class T, int Panels>
void product_tile(int num_rows, TileRows rows, TilePanels panels, int units, Upcoming upcoming, float* out);

// As `product_tile`, added to `out` after out's columns were multiplied by `scale` [Panels * 16].
template <class T, int Panels>
void rescaled_tile(int num_rows, TileRows rows, TilePanels panels, int units, const float* scale, float* out);

}  // namespace tokenmill

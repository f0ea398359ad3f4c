#include "tile.hpp"

namespace tokenmill {
namespace {

// Lines are fetched a few at a time between runs of this many units, as fast as the arithmetic goes.
constexpr int kPrefetchUnits = 8;
constexpr int kLineBytes = 64;

template <class T, int NumRows, int Panels>
TOKENMILL_INLINE void accumulate(F32x16 (&sums)[NumRows][Panels], const int32_t* a, const TileRows& rows,
                                 const int32_t* b, ptrdiff_t panel_stride, int units) {
#pragma GCC unroll 1
  for (int k = 0; k < units; ++k) {
    I32x16 columns[Panels];
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) columns[panel] = load_bits<I32x16>(b + panel * panel_stride);
#pragma GCC unroll 12
    for (int row = 0; row < NumRows; ++row) {
      const I32x16 unit = I32x16{} + a[row * rows.row_stride];
#pragma GCC unroll 4
      for (int panel = 0; panel < Panels; ++panel) sums[row][panel] = dot<T>(sums[row][panel], unit, columns[panel]);
    }
    a += rows.step;
    b += kLanes;
  }
}

template <class T, int NumRows, int Panels>
void product_tile_of(TileRows rows, TilePanels panels, int units, Upcoming upcoming,
                                               float* out) {
  F32x16 sums[NumRows][Panels] = {};
  if (upcoming.lines > 0) {
    const int lines_each = ceil_div(upcoming.lines, ceil_div(units, kPrefetchUnits));
    int line = 0;
    for (int k = 0; k < units; k += kPrefetchUnits) {
      const int last = line + lines_each < upcoming.lines ? line + lines_each : upcoming.lines;
      for (; line < last; ++line) prefetch_far(upcoming.data + line * kLineBytes);
      const int count = units - k < kPrefetchUnits ? units - k : kPrefetchUnits;
      accumulate<T>(sums, rows.data + k * rows.step, rows, panels.data + k * kLanes, panels.panel_stride, count);
    }
  } else {
    accumulate<T>(sums, rows.data, rows, panels.data, panels.panel_stride, units);
  }
#pragma GCC unroll 12
  for (int row = 0; row < NumRows; ++row) {
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) store(out + (row * Panels + panel) * kLanes, sums[row][panel]);
  }
}

// out = out * scale (a factor per column) + product. `out` is [NumRows][Panels * 16].
template <class T, int NumRows, int Panels>
void rescaled_tile_of(TileRows rows, TilePanels panels, int units, const float* scale,
                                                float* out) {
  F32x16 sums[NumRows][Panels];
#pragma GCC unroll 4
  for (int panel = 0; panel < Panels; ++panel) {
    const F32x16 factor = load(scale + panel * kLanes);
#pragma GCC unroll 12
    for (int row = 0; row < NumRows; ++row) {
      sums[row][panel] = load(out + (row * Panels + panel) * kLanes) * factor;
    }
  }
  accumulate<T>(sums, rows.data, rows, panels.data, panels.panel_stride, units);
#pragma GCC unroll 12
  for (int row = 0; row < NumRows; ++row) {
#pragma GCC unroll 4
    for (int panel = 0; panel < Panels; ++panel) store(out + (row * Panels + panel) * kLanes, sums[row][panel]);
  }
}

template <class T, int Panels, int... Index>
TOKENMILL_INLINE void product_tile_switch(int num_rows, TileRows rows, TilePanels panels, int units, Upcoming upcoming,
                                          float* out, std::integer_sequence<int, Index...>) {
  using Tile = void (*)(TileRows, TilePanels, int, Upcoming, float*);
  static constexpr Tile kTiles[] = {product_tile_of<T, Index + 1, Panels>...};
  kTiles[num_rows - 1](rows, panels, units, upcoming, out);
}

template <class T, int Panels, int... Index>
TOKENMILL_INLINE void rescaled_tile_switch(int num_rows, TileRows rows, TilePanels panels, int units,
                                           const float* scale, float* out, std::integer_sequence<int, Index...>) {
  using Tile = void (*)(TileRows, TilePanels, int, const float*, float*);
  static constexpr Tile kTiles[] = {rescaled_tile_of<T, Index + 1, Panels>...};
  kTiles[num_rows - 1](rows, panels, units, scale, out);
}

}  // namespace

template <class T, int Panels>
void product_tile(int num_rows, TileRows rows, TilePanels panels, int units, Upcoming upcoming, float* out) {
  product_tile_switch<T, Panels>(num_rows, rows, panels, units, upcoming, out,
                                 std::make_integer_sequence<int, kMaxTileRows<Panels>>{});
}

template <class T, int Panels>
void rescaled_tile(int num_rows, TileRows rows, TilePanels panels, int units, const float* scale, float* out) {
  rescaled_tile_switch<T, Panels>(num_rows, rows, panels, units, scale, out,
                                  std::make_integer_sequence<int, kMaxTileRows<Panels>>{});
}

template void product_tile<float, 1>(int, TileRows, TilePanels, int, Upcoming, float*);
template void rescaled_tile<float, 1>(int, TileRows, TilePanels, int, const float*, float*);
template void product_tile<float, 2>(int, TileRows, TilePanels, int, Upcoming, float*);
template void rescaled_tile<float, 2>(int, TileRows, TilePanels, int, const float*, float*);
template void product_tile<float, 4>(int, TileRows, TilePanels, int, Upcoming, float*);
template void rescaled_tile<float, 4>(int, TileRows, TilePanels, int, const float*, float*);
template void product_tile<BFloat16, 1>(int, TileRows, TilePanels, int, Upcoming, float*);
template void rescaled_tile<BFloat16, 1>(int, TileRows, TilePanels, int, const float*, float*);
template void product_tile<BFloat16, 2>(int, TileRows, TilePanels, int, Upcoming, float*);
template void rescaled_tile<BFloat16, 2>(int, TileRows, TilePanels, int, const float*, float*);
template void product_tile<BFloat16, 4>(int, TileRows, TilePanels, int, Upcoming, float*);
template void rescaled_tile<BFloat16, 4>(int, TileRows, TilePanels, int, const float*, float*);

}  // namespace tokenmill

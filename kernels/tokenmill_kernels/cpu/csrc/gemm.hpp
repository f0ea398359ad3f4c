// Products of activations with packed weights: out[row, n] = sum over k of a[row, k] * weight[n, k].
//
// A packed weight holds panels of 16 output features; a panel is, unit by unit along k, the 16 units of its features:
// [ceil(N / 16)][K / unit][16] units, missing features zero. A small product reads each weight once, in order,
// which is what a decode step is made of; a large one keeps a group of panels in the second-level cache.
//
// Each output is one chain of additions along k whatever the number of rows: results do not depend on batching.
#pragma once

#include <algorithm>

#include "pool.hpp"
#include "tile.hpp"

namespace tokenmill {

template <class T>
struct PackedMatrix {
  const T* data;
  int out_features;
  int in_features;

  int units() const { return in_features / kUnitSize<T>; }
  int panels() const { return ceil_div(out_features, kLanes); }
  ptrdiff_t panel_units() const { return static_cast<ptrdiff_t>(units()) * kLanes; }
  const int32_t* panel(int index) const { return reinterpret_cast<const int32_t*>(data) + index * panel_units(); }
};

template <class T>
struct Rows {
  const T* data;
  ptrdiff_t stride;  // elements between rows; a multiple of the unit
  int count;
};

// A finished block of the product, in float32: values[row * stride + column].
struct Block {
  const float* values;
  int stride;
  int first_row;
  int rows;
  int first_column;
  int columns;  // a multiple of 16; columns past the last feature hold zeros
};

constexpr int kSmallProductRows = 64;
constexpr int kRowsPerTask = 192;
// With fewer rows there is less arithmetic than memory traffic, and the processor's own prefetching does better.
constexpr int kFetchAheadRows = 2;

// The part of `lines` cache lines that falls to one of several passes.
inline Upcoming share_of(const int32_t* lines, int count, int pass, int passes) {
  const int first = count * pass / passes, end = count * (pass + 1) / passes;
  return {reinterpret_cast<const char*>(lines + static_cast<ptrdiff_t>(first) * kLanes), end - first};
}

// Panels panel .. panel + Panels - 1 times some rows. As many panels from `upcoming` on are fetched meanwhile, unless
// it is negative.
template <class T, int Panels, class Finish>
void multiply_panels(const Rows<T>& a, int first_row, int end_row, const PackedMatrix<T>& weight, int panel,
                     int upcoming, Finish& finish) {
  alignas(64) float values[kMaxTileRows<Panels> * Panels * kLanes];
  const ptrdiff_t a_stride = a.stride / kUnitSize<T>;
  const int passes = ceil_div(end_row - first_row, kMaxTileRows<Panels>);
  const int lines = Panels * weight.units();
  int pass = 0;
  for (int row = first_row; row < end_row; ++pass) {
    const int rows = tile_rows(end_row - row, kMaxTileRows<Panels>);
    const int32_t* units = reinterpret_cast<const int32_t*>(a.data) + row * a_stride;
    const Upcoming ahead = upcoming < 0 ? Upcoming{} : share_of(weight.panel(upcoming), lines, pass, passes);
    finish.prepare(row, rows, panel * kLanes, Panels * kLanes);
    product_tile<T, Panels>(rows, {units, a_stride, 1}, {weight.panel(panel), weight.panel_units()}, weight.units(),
                            ahead, values);
    finish(Block{values, Panels * kLanes, row, rows, panel * kLanes, Panels * kLanes});
    row += rows;
  }
}

// finish(block) is called once for every block of the product, from any thread; panels come in pairs where their
// number is even. finish.prepare(row, rows, column, columns) announces the block before its values are computed, time
// enough to fetch the memory it will write.
template <class T, class Finish>
void multiply(Worker& worker, const Rows<T>& a, const PackedMatrix<T>& weight, Finish&& finish) {
  const int panels = weight.panels();
  const bool small = a.count <= kSmallProductRows;
  const int group = small && panels < 64 * worker.count() ? 2 : 4;
  const int groups = ceil_div(panels, group);
  const int chunks = small ? 1 : ceil_div(a.count, kRowsPerTask);
  worker.for_each(groups * chunks, [&](int task) {
    const int chunk = task % chunks;
    const int first_row = static_cast<int>(static_cast<int64_t>(a.count) * chunk / chunks);
    const int end_row = static_cast<int>(static_cast<int64_t>(a.count) * (chunk + 1) / chunks);
    const int first = task / chunks * group, end = std::min(first + group, panels);
    const bool fetch_ahead = a.count >= kFetchAheadRows && chunk == chunks - 1;
    for (int panel = first; panel < end;) {
      const int upcoming = fetch_ahead && panel + 2 * group <= panels ? panel + group : -1;
      if (end - panel >= 4) {
        multiply_panels<T, 4>(a, first_row, end_row, weight, panel, upcoming, finish);
        panel += 4;
      } else if (end - panel >= 2) {
        multiply_panels<T, 2>(a, first_row, end_row, weight, panel, upcoming, finish);
        panel += 2;
      } else {
        multiply_panels<T, 1>(a, first_row, end_row, weight, panel, upcoming, finish);
        panel += 1;
      }
    }
  });
}

// out[in_features] = row `feature` of the matrix.
template <class T, class Out>
void copy_packed_row(const PackedMatrix<T>& matrix, int64_t feature, Out* out) {
  const int32_t* from = matrix.panel(static_cast<int>(feature / kLanes)) + feature % kLanes;
  for (int unit = 0; unit < matrix.units(); ++unit) {
    T values[kUnitSize<T>];
    std::memcpy(values, from + static_cast<ptrdiff_t>(unit) * kLanes, sizeof(values));
    for (int i = 0; i < kUnitSize<T>; ++i) out[unit * kUnitSize<T> + i] = convert<Out>(values[i]);
  }
}

// Fetches `columns` elements of some rows for writing.
template <class Out>
TOKENMILL_INLINE void fetch_rows(const Out* first, ptrdiff_t stride, int rows, int columns) {
  constexpr int kLine = 64 / sizeof(Out);
  for (int row = 0; row < rows; ++row, first += stride) {
    for (int column = 0; column < columns; column += kLine) prefetch_write(first + column);
  }
}

// Writes the block plus `bias` (may be null) to `out`, rows `out_stride` apart.
template <class Out, class T>
struct StoreBlock {
  Out* out;
  ptrdiff_t out_stride;
  const T* bias;
  int out_features;

  TOKENMILL_INLINE void prepare(int row, int rows, int column, int columns) const {
    fetch_rows(out + row * out_stride + column, out_stride, rows, std::min(columns, out_features - column));
  }

  void operator()(const Block& block) const {
    for (int column = 0; column < block.columns; column += kLanes) {
      const int valid = std::min(kLanes, out_features - block.first_column - column);
      const int feature = block.first_column + column;
      const F32x16 offset = bias == nullptr   ? F32x16{}
                            : valid == kLanes ? load(bias + feature)
                                              : load_partial(bias + feature, valid);
      for (int row = 0; row < block.rows; ++row) {
        Out* to = out + (block.first_row + row) * out_stride + feature;
        const F32x16 values = load(block.values + row * block.stride + column) + offset;
        if (valid == kLanes) {
          store(to, values);
        } else {
          store_partial(to, values, valid);
        }
      }
    }
  }
};

}  // namespace tokenmill

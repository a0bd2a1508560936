// Products of bytes by AMX (Intel Architecture Instruction Set Extensions, chapter 3): registers that hold 16 rows of 64 bytes,
// and an instruction that adds 16 x 16 sums of 64 products. The panels of a weight are already laid out for it, and so are rows
// as bytes. The sums are those of `Quads`, and so are all bits.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

constexpr int kTileRows = 16, kTileTerms = 64;  // and as many features as rows

// Compilers do not know which memory these instructions read.
inline void written(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// The registers while there is one of these on a thread. All hold 16 rows of 64 bytes: 0 to 3 sums, 4 and 5 rows, 6 and 7 weights.
// They are given up at the end: oneDNN reads how they are before it uses them, and an idle thread is switched faster.
class TileRegisters {
  public:
    TileRegisters() {
        alignas(64) uint8_t shape[64] = {1};
        for (int n = 0; n < 8; n++) shape[16 + 2 * n] = kTileTerms, shape[48 + n] = kTileRows;
        written(shape);
        _tile_loadconfig(shape);
    }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

// Sums of R times 16 rows, `kInt8Block` bytes apart, with 32 features of a panel, over `terms` terms: (16 R, 32).
template <int R> SACCADE_INLINE void tile_sums(const uint8_t* x, const int8_t* w, int64_t terms, int32_t* sums) {
    constexpr int line = 4 * kInt8Panel, wide = 2 * kTileRows * sizeof(int32_t);
    written(x);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (R == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < terms; k += kTileTerms) {
        const int8_t* const from = w + k / 4 * line;
        _tile_loadd(6, from, line);
        _tile_loadd(7, from + kTileTerms, line);
        _tile_loadd(4, x + k, kInt8Block);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if constexpr (R == 2) {
            _tile_loadd(5, x + kTileRows * kInt8Block + k, kInt8Block);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, wide);
    _tile_stored(1, sums + kTileRows, wide);
    if constexpr (R == 2) {
        _tile_stored(2, sums + 2 * kTileRows * kTileRows, wide);
        _tile_stored(3, sums + 2 * kTileRows * kTileRows + kTileRows, wide);
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

// Rows as bytes, and their products with one panel of a weight, block by block.
//
// Shape legend: R rows, E width, F features, N blocks of E.
#pragma once

#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "call.h"
#include "simd.h"
#if defined(__AMX_INT8__)
#include "int8_tiles.h"
#endif

namespace saccade {
namespace SACCADE_SET {

// How terms are taken at once. `Quads`: four by one instruction, bytes as they are. `Halves`: even and odd terms as 16 bits.
// `Tiles`: 64 by one instruction.
struct Halves {
    static constexpr int at_once = 1, rows = registers == 32 ? 4 : 3, vectors = registers == 32 ? 4 : 2, bytes = 2;
    typedef vs Line[2];
    typedef vs Spread[2];
    static SACCADE_INLINE void line(const int8_t* w, Line& to) {
        const vs both = (vs)load(reinterpret_cast<const uint32_t*>(w));
        to[0] = both << 8 >> 8, to[1] = both >> 8;
    }
    static SACCADE_INLINE void spread(const uint8_t* x, Spread& to) {
        uint32_t even, odd;
        memcpy(&even, x, 4), memcpy(&odd, x + 4, 4);
        to[0] = (vs)splat_u(even), to[1] = (vs)splat_u(odd);
    }
    static SACCADE_INLINE vi add(vi sum, const Spread& x, const Line& w) {
        return sum + pair_sums(x[0], w[0]) + pair_sums(x[1], w[1]);
    }
    // Bytes x0 x1 x2 x3 as 16 bits, x0 x2 x1 x3.
    static void widen(const uint8_t* from, int64_t count, uint8_t* to) {
        uint16_t* wide = reinterpret_cast<uint16_t*>(to);
        for (int64_t k = 0; k < count; k += 4)
            wide[k] = from[k], wide[k + 1] = from[k + 2], wide[k + 2] = from[k + 1], wide[k + 3] = from[k + 3];
    }
};

#if defined(__AVX512F__)
struct Quads {
    static constexpr int at_once = 1, rows = 6, vectors = 4, bytes = 1;
    typedef vi Line[1];
    typedef vi Spread[1];
    static SACCADE_INLINE void line(const int8_t* w, Line& to) { to[0] = (vi)load(reinterpret_cast<const uint32_t*>(w)); }
    static SACCADE_INLINE void spread(const uint8_t* x, Spread& to) {
        uint32_t four;
        memcpy(&four, x, 4);
        to[0] = (vi)splat_u(four);
    }
    static SACCADE_INLINE vi add(vi sum, const Spread& x, const Line& w) { return quad_sums(sum, x[0], w[0]); }
};
#endif

#if defined(__AMX_INT8__)
struct NoRegisters {};
struct Tiles {
    static constexpr int at_once = kTileRows, rows = 2 * kTileRows, vectors = 2, bytes = 1;
};
#endif

// One block of a row as bytes: x = scale (q - zero). Its range includes 0, which padding and ReLU give and which stays exact.
struct ByteBlock {
    float scale, zero;
};

// Rows as bytes: block n of row r, kInt8Block terms, is `place(n, r)` in `blocks` and in `bytes`. So a block of all rows is one
// stream.
template <class B> struct RowBlocks {
    uint8_t* bytes;
    B* blocks;
    int64_t most;  // rows that there is memory for

    static int64_t size(int64_t rows, int64_t width, int bytes) {
        return rows * ((width + kInt8Block - 1) / kInt8Block) * (kInt8Block * bytes + (int64_t)sizeof(B));
    }
    RowBlocks(void* memory, int64_t rows, int64_t width, int bytes)
        : bytes(static_cast<uint8_t*>(memory)),
          blocks(reinterpret_cast<B*>(this->bytes + rows * ((width + kInt8Block - 1) / kInt8Block) * kInt8Block * bytes)),
          most(rows) {}
    int64_t place(int64_t block, int64_t row) const { return block * most + row; }
    RowBlocks from(int64_t row, int bytes) const {
        RowBlocks rest = *this;
        rest.bytes += row * kInt8Block * bytes, rest.blocks += row;
        return rest;
    }
};

typedef RowBlocks<ByteBlock> ByteRows;

// `part(k)` are the numbers from k on, 0 beyond the row. `nothing` becomes NaN if one of them is not finite; the bytes are of
// no use then.
template <class D, class Part> SACCADE_INLINE void block_as_bytes(const ByteRows& rows, int64_t place, vf& nothing, const Part& part) {
    typedef uint8_t vb __attribute__((vector_size(lanes)));
    constexpr int vectors = kInt8Block / lanes;
    vf low = {}, high = {}, x[vectors];
#pragma GCC unroll 8
    for (int n = 0; n < vectors; n++) {
        x[n] = part(n * lanes);
        nothing += x[n] - x[n];  // NaN for infinities, too
        high = maximum(x[n], high), low = maximum(-x[n], low);
    }
    ByteBlock& block = rows.blocks[place];
    const float below = greatest(low);
    block.scale = std::max(greatest(high) / 255 + below / 255, FLT_MIN);
    const float inverse = 1 / block.scale;
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    // In the same instruction as the numbers: the least becomes 0 and no byte is negative, however this is compiled.
    block.zero = fused(splat(below), splat(inverse), splat(magic))[0] - magic;
    const vf shift = splat(magic + block.zero);
    uint8_t some[kInt8Block], *const to = rows.bytes + place * kInt8Block * D::bytes, *const one = D::bytes == 1 ? to : some;
#pragma GCC unroll 8
    for (int n = 0; n < vectors; n++) {
        const vi q = (vi)fused(x[n], splat(inverse), shift) - (vi)splat(magic);  // never below 0: the least rounds to it
        const vb bytes = __builtin_convertvector(q > 255 ? vi{} + 255 : q, vb);
        memcpy(one + n * lanes, &bytes, lanes);
    }
    if constexpr (D::bytes == 2) D::widen(some, kInt8Block, to);
}

// A row of which a number is not finite, as `nothing` says, gives NaN. Whether it is one.
template <class D> bool spoil_row(const ByteRows& rows, int64_t row, int64_t blocks, vf nothing) {
    if (total(nothing) == 0) return false;
    for (int64_t n = 0; n < blocks; n++) {
        memset(rows.bytes + rows.place(n, row) * kInt8Block * D::bytes, 0, kInt8Block * D::bytes);
        rows.blocks[rows.place(n, row)] = {std::numeric_limits<float>::quiet_NaN(), 0};
    }
    return true;
}

template <class D, class T> bool row_as_bytes(const T* x, int64_t width, const ByteRows& rows, int64_t row) {
    vf nothing = {};
    for (int64_t k = 0; k < width; k += kInt8Block)
        block_as_bytes<D>(rows, rows.place(k / kInt8Block, row), nothing, [&](int n) SACCADE_LAMBDA { return load_as_float(x + k + n, width - k - n); });
    return spoil_row<D>(rows, row, (width + kInt8Block - 1) / kInt8Block, nothing);
}

// Scales of M vectors of features, and sums of their weights in one block.
template <int M> struct BlockScales {
    vf scale[M], sum[M];

    SACCADE_INLINE explicit BlockScales(const float* from) {
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) scale[n] = load(from + n * lanes), sum[n] = load(from + kInt8Panel + n * lanes);
    }
};

// The sums of one block as floats, added to `to`, or put there by the first block.
template <int M>
SACCADE_INLINE void int8_scaled(const vi (&sum)[M], const ByteBlock& of, const BlockScales<M>& weights, float* to, bool first) {
    const vf scale = splat(of.scale), zero = splat(of.zero);
#pragma GCC unroll 4
    for (int n = 0; n < M; n++) {  // whole numbers below 2^24 up to the product with the scales
        const vf shifted = fused(-zero, weights.sum[n], __builtin_convertvector(sum[n], vf));
        store(to + n * lanes, fused(shifted, scale * weights.scale[n], first ? vf{} : load(to + n * lanes)));
    }
}

// R rows with M vectors of a panel, the terms of one block: added to `out`, rows of kInt8Panel numbers, or put there by the first block.
template <class D, int R, int M>
void int8_tile(const ByteRows& of, int64_t row, int64_t block, const int8_t* w, int64_t terms, const float* scales, float* out, bool ahead) {
    const uint8_t* const x = of.bytes + of.place(block, row) * kInt8Block * D::bytes;
    vi sum[R][M] = {};
    for (int64_t k = 0; k < terms; k += 4, w += 4 * kInt8Panel) {
        if (ahead)
            for (int n = 0; n < 4; n++) __builtin_prefetch(w + 4096 + 64 * n, 0, 2);
        typename D::Line line[M];
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) D::line(w + 4 * lanes * n, line[n]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            typename D::Spread four;
            D::spread(x + (r * kInt8Block + k) * D::bytes, four);
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) sum[r][n] = D::add(sum[r][n], four, line[n]);
        }
    }
    const ByteBlock* const blocks = of.blocks + of.place(block, row);
    const BlockScales<M> weights(scales);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) int8_scaled<M>(sum[r], blocks[r], weights, out + (row + r) * kInt8Panel, block == 0);
}

// `then(row, size)` after each tile.
template <class D, int M, class Then>
SACCADE_INLINE void int8_tiles(const ByteRows& of, int64_t rows, int64_t block, const int8_t* w, int64_t terms, const float* scales, float* out, const Then& then) {
    constexpr int64_t quarters = kInt8Block / 4;
    bool ahead = rows <= 8;
    const bool many = !ahead;
    for (int64_t row = 0; row < rows; ahead = false) {
        const int64_t left = rows - row;
        // The last two tiles share what is left: 4 and 4 rows, not 6 and 2.
        const int64_t size = left <= D::rows ? left : left < 2 * D::rows ? (left + 1) / 2 : D::rows;
        // The panel's next block, a part beside each tile: else the first tile waits for all of it.
        for (int64_t k = row * quarters / rows; many && k < (row + size) * quarters / rows; k++)
            for (int at = 0; at < 4 * M * lanes; at += 64) __builtin_prefetch(w + 4 * kInt8Panel * (quarters + k) + at, 0, 3);
        switch (size) {
            case 1: int8_tile<D, 1, M>(of, row, block, w, terms, scales, out, ahead); break;
            case 2: int8_tile<D, 2, M>(of, row, block, w, terms, scales, out, ahead); break;
            case 3: int8_tile<D, 3, M>(of, row, block, w, terms, scales, out, ahead); break;
            case 4: if constexpr (D::rows >= 4) int8_tile<D, 4, M>(of, row, block, w, terms, scales, out, ahead); break;
            case 5: if constexpr (D::rows >= 5) int8_tile<D, 5, M>(of, row, block, w, terms, scales, out, ahead); break;
            case 6: if constexpr (D::rows >= 6) int8_tile<D, 6, M>(of, row, block, w, terms, scales, out, ahead); break;
        }
        then(row, size);
        row += size;
    }
}

#if defined(__AMX_INT8__)
// `int8_tiles` of whole tiles of 16 rows, and by quads of the others. `terms` is a multiple of 64.
template <class D, int M, class Then>
SACCADE_INLINE void int8_tiles_at_once(const ByteRows& of, int64_t rows, int64_t block, const int8_t* w, int64_t terms, const float* scales, float* out, const Then& then) {
    static_assert(M * lanes == 2 * kTileRows && D::rows == 2 * kTileRows);
    alignas(64) int32_t sums[D::rows][M * lanes];
    const BlockScales<M> weights(scales);
    const int64_t whole = rows / kTileRows * kTileRows;
    for (int64_t row = 0, size; row < whole; row += size) {
        size = std::min<int64_t>(D::rows, whole - row);
        const uint8_t* const x = of.bytes + of.place(block, row) * kInt8Block;
        size == D::rows ? tile_sums<2>(x, w, terms, sums[0]) : tile_sums<1>(x, w, terms, sums[0]);
#pragma GCC unroll 4
        for (int64_t r = 0; r < size; r++) {
            const vi sum[M] = {(vi)load(reinterpret_cast<const uint32_t*>(sums[r])), (vi)load(reinterpret_cast<const uint32_t*>(sums[r] + lanes))};
            int8_scaled<M>(sum, of.blocks[of.place(block, row + r)], weights, out + (row + r) * kInt8Panel, block == 0);
        }
        then(row, size);
    }
    if (whole < rows)
        int8_tiles<Quads, M>(of.from(whole, 1), rows - whole, block, w, terms, scales, out + whole * kInt8Panel,
                             [&](int64_t row, int64_t size) SACCADE_LAMBDA { then(whole + row, size); });
}
#endif

// Panel p times rows to `out`, rows of kInt8Panel numbers. A block of the panel, 8 KiB, stays in the first-level cache for all rows.
// `finish(row, size, n)` when `size` rows of the features from n on are complete.
template <class D, class Finish> void int8_panel(const Int8Product& call, const ByteRows& of, int64_t rows, int64_t p, float* out, const Finish& finish) {
    const int64_t padded = (call.width + 3) / 4 * 4, blocks = (call.width + kInt8Block - 1) / kInt8Block;
#if defined(__AMX_INT8__)
    const std::conditional_t<D::at_once == 1, NoRegisters, TileRegisters> registers;
#endif
    for (int64_t block = 0; block < blocks; block++)
        for (int n = 0; n < kInt8Panel; n += D::vectors * lanes) {
            const int64_t k = block * kInt8Block, terms = std::min<int64_t>(kInt8Block, call.width - k);
            const int8_t* const w = call.weight + (p * padded + k) * kInt8Panel + 4 * n;
            const float* const scales = call.scales + (p * blocks + block) * 2 * kInt8Panel + n;
            const auto then = [&](int64_t row, int64_t size) SACCADE_LAMBDA { if (block == blocks - 1) finish(row, size, n); };
#if defined(__AMX_INT8__)
            if constexpr (D::at_once > 1) int8_tiles_at_once<D, D::vectors>(of, rows, block, w, terms, scales, out + n, then);
            else
#endif
                int8_tiles<D, D::vectors>(of, rows, block, w, terms, scales, out + n, then);
        }
}

}  // namespace SACCADE_SET
}  // namespace saccade

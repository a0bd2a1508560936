// Products with int8 weights, out = norm(f(x W^T + b) + y). Each row of x becomes bytes as it comes, block by block of 128 numbers, each
// with its own scale and zero. Products of a block are summed in int32, exactly, then scaled and added to the sum of
// the blocks in float. So a row's result depends on no other row.
//
// W is packed in panels of 64 features, [F / 64][E / 4][64][4], zeros beyond F and E: a vector holds 4 terms of each of its
// features, as the processor's instruction for sums of four products takes them.
//
// Shape legend: R rows, E width, F features, N blocks of E.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <type_traits>

#include "activations.h"
#include "call.h"
#include "norm.h"
#include "parallel.h"
#include "simd.h"
#if defined(__AMX_INT8__)
#include "int8_tiles.h"
#endif

namespace saccade {
namespace SACCADE_SET {

// Of a task: their bytes stay in the second-level cache, and what all of them read and write of two blocks of a panel in the first.
constexpr int64_t kInt8RowsAtOnce = 72;

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

// The sums of one block as floats, added to `to`, or put there by the first block.
template <int M> SACCADE_INLINE void int8_scaled(const vi (&sum)[M], const ByteBlock& of, const float* scales, float* to, bool first) {
    const vf scale = splat(of.scale), zero = splat(of.zero);
#pragma GCC unroll 4
    for (int n = 0; n < M; n++) {  // whole numbers below 2^24 up to the product with the scales
        const vf shifted = fused(-zero, load(scales + kInt8Panel + n * lanes), __builtin_convertvector(sum[n], vf));
        store(to + n * lanes, fused(shifted, scale * load(scales + n * lanes), first ? vf{} : load(to + n * lanes)));
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
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) int8_scaled<M>(sum[r], blocks[r], scales, out + (row + r) * kInt8Panel, block == 0);
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
    const int64_t whole = rows / kTileRows * kTileRows;
    for (int64_t row = 0, size; row < whole; row += size) {
        size = std::min<int64_t>(D::rows, whole - row);
        const uint8_t* const x = of.bytes + of.place(block, row) * kInt8Block;
        // The panel's next block, a part beside each tile.
        for (int64_t k = row * (kInt8Block / 4) / whole; k < (row + size) * (kInt8Block / 4) / whole; k++)
            for (int at = 0; at < 4 * M * lanes; at += 64) __builtin_prefetch(w + 4 * kInt8Panel * (kInt8Block / 4 + k) + at, 0, 3);
        size == D::rows ? tile_sums<2>(x, w, terms, sums[0]) : tile_sums<1>(x, w, terms, sums[0]);
        for (int64_t r = 0; r < size; r++) {
            const vi sum[M] = {(vi)load(reinterpret_cast<const uint32_t*>(sums[r])), (vi)load(reinterpret_cast<const uint32_t*>(sums[r] + lanes))};
            int8_scaled<M>(sum, of.blocks[of.place(block, row + r)], scales, out + (row + r) * kInt8Panel, block == 0);
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

// M vectors of complete rows from feature f on, to the call's `out`.
template <int M, class T> void int8_finish(const Int8Product& call, const float* from, int64_t row, int64_t rows, int64_t f) {
    const int64_t left = call.features - f;
    vf bias[M] = {};
#pragma GCC unroll 4
    for (int n = 0; n < M; n++)
        if (call.bias) bias[n] = load_as_float(call.bias + f + n * lanes, left - n * lanes);
    with_activation(call.activation, [&](auto function) {
        for (int64_t r = 0; r < rows; r++) {
            const int64_t at = (row + r) * call.features + f;
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) {
                vf x = function(load(from + r * kInt8Panel + n * lanes) + bias[n]);
                if (call.added) x += load_as_float(static_cast<const T*>(call.added) + at + n * lanes, left - n * lanes);
                store_from_float(static_cast<T*>(call.out) + at + n * lanes, x, left - n * lanes);
            }
        }
    });
}

// Complete rows of the call's `out` from `first` on.
template <class T> void int8_norm(const Int8Product& call, int64_t first, int64_t rows) {
    T* const out = static_cast<T*>(call.out) + first * call.features;
    if (call.norm.kind != StepNorm::none) normalise<T>(call.norm, out, out, rows, call.features);
}

// Rows from `first` on of the panels from `p` to `stop`, written to the call's `out`.
template <class D, class T>
void int8_write(const Int8Product& call, const ByteRows& of, int64_t first, int64_t rows, int64_t p, int64_t stop) {
    float* const out = static_cast<float*>(scratch(1, rows * kInt8Panel * sizeof(float)));
    for (; p < stop; p++)
        // After each tile: memory takes its numbers while the next one is computed.
        int8_panel<D>(call, of, rows, p, out, [&](int64_t row, int64_t size, int n) {
            int8_finish<D::vectors, T>(call, out + row * kInt8Panel + n, first + row, size, p * kInt8Panel + n);
        });
}

// The rows activation(x W^T + b) as bytes, a block of features after the other: their floats are never all there. How many rows are spoilt.
template <class D, class T> int64_t int8_through(const Int8Product& call, const ByteRows& of, int64_t rows, const ByteRows& to) {
    constexpr int panels = kInt8Block / kInt8Panel;
    const int64_t blocks = (call.features + kInt8Block - 1) / kInt8Block, size = rows * kInt8Panel;
    float* const out = static_cast<float*>(scratch(1, (panels * size + rows * lanes) * sizeof(float)));
    float* const nothing = out + panels * size;
    std::fill_n(nothing, rows * lanes, 0.0f);
    for (int64_t block = 0; block < blocks; block++) {
        for (int p = 0; p < panels; p++) {
            if ((block * panels + p) * kInt8Panel < call.features) int8_panel<D>(call, of, rows, block * panels + p, out + p * size, [](int64_t, int64_t, int) {});
            else std::fill_n(out + p * size, size, 0.0f);
        }
        float bias[kInt8Block] = {};
        if (call.bias) std::copy_n(call.bias + block * kInt8Block, std::min<int64_t>(kInt8Block, call.features - block * kInt8Block), bias);
        with_activation(call.activation, [&](auto function) {
            constexpr int M = 4;
            for (int64_t r = 0; r < rows; r++) {
                alignas(64) float row[kInt8Block];  // a few vectors at a time: with all of a block there are too few registers
#pragma GCC unroll 1
                for (int k = 0; k < kInt8Block; k += M * lanes) {
                    vf x[M];
#pragma GCC unroll 4
                    for (int n = 0; n < M; n++) x[n] = function(load(out + k / kInt8Panel * size + r * kInt8Panel + k % kInt8Panel + n * lanes) + load(bias + k + n * lanes));
#pragma GCC unroll 4
                    for (int n = 0; n < M; n++) {
                        if constexpr (sizeof(T) < sizeof(float)) {  // as where they are written between two calls
                            T written[lanes];
                            store_from_float(written, x[n]), x[n] = load_as_float(written);
                        }
                        store(row + k + n * lanes, x[n]);
                    }
                }
                vf some = load(nothing + r * lanes);
                block_as_bytes<D>(to, to.place(block, r), some, [&](int n) SACCADE_LAMBDA { return load(row + n); });
                store(nothing + r * lanes, some);
            }
        });
    }
    int64_t odd = 0;
    for (int64_t r = 0; r < rows; r++) odd += spoil_row<D>(to, r, blocks, load(nothing + r * lanes));
    return odd;
}

// Tasks are blocks of rows that stay in the second-level cache with their bytes. Where there are too few rows for that, bytes are
// made first, up to 16 MiB, and tasks are blocks of rows times groups of panels, as many as keep all threads busy to the end.
template <class D, class T> int64_t int8_rows(const Int8Product& call) {
    static_assert(kInt8Panel / lanes % D::vectors == 0 && kInt8Block % kInt8Panel == 0);
    const int64_t panels = (call.features + kInt8Panel - 1) / kInt8Panel, fitting = kInt8RowsAtOnce;
    std::atomic<int64_t> odd{0};
    const auto as_bytes = [&](int64_t row, const ByteRows& to, int64_t at) {
        odd += row_as_bytes<D>(static_cast<const T*>(call.x) + row * call.width, call.width, to, at);
    };
    if (call.next || call.rows >= call.threads * (fitting / 2)) {
        const int64_t count = (call.rows + fitting - 1) / fitting, tasks = (count + call.threads - 1) / call.threads * call.threads;
        parallel(call.threads, tasks, [&](int64_t task, int) {
            constexpr int64_t whole = D::at_once > 1 ? D::at_once : D::rows;  // of a tile
            const auto begin = [&](int64_t n) { return n == tasks ? call.rows : n * call.rows / tasks / whole * whole; };
            const int64_t first = begin(task), size = begin(task + 1) - first;
            if (!size) return;
            const ByteRows of(scratch(0, ByteRows::size(size, call.width, D::bytes)), size, call.width, D::bytes);
            for (int64_t r = 0; r < size; r++) as_bytes(first + r, of, r);
            if (call.next) {
                const ByteRows to(scratch(2, ByteRows::size(size, call.features, D::bytes)), size, call.features, D::bytes);
                odd += int8_through<D, T>(call, of, size, to);
                int8_write<D, T>(*call.next, to, first, size, 0, (call.next->features + kInt8Panel - 1) / kInt8Panel);
            } else {
                int8_write<D, T>(call, of, first, size, 0, panels);
            }
            int8_norm<T>(call.next ? *call.next : call, first, size);
        });
        return odd;
    }
    const int64_t most = std::min(call.rows, std::max<int64_t>((1 << 24) / ByteRows::size(1, call.width, D::bytes), 1));
    const Workspace memory(ByteRows::size(most, call.width, D::bytes));
    for (int64_t first = 0; first < call.rows; first += most) {
        const int64_t count = std::min(most, call.rows - first), at_once = std::max<int64_t>((1 << 14) / call.width, 1);
        const ByteRows of(memory.data(), most, call.width, D::bytes);
        parallel(call.threads, (count + at_once - 1) / at_once, [&](int64_t task, int) {
            for (int64_t r = task * at_once; r < std::min(count, (task + 1) * at_once); r++) as_bytes(first + r, of, r);
        });
        const int64_t blocks = (count + fitting - 1) / fitting, groups = std::min(panels, std::max<int64_t>((8 * call.threads + blocks - 1) / blocks, 1));
        parallel(call.threads, blocks * groups, [&](int64_t task, int) {
            const int64_t row = task / groups * count / blocks, size = (task / groups + 1) * count / blocks - row, group = task % groups;
            int8_write<D, T>(call, of.from(row, D::bytes), first + row, size, group * panels / groups, (group + 1) * panels / groups);
        });
    }
    if (call.norm.kind != StepNorm::none) parallel(call.threads, call.rows, [&](int64_t row, int) { int8_norm<T>(call, row, 1); });
    return odd;
}

template <class D> int64_t int8_in(const Int8Product& call) {
    return call.half ? int8_rows<D, bf16>(call) : int8_rows<D, float>(call);
}

inline int64_t int8_product(const Int8Product& call) { return int8_in<Halves>(call); }
#if defined(__AVX512F__)
inline int64_t int8_product_quads(const Int8Product& call) { return int8_in<Quads>(call); }
#endif
#if defined(__AMX_INT8__)
inline int64_t int8_product_tiles(const Int8Product& call) {
    const bool whole = call.width % kTileTerms == 0 && (!call.next || call.next->width % kTileTerms == 0);
    return whole && call.rows >= kTileRows ? int8_in<Tiles>(call) : int8_in<Quads>(call);
}
#endif

}  // namespace SACCADE_SET
}  // namespace saccade

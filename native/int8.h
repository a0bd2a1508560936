// Products with int8 weights, out = x W^T + b. Each row of x becomes bytes as it comes, block by block of 128 numbers, each
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

#include "call.h"
#include "parallel.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// How four terms are taken at once. `Quads`: by one instruction, bytes as they are. `Halves`: even and odd terms as 16 bits.
struct Halves {
    static constexpr int rows = registers == 32 ? 4 : 3, vectors = registers == 32 ? 4 : 2, bytes = 2;
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
    static constexpr int rows = 6, vectors = 4, bytes = 1;
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

// One block of a row as bytes: x = scale (q - zero). Its range includes 0, which padding and ReLU give and which stays exact.
struct ByteBlock {
    float scale, zero;
};

// `nothing` becomes NaN if a number of the block is not finite; its bytes are of no use then.
template <class T> SACCADE_INLINE void block_as_bytes(const T* x, int64_t width, uint8_t* to, ByteBlock& block, vf& nothing) {
    typedef uint8_t vb __attribute__((vector_size(lanes)));
    vf low = {}, high = {};
    for (int64_t k = 0; k < width; k += lanes) {
        const vf part = load_as_float(x + k, width - k);
        nothing += part - part;  // NaN for infinities, too
        high = maximum(part, high), low = maximum(-part, low);
    }
    const float below = greatest(low);
    block.scale = std::max(greatest(high) / 255 + below / 255, FLT_MIN);
    const float inverse = 1 / block.scale;
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    // In the same instruction as the numbers: the least becomes 0 and no byte is negative, however this is compiled.
    block.zero = fused(splat(below), splat(inverse), splat(magic))[0] - magic;
    const vf shift = splat(magic + block.zero);
    for (int64_t k = 0; k < width; k += lanes) {
        const vf part = load_as_float(x + k, width - k);
        const vi q = (vi)fused(part, splat(inverse), shift) - (vi)splat(magic);  // never below 0: the least rounds to it
        const vb some = __builtin_convertvector(q > 255 ? vi{} + 255 : q, vb);
        memcpy(to + k, &some, lanes);
    }
}

// Whether all numbers of the row are finite.
template <class T> bool row_as_bytes(const T* x, int64_t width, uint8_t* to, ByteBlock* blocks) {
    vf nothing = {};
    for (int64_t k = 0; k < width; k += kInt8Block)
        block_as_bytes(x + k, std::min<int64_t>(kInt8Block, width - k), to + k, blocks[k / kInt8Block], nothing);
    return total(nothing) == 0;
}

// What the tasks of one call share.
template <class T> struct Int8Rows {
    const Int8Product& call;
    const uint8_t* bytes;
    const ByteBlock* blocks;  // (R, N)
    int64_t stride;           // of `bytes`
    int64_t first;            // row of the call that `bytes` begins with
};

// A part of a panel: its bytes, and its scales and sums, `2 * kInt8Panel` numbers after those of the block before.
struct Int8Panel {
    const int8_t* bytes;
    const float* scales;
    int64_t feature;
};

// R rows from `row` on with M vectors of a panel.
template <class D, int R, int M, class T>
void int8_tile(const Int8Rows<T>& all, int64_t row, const Int8Panel& panel, bool ahead) {
    const Int8Product& call = all.call;
    const int64_t blocks = (call.width + kInt8Block - 1) / kInt8Block;
    const uint8_t* const x = all.bytes + row * all.stride;
    vf out[R][M] = {};
    for (int64_t block = 0; block < blocks; block++) {
        vi sum[R][M] = {};
        const int64_t stop = std::min(call.width, (block + 1) * kInt8Block);
        for (int64_t k = block * kInt8Block; k < stop; k += 4) {
            const int8_t* const w = panel.bytes + k * kInt8Panel;
            if (ahead)
                for (int n = 0; n < 4; n++) __builtin_prefetch(w + 4096 + 64 * n, 0, 2);
            typename D::Line line[M];
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) D::line(w + 4 * lanes * n, line[n]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                typename D::Spread four;
                D::spread(x + r * all.stride + k * D::bytes, four);
#pragma GCC unroll 4
                for (int n = 0; n < M; n++) sum[r][n] = D::add(sum[r][n], four, line[n]);
            }
        }
        const float* const scales = panel.scales + block * 2 * kInt8Panel;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const ByteBlock& of = all.blocks[(row + r) * blocks + block];
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) {  // whole numbers below 2^24 up to the product with the scales
                const vf shifted = fused(splat(-of.zero), load(scales + kInt8Panel + n * lanes), __builtin_convertvector(sum[r][n], vf));
                out[r][n] = fused(shifted, splat(of.scale) * load(scales + n * lanes), out[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) {
            const int64_t f = panel.feature + n * lanes, left = call.features - f;
            if (left <= 0) break;
            if (call.bias) out[r][n] += load_as_float(call.bias + f, left);
            store_from_float(static_cast<T*>(call.out) + (all.first + row + r) * call.features + f, out[r][n], left);
        }
}

template <class D, int M, class T>
SACCADE_INLINE void int8_tiles(const Int8Rows<T>& all, int64_t row, int64_t rows, const Int8Panel& panel, bool ahead) {
    for (const int64_t stop = row + rows; row < stop; ahead = false) {
        const int64_t left = stop - row;
        // The last two tiles share what is left: 4 and 4 rows, not 6 and 2.
        const int64_t size = left <= D::rows ? left : left < 2 * D::rows ? (left + 1) / 2 : D::rows;
        switch (size) {
            case 1: int8_tile<D, 1, M>(all, row, panel, ahead); break;
            case 2: int8_tile<D, 2, M>(all, row, panel, ahead); break;
            case 3: int8_tile<D, 3, M>(all, row, panel, ahead); break;
            case 4: if constexpr (D::rows >= 4) int8_tile<D, 4, M>(all, row, panel, ahead); break;
            case 5: if constexpr (D::rows >= 5) int8_tile<D, 5, M>(all, row, panel, ahead); break;
            case 6: if constexpr (D::rows >= 6) int8_tile<D, 6, M>(all, row, panel, ahead); break;
        }
        row += size;
    }
}

// Quantise up to 16 MiB of rows, then multiply them: tasks are blocks of rows that stay in the second-level cache, times
// groups of panels, as many as keep all threads busy to the end.
template <class D, class T> int64_t int8_rows(const Int8Product& call) {
    static_assert(D::rows <= 6 && kInt8Panel / lanes % D::vectors == 0);
    const int64_t stride = ((call.width + 63) / 64 * 64) * D::bytes + 64;  // not a multiple of a page
    const int64_t panels = (call.features + kInt8Panel - 1) / kInt8Panel;
    const int64_t padded = (call.width + 3) / 4 * 4, panel_bytes = padded * kInt8Panel;
    const int64_t most = std::min(call.rows, std::max<int64_t>((1 << 24) / stride, 1));
    const int64_t blocks_of = (call.width + kInt8Block - 1) / kInt8Block;
    const Workspace memory(most * (stride + blocks_of * (int64_t)sizeof(ByteBlock)));
    uint8_t* const bytes = static_cast<uint8_t*>(memory.data());
    ByteBlock* const scales = reinterpret_cast<ByteBlock*>(bytes + most * stride);
    std::atomic<int64_t> odd{0};
    for (int64_t first = 0; first < call.rows; first += most) {
        const int64_t count = std::min(most, call.rows - first);
        const int64_t at_once = std::max<int64_t>((1 << 14) / call.width, 1);
        parallel(call.threads, (count + at_once - 1) / at_once, [&](int64_t task, int) {
            for (int64_t r = task * at_once; r < std::min(count, (task + 1) * at_once); r++) {
                const T* const x = static_cast<const T*>(call.x) + (first + r) * call.width;
                uint8_t* to = bytes + r * stride;
                if constexpr (D::bytes == 2) to = static_cast<uint8_t*>(scratch(0, stride));
                if (!row_as_bytes(x, call.width, to, scales + r * blocks_of)) {
                    odd++;
                    memset(to, 0, padded);
                    std::fill_n(scales + r * blocks_of, blocks_of, ByteBlock{std::numeric_limits<float>::quiet_NaN(), 0});
                }
                if constexpr (D::bytes == 2) D::widen(to, padded, bytes + r * stride);
            }
        });
        const Int8Rows<T> all{call, bytes, scales, stride, first};
        const int64_t fitting = std::max<int64_t>((1 << 18) / stride, D::rows);
        const int64_t blocks = (count + fitting - 1) / fitting;
        const int64_t block = ((count + blocks - 1) / blocks + D::rows - 1) / D::rows * D::rows;
        const int64_t groups = std::min(panels, std::max<int64_t>((8 * call.threads + blocks - 1) / blocks, 1));
        parallel(call.threads, blocks * groups, [&](int64_t task, int) {
            const int64_t row = task / groups * block, size = std::min(block, count - row), group = task % groups;
            if (size <= 0) return;
            for (int64_t p = group * panels / groups; p < (group + 1) * panels / groups; p++)
                for (int n = 0; n < kInt8Panel / lanes; n += D::vectors) {
                    const float* const scale = call.scales + p * blocks_of * 2 * kInt8Panel + n * lanes;
                    const Int8Panel panel{call.weight + p * panel_bytes + 4 * lanes * n, scale, p * kInt8Panel + n * lanes};
                    int8_tiles<D, D::vectors>(all, row, size, panel, count <= 8);
                }
        });
    }
    return odd;
}

template <class D> int64_t int8_in(const Int8Product& call) {
    return call.half ? int8_rows<D, bf16>(call) : int8_rows<D, float>(call);
}

inline int64_t int8_product(const Int8Product& call) { return int8_in<Halves>(call); }
#if defined(__AVX512F__)
inline int64_t int8_product_quads(const Int8Product& call) { return int8_in<Quads>(call); }
#endif

}  // namespace SACCADE_SET
}  // namespace saccade

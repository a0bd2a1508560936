// Products with int4 weights, out = x W^T + b. A weight is scale * (q - 8) with q from 0 to 15 and a scale, bf16, for each
// group of 32 terms. Rows of x become signed bytes as they come, with a scale for each group. Products of a group are
// summed in int32, exactly, then scaled and added to the sum of the groups in float. So a row's result depends on no other
// row.
//
// W is packed in panels of 64 features, [F / 64][E / 8][64][4], E up to a multiple of 32: the low half of a byte belongs to one
// of the first four of 8 terms, the high half to one of the last four.
//
// Shape legend: R rows, E width, F features, G groups of E.
#pragma once

#include "int8.h"

namespace saccade {
namespace SACCADE_SET {

// As `Halves` and `Quads` of int8.h, with four half bytes as a line: the low or the high ones of four bytes.
struct NibbleHalves : Halves {
    static SACCADE_INLINE void line(vu w, Line& to) { to[0] = (vs)(w & splat_u(0x000f000f)), to[1] = (vs)(w >> 8 & splat_u(0x000f000f)); }
    static void widen(const int8_t* from, int64_t count, uint8_t* to) {
        int16_t* wide = reinterpret_cast<int16_t*>(to);
        for (int64_t k = 0; k < count; k += 4)
            wide[k] = from[k], wide[k + 1] = from[k + 2], wide[k + 2] = from[k + 1], wide[k + 3] = from[k + 3];
    }
};

#if defined(__AVX512F__)
struct NibbleQuads : Quads {
    static SACCADE_INLINE void line(vu w, Line& to) { to[0] = (vi)(w & splat_u(0x0f0f0f0f)); }
    static SACCADE_INLINE vi add(vi sum, const Spread& x, const Line& w) { return quad_sums(sum, w[0], x[0]); }
};
#endif

// One group of a row as bytes q: x = scale q; `offset` is -8 times their sum.
struct SignedGroup {
    float scale;
    int32_t offset;
};

// Whether all numbers of the row are finite. Beyond its width the bytes are 0.
template <class T> bool row_as_signed_bytes(const T* x, int64_t width, int8_t* to, SignedGroup* groups) {
    typedef int8_t vb __attribute__((vector_size(lanes)));
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    vf nothing = {};
    for (int64_t first = 0; first < width; first += kInt4Group) {
        vf part[kInt4Group / lanes], high = {};
        vu sum = {};
        for (int n = 0; n < kInt4Group / lanes; n++) {
            part[n] = load_as_float(x + first + n * lanes, width - first - n * lanes);
            nothing += part[n] - part[n];  // NaN for infinities, too
            high = maximum(maximum(part[n], -part[n]), high);
        }
        const float scale = std::max(greatest(high) / 127, FLT_MIN), inverse = 1 / scale;
        for (int n = 0; n < kInt4Group / lanes; n++) {
            const vi q = (vi)fused(part[n], splat(inverse), splat(magic)) - (vi)splat(magic);
            const vb some = __builtin_convertvector(q, vb);
            memcpy(to + first + n * lanes, &some, lanes);
            sum += (vu)q;
        }
        uint32_t all = 0;
        for (int i = 0; i < lanes; i++) all += sum[i];
        groups[first / kInt4Group] = {scale, int32_t(0u - 8 * all)};
    }
    return total(nothing) == 0;
}

// What the tasks of one call share.
template <class T> struct Int4Rows {
    const Int4Product& call;
    const uint8_t* bytes;
    const SignedGroup* groups;  // (R, G)
    int64_t stride;             // of `bytes`
    int64_t first;              // row of the call that `bytes` begins with
};

// R rows from `row` on with M vectors of a panel, from `feature` on.
template <class D, int R, int M, class T>
void int4_tile(const Int4Rows<T>& all, int64_t row, const uint8_t* panel, const bf16* scales, int64_t feature, bool ahead) {
    const Int4Product& call = all.call;
    const int64_t groups = (call.width + kInt4Group - 1) / kInt4Group;
    const uint8_t* const x = all.bytes + row * all.stride;
    vf out[R][M] = {};
    for (int64_t g = 0; g < groups; g++) {
        vi sum[R][M];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) sum[r][n] = (vi)splat_u(all.groups[(row + r) * groups + g].offset);
        for (int64_t k = g * kInt4Group; k < (g + 1) * kInt4Group; k += 8) {
            const uint8_t* const w = panel + k / 2 * kInt8Panel;
            if (ahead)
                for (int n = 0; n < 4; n++) __builtin_prefetch(w + 4096 + 64 * n, 0, 2);
#pragma GCC unroll 2
            for (int high = 0; high < 2; high++) {
                typename D::Line line[M];
#pragma GCC unroll 4
                for (int n = 0; n < M; n++) D::line(load(reinterpret_cast<const uint32_t*>(w + 4 * lanes * n)) >> 4 * high, line[n]);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    typename D::Spread four;
                    D::spread(x + r * all.stride + (k + 4 * high) * D::bytes, four);
#pragma GCC unroll 4
                    for (int n = 0; n < M; n++) sum[r][n] = D::add(sum[r][n], four, line[n]);
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) {
            const vf scale = load_as_float(scales + g * kInt8Panel + n * lanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vf both = splat(all.groups[(row + r) * groups + g].scale) * scale;
                out[r][n] = fused(__builtin_convertvector(sum[r][n], vf), both, out[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) {
            const int64_t f = feature + n * lanes, left = call.features - f;
            if (left <= 0) break;
            if (call.bias) out[r][n] += load_as_float(call.bias + f, left);
            store_from_float(static_cast<T*>(call.out) + (all.first + row + r) * call.features + f, out[r][n], left);
        }
}

template <class D, class T>
SACCADE_INLINE void int4_tiles(const Int4Rows<T>& all, int64_t row, int64_t rows, const uint8_t* panel, const bf16* scales, int64_t feature) {
    constexpr int M = D::vectors;
    bool ahead = rows <= 8;
    for (const int64_t stop = row + rows; row < stop; ahead = false) {
        const int64_t left = stop - row, size = left <= D::rows ? left : left < 2 * D::rows ? (left + 1) / 2 : D::rows;
        switch (size) {
            case 1: int4_tile<D, 1, M>(all, row, panel, scales, feature, ahead); break;
            case 2: int4_tile<D, 2, M>(all, row, panel, scales, feature, ahead); break;
            case 3: int4_tile<D, 3, M>(all, row, panel, scales, feature, ahead); break;
            case 4: if constexpr (D::rows >= 4) int4_tile<D, 4, M>(all, row, panel, scales, feature, ahead); break;
            case 5: if constexpr (D::rows >= 5) int4_tile<D, 5, M>(all, row, panel, scales, feature, ahead); break;
            case 6: if constexpr (D::rows >= 6) int4_tile<D, 6, M>(all, row, panel, scales, feature, ahead); break;
        }
        row += size;
    }
}

// Quantise up to 16 MiB of rows, then multiply them, by the same tasks as in int8.h.
template <class D, class T> int64_t int4_rows(const Int4Product& call) {
    static_assert(D::rows <= 6 && kInt8Panel / lanes % D::vectors == 0 && kInt4Group % lanes == 0);
    const int64_t groups_of = (call.width + kInt4Group - 1) / kInt4Group, padded = groups_of * kInt4Group;
    const int64_t stride = (padded + 63) / 64 * 64 * D::bytes + 64;  // not a multiple of a page
    const int64_t panels = (call.features + kInt8Panel - 1) / kInt8Panel;
    const int64_t most = std::min(call.rows, std::max<int64_t>((1 << 24) / stride, 1));
    const Workspace memory(most * (stride + groups_of * (int64_t)sizeof(SignedGroup)));
    uint8_t* const bytes = static_cast<uint8_t*>(memory.data());
    SignedGroup* const of_rows = reinterpret_cast<SignedGroup*>(bytes + most * stride);
    std::atomic<int64_t> odd{0};
    for (int64_t first = 0; first < call.rows; first += most) {
        const int64_t count = std::min(most, call.rows - first);
        const int64_t at_once = std::max<int64_t>((1 << 14) / call.width, 1);
        parallel(call.threads, (count + at_once - 1) / at_once, [&](int64_t task, int) {
            for (int64_t r = task * at_once; r < std::min(count, (task + 1) * at_once); r++) {
                const T* const x = static_cast<const T*>(call.x) + (first + r) * call.width;
                int8_t* to = reinterpret_cast<int8_t*>(bytes + r * stride);
                if constexpr (D::bytes == 2) to = static_cast<int8_t*>(scratch(0, stride));
                if (!row_as_signed_bytes(x, call.width, to, of_rows + r * groups_of)) {
                    odd++;
                    memset(to, 0, padded);
                    std::fill_n(of_rows + r * groups_of, groups_of, SignedGroup{std::numeric_limits<float>::quiet_NaN(), 0});
                }
                if constexpr (D::bytes == 2) D::widen(to, padded, bytes + r * stride);
            }
        });
        const Int4Rows<T> all{call, bytes, of_rows, stride, first};
        const int64_t fitting = std::max<int64_t>((1 << 18) / stride, D::rows);
        const int64_t blocks = (count + fitting - 1) / fitting;
        const int64_t block = ((count + blocks - 1) / blocks + D::rows - 1) / D::rows * D::rows;
        const int64_t tasks = std::min(panels, std::max<int64_t>((8 * call.threads + blocks - 1) / blocks, 1));
        parallel(call.threads, blocks * tasks, [&](int64_t task, int) {
            const int64_t row = task / tasks * block, size = std::min(block, count - row), group = task % tasks;
            if (size <= 0) return;
            for (int64_t p = group * panels / tasks; p < (group + 1) * panels / tasks; p++)
                for (int n = 0; n < kInt8Panel / lanes; n += D::vectors)
                    int4_tiles<D>(all, row, size, call.weight + p * padded / 2 * kInt8Panel + 4 * lanes * n,
                                  static_cast<const bf16*>(call.scales) + p * groups_of * kInt8Panel + n * lanes, p * kInt8Panel + n * lanes);
        });
    }
    return odd;
}

template <class D> int64_t int4_in(const Int4Product& call) {
    return call.half ? int4_rows<D, bf16>(call) : int4_rows<D, float>(call);
}

inline int64_t int4_product(const Int4Product& call) { return int4_in<NibbleHalves>(call); }
#if defined(__AVX512F__)
inline int64_t int4_product_quads(const Int4Product& call) { return int4_in<NibbleQuads>(call); }
#endif

}  // namespace SACCADE_SET
}  // namespace saccade

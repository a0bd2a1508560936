// Rows of 8 bits times queries and weights by AVX512_VNNI, which sums four products of bytes. What multiplies them becomes
// whole numbers of 24 bits, in three bytes: each is rounded as the greatest of its row, of weights in a stretch, is in
// float32. Sums are exact, no key or value becomes a float, and each is turned once for all the rows that read it.
#pragma once

#include "decode_tiles.h"

#if defined(__AVX512F__)
namespace saccade {
namespace SACCADE_SET {

constexpr int thirds = 3;
constexpr int64_t quad_stretch = 64, most_quad_rows = 32;  // keys whose weights share a unit; query rows

// Floats over a unit, which comes back, as whole numbers plus `shift`, [count / 4][4][4]: of four numbers the low bytes, the
// middle ones, the high ones, zeros. The unit is NaN where a number is not finite.
inline float split(float* x, int64_t count, float most, uint32_t shift) {
    vf high = splat(1e-30f), nothing = {};
    for (int64_t n = 0; n < count; n += lanes) {
        nothing += load(x + n) - load(x + n);
        high = maximum((vf)((vu)load(x + n) & splat_u(0x7fffffff)), high);
    }
    const float top = greatest(high), by = most / top;
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int64_t n = 0; n < count; n += lanes) {
        const vu whole = (vu)_mm512_cvtps_epi32((__m512)(load(x + n) * splat(by))) + splat_u(shift);
        store(x + n, (vf)_mm512_shuffle_epi8((__m512i)whole, order));
    }
    return top / most + total(nothing);
}

// Three sums, of which each is too large by `shift`, as one.
SACCADE_INLINE vf joined(const vi (&sum)[thirds], vi shift) {
    const auto part = [&](int n) SACCADE_LAMBDA { return __builtin_convertvector(sum[n] - shift, vf); };
    return (part(2) * splat(256) + part(1)) * splat(256) + part(0);
}

SACCADE_INLINE vi splat_bytes(const float* four) { return (vi)splat_u(*reinterpret_cast<const word_loose*>(four)); }

// Up to 64 bytes of a row, zeros behind them; then the next row, where there is one. Its address is computed here: compilers
// would hold those of all rows at once, in more registers than there are.
SACCADE_INLINE __m512i next_bytes(const int8_t*& row, int64_t bytes, int64_t stride) {
    const __m512i some = _mm512_maskz_loadu_epi8(bytes >= 64 ? ~uint64_t(0) : (uint64_t(1) << bytes) - 1, row);
    row += stride;
    asm("" : "+r"(row));
    return some;
}

// Which vector a row goes to and a column comes from, so that four stages without tables of indices transpose them.
constexpr int turned_row(int n) { return n >> 3 | (n & 4) >> 1 | (n & 1) * 4 | (n & 2) * 4; }

// `lanes` rows, of which `count` are there, as [width / 4][lanes][4], zeros behind them.
inline __attribute__((noinline)) void turn_rows(const int8_t* rows, int64_t stride, int64_t count, int64_t width, uint32_t* to, Ahead<int8_t> ahead) {
    for (int64_t n = 0; n < width; n += 64) {
        __m512i block[2][lanes];
        const int8_t *from = rows + n, *asked = ahead.rows + n;
#pragma GCC unroll 16
        for (int j = 0; j < lanes; j++) {
            __builtin_prefetch(asked, 0, 2);
            asked += ahead.stride;
            asm("" : "+r"(asked));
            block[0][turned_row(j)] = next_bytes(from, width - n, j + 1 < count ? stride : 0);
        }
#pragma GCC unroll 4
        for (int stage = 0; stage < 4; stage++)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m512i a = block[stage % 2][i], b = block[stage % 2][i + 8];
                __m512i* const next = block[1 - stage % 2] + 2 * i;
                next[0] = stage < 2 ? _mm512_unpacklo_epi32(a, b) : _mm512_shuffle_i32x4(a, b, 0x88);
                next[1] = stage < 2 ? _mm512_unpackhi_epi32(a, b) : _mm512_shuffle_i32x4(a, b, 0xdd);
            }
#pragma GCC unroll 16
        for (int j = 0; j < lanes; j++) store(to + (n / 4 + j) * lanes, (vu)block[0][turned_row(j)]);
    }
}

// scores[r][j] = query row r . key j for `lanes` keys that were turned.
template <int rows>
__attribute__((noinline)) void quad_products(const uint32_t* keys, vf scales, const float* query, int64_t width, const float* units, float* scores, int64_t wide) {
    vi all = {}, sum[rows][thirds] = {};
    for (int64_t n = 0; n < width; n += 4) {
        const vi key = (vi)load(keys + n * (lanes / 4));
        all = quad_sums(all, (vi)splat_u(0x01010101), key);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
            for (int part = 0; part < thirds; part++) sum[r][part] = quad_sums(sum[r][part], splat_bytes(query + r * width + n + part), key);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) store(scores + r * wide, joined(sum[r], all << 7) * splat(units[r]) * scales);
}

// out[r] += sum_j weights[r][j] value[j] for up to 64 columns, in sixteens; weights are [rows][quad_stretch].
template <int rows>
__attribute__((noinline)) void quad_values(const int8_t* value, int64_t stride, int64_t count, int64_t columns, const float* weights, const float* units,
                        float* out, int64_t out_row, Ahead<int8_t> ahead, bool fetch) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        vi sum[rows][2][thirds] = {};
        const int8_t* from = value;
        for (int64_t j = 0; j < count; j += 4) {
            __m512i row[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                if (fetch && !half) ahead.ask(j + k, 0);
                row[k] = next_bytes(from, columns, j + k + 1 < count ? stride : 0);
            }
            const __m512i one = half ? _mm512_unpackhi_epi8(row[0], row[1]) : _mm512_unpacklo_epi8(row[0], row[1]);
            const __m512i two = half ? _mm512_unpackhi_epi8(row[2], row[3]) : _mm512_unpacklo_epi8(row[2], row[3]);
            const vi x[2] = {(vi)_mm512_unpacklo_epi16(one, two), (vi)_mm512_unpackhi_epi16(one, two)};
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
                for (int part = 0; part < thirds; part++) {
                    const vi four = splat_bytes(weights + r * quad_stretch + j + part);
#pragma GCC unroll 2
                    for (int v = 0; v < 2; v++) sum[r][v][part] = quad_sums(sum[r][v][part], four, x[v]);
                }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {  // four of each sixteen columns
                float some[lanes], *at = out + r * out_row + (2 * half + v) * 4;
                store(some, joined(sum[r][v], vi{}) * splat(units[r]));
                for (int n = 0; n < lanes && 4 * n < columns; n += 4, at += 16) _mm_storeu_ps(at, _mm_loadu_ps(at) + _mm_loadu_ps(some + n));
            }
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade
#endif

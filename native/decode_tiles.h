// Register tiles for rows of keys and values as they stand in memory, whatever their type, width and stride.
//
// A row comes in steps of `step` entries. Where the width is not a multiple, the last step begins early and ends with the
// row, so that nothing beyond it is read; entries that came before are 0 in the query and in the key (0 * NaN is NaN),
// and come out twice, the same, in the weighted values. Rows shorter than a step are copied to blocks filled with zeros.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// One step as vectors of float: one vector, or the even and the odd entries, which are a shift and a mask away.
// `place`: where an entry stands in a step's weighted values.
template <class T> struct Rows {
    static constexpr int parts = 1, key_parts = parts, step = lanes;
    static constexpr bool pairs = false;
    typedef vf vector;
    typedef float weight;
    static SACCADE_INLINE void load_step(const T* p, vf (&x)[parts]) { x[0] = load_as_float(p); }
    static SACCADE_INLINE vf multiply(const float* q, vf x, vf sum) { return sum + load(q) * x; }
    static int place(int entry) { return entry; }
};
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
template <> struct Rows<bf16> {
    static constexpr int parts = 2, key_parts = parts, step = 2 * lanes;
    static constexpr bool pairs = false;
    typedef vf vector;
    typedef float weight;
    static SACCADE_INLINE void load_step(const bf16* p, vf (&x)[parts]) {
        const vu both = load(reinterpret_cast<const uint32_t*>(p));
        x[0] = (vf)(both << 16);
        x[1] = (vf)(both & splat_u(0xffff0000));
    }
    static SACCADE_INLINE vf multiply(const float* q, vf x, vf sum) { return sum + load(q) * x; }
    static int place(int entry) { return entry % 2 * lanes + entry / 2; }
};
#endif

#if defined(SACCADE_PAIRS)
// bf16 of which two are multiplied and added at once: neighbours in a key, and an entry of two values that follow each
// other. Weights are rounded to bf16 for it.
struct paired : bf16 {};

template <> struct Rows<paired> {
    static constexpr int parts = 2, key_parts = 1, step = 2 * lanes;
    static constexpr bool pairs = true;
    typedef vu vector;
    typedef bf16 weight;
    static SACCADE_INLINE void load_step(const bf16* p, vu (&x)[key_parts]) { x[0] = load(reinterpret_cast<const uint32_t*>(p)); }
    static SACCADE_INLINE vf multiply(const float* q, vu x, vf sum) {
        return dot_lanes(load(reinterpret_cast<const uint32_t*>(q)), x, sum);
    }
    static int place(int entry) { return entry % 8 / 4 * lanes + entry / 8 * 4 + entry % 4; }  // see `in_turn`
};
#endif

// Rows of 8 bits have a float behind their entries, of any alignment: the scale of them all.
template <class T> constexpr bool scaled = std::is_same_v<T, int8_t>;

SACCADE_INLINE float scale_behind(const int8_t* row, int64_t width) {
    float scale;
    memcpy(&scale, row + width, sizeof scale);
    return scale;
}

// The width of a tensor in steps.
struct Width {
    int64_t width, step, steps, last;  // `last`: where the last step begins
    int64_t behind;                    // entries that a row's scale takes; where the query is 0 they may be read as if they were some
    Width(int64_t width, int64_t step, int64_t behind = 0)
        : width(width), step(step), steps(std::max<int64_t>(1, (width + step - 1) / step)), last(std::max<int64_t>(0, width - step)), behind(behind) {}

    int64_t padded() const { return steps * step; }
    int64_t copied() const { return std::max(width + behind, step); }  // width of a row in a copied block
    int64_t twice() const { return width < step ? 0 : padded() - width; }  // entries of the last step that came before

    // Rows with zeros behind them: `count` of `room`.
    template <class T> void copy(const T* from, int64_t stride, int64_t count, int64_t room, T* to) const {
        for (int64_t j = 0; j < room; j++, to += copied()) {
            const int64_t here = j < count ? width + behind : 0;
            std::copy_n(from + j * stride, here, to);
            std::fill(to + here, to + copied(), T{});
        }
    }

    // A row times a factor in the order of the steps' vectors of K, [steps][parts][lanes]; pairs stay bf16.
    template <class T, class K> void spread(const T* from, float factor, float* to) const {
        constexpr int parts = Rows<K>::parts, step = Rows<K>::step;
        for (int64_t n = 0; n < steps; n++, to += step) {
            const int64_t first = std::min(n * step, last), there = std::min<int64_t>(step, width - first);
            const int64_t known = n * step - first;  // entries of this step that came before
            T some[step] = {};
            for (int64_t e = known; e < there; e++) some[e] = from[first + e];
            if constexpr (scaled<K>) {
                store(to, load_as_float(some) * splat(factor));
            } else if constexpr (Rows<T>::pairs) {  // the factor is a power of two: nothing is rounded
                for (T& x : some) from_float(x, to_float(x) * factor);
                memcpy(to, some, sizeof(some));
            } else {
                vf x[parts];
                Rows<T>::load_step(some, x);
                for (int part = 0; part < parts; part++) store(to + part * lanes, x[part] * splat(factor));
            }
        }
    }

    // A row of vectors in that order back to entries in their own.
    template <class T> void natural(const float* from, float* to) const {
        constexpr int step = Rows<T>::step;
        for (int64_t n = 0; n < steps; n++) {
            float* place = to + std::min(n * step, last);
            for (int e = 0; e < step; e++) place[e] = from[n * step + Rows<T>::place(e)];
        }
    }
};

// Rows that are asked for while others are being used: as many, as wide, further on in memory. The processor's own
// prefetching starts again at every page and gives up on rows with gaps; this reaches the bandwidth of plain reading. They
// are asked for into the second-level cache: lines on their way to the first take the few places that loads wait in.
template <class T> struct Ahead {
    const T* rows;
    int64_t stride;
    SACCADE_INLINE void ask(int64_t row, int64_t entry) const {  // may lie beyond the last row: an address, never a read
        if (scaled<T> && entry % 64) return;  // one line holds several vectors
        const int64_t place = (row * stride + entry) * (int64_t)sizeof(T);
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(rows) + (uintptr_t)place), 0, 2);
    }
};

// --- sums of whole vectors ----------------------------------------------------------------------------------------

// Lane l: from a and its neighbour half a block on where bit `half` of l is 0, from b and its neighbour otherwise.
template <int half, size_t... l> SACCADE_INLINE vf fold(vf a, vf b, std::index_sequence<l...>) {
    const vf same = __builtin_shufflevector(a, b, (int)(l & half ? lanes + l : l)...);
    const vf other = __builtin_shufflevector(a, b, (int)(l & half ? lanes + l - half : l + half)...);
    return same + other;
}

// Lane l is the total of x[l]; what is in x is lost.
template <int half = lanes / 2> SACCADE_INLINE vf totals(vf* x) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) x[i] = fold<half>(x[i], x[i + half], std::make_index_sequence<lanes>());
    if constexpr (half == 1) return x[0];
    else return totals<half / 2>(x);
}

// --- scores -------------------------------------------------------------------------------------------------------

// sum[r][k] += query row r . key k over one step; the first `twice` entries of the key are taken as 0.
template <class T, int rows, int group, bool ragged>
SACCADE_INLINE void multiply_step(const float* query, int64_t query_row, const T* key, int64_t stride, const vu* keep,
                                  vf (*sum)[lanes / rows]) {
    constexpr int parts = Rows<T>::key_parts;
    typedef typename Rows<T>::vector vector;
    vector x[group][parts];
#pragma GCC unroll 4
    for (int k = 0; k < group; k++) {
        Rows<T>::load_step(key + k * stride, x[k]);
        if (ragged)
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) x[k][part] = (vector)((vu)x[k][part] & keep[part]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++)
#pragma GCC unroll 4
            for (int k = 0; k < group; k++)
                sum[r][k] = Rows<T>::multiply(query + r * query_row + part * lanes, x[k][part], sum[r][k]);
}

// The same over `some` whole steps, key after key: each load then goes from key to key at one stride, which the processor's
// prefetcher follows. Four rows of floats take the keys together instead, for want of registers.
template <class T, int some, int rows, int group>
SACCADE_INLINE void multiply_keys(const float* query, int64_t query_row, const T* key, int64_t stride, vf (*sum)[lanes / rows]) {
    constexpr int parts = Rows<T>::key_parts, step = Rows<T>::step;
#pragma GCC unroll 4
    for (int k = 0; k < group; k++)
#pragma GCC unroll 4
        for (int n = 0; n < some; n++) {
            typename Rows<T>::vector x[parts];
            Rows<T>::load_step(key + k * stride + n * step, x);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int part = 0; part < parts; part++)
                    sum[r][k] = Rows<T>::multiply(query + r * query_row + n * step + part * lanes, x[part], sum[r][k]);
        }
}

// scores[r][j] = query row r . key j for `lanes` keys.
template <class T, int rows, bool ragged, bool fetch>
__attribute__((noinline)) void products_of(const Width& width, const float* query, const T* key, int64_t stride, float* scores,
                                           int64_t wide, Ahead<T> ahead) {
    constexpr int parts = Rows<T>::parts, step = Rows<T>::step, keys = lanes / rows, group = keys < 4 ? keys : 4;
    constexpr int some_steps = 4 / parts;
    const int64_t whole = width.steps - ragged;
    vu keep[parts];
    for (int part = 0; part < parts; part++)
        for (int l = 0; l < lanes; l++) keep[part][l] = l * parts + part >= width.twice() ? ~0u : 0;
    if constexpr (Rows<T>::pairs) keep[0] = (keep[0] & 0xffff) | (keep[1] & 0xffff0000);
#pragma GCC unroll 1
    for (int64_t j = 0; j < lanes; j += keys) {
        vf sum[rows][keys];
#pragma GCC unroll 4
        for (int first = 0; first < keys; first += group) {
            vf some[rows][lanes / rows] = {};
            const T* at = key + (j + first) * stride;
            int64_t n = 0;
            if constexpr (rows == 1 || parts == 2)
                for (; n + some_steps <= whole; n += some_steps) {
                    if (fetch)
#pragma GCC unroll 4
                        for (int k = 0; k < group; k++)
#pragma GCC unroll 4
                            for (int m = 0; m < some_steps; m++) ahead.ask(j + first + k, (n + m) * step);
                    multiply_keys<T, some_steps, rows, group>(query + n * step, width.padded(), at + n * step, stride, some);
                }
            for (; n < whole; n++) {
                if (fetch)
#pragma GCC unroll 4
                    for (int k = 0; k < group; k++) ahead.ask(j + first + k, n * step);
                multiply_step<T, rows, group, false>(query + n * step, width.padded(), at + n * step, stride, keep, some);
            }
            if (ragged) multiply_step<T, rows, group, true>(query + whole * step, width.padded(), at + width.last, stride, keep, some);
            if constexpr (scaled<T>)
#pragma GCC unroll 4
                for (int k = 0; k < group; k++) {
                    const vf scale = splat(scale_behind(at + k * stride, width.width));
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) some[r][k] *= scale;
                }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int k = 0; k < group; k++) sum[r][first + k] = some[r][k];
        }
        const vf all = totals(&sum[0][0]);
        if constexpr (rows == 1) {
            store(scores + j, all);
        } else {
            float lane[lanes];
            store(lane, all);
            for (int r = 0; r < rows; r++) memcpy(scores + r * wide + j, lane + r * keys, keys * sizeof(float));
        }
    }
}

template <class T, int rows>
SACCADE_INLINE void products(const Width& width, const float* query, const T* key, int64_t stride, float* scores, int64_t wide,
                             Ahead<T> ahead, bool fetch) {
    const bool ragged = width.twice() > 0;
    const auto kernel = fetch ? (ragged ? products_of<T, rows, true, true> : products_of<T, rows, false, true>)
                              : (ragged ? products_of<T, rows, true, false> : products_of<T, rows, false, false>);
    kernel(width, query, key, stride, scores, wide, ahead);
}

// --- weighted values ----------------------------------------------------------------------------------------------

// sum[r] += weights[r][0] value[0] for `vectors` steps, of which the last begins at `last`; a scale stands at `behind`.
template <class T, int rows, int vectors>
SACCADE_INLINE void weigh_rows(const float* weights, int64_t wide, const T* value, int64_t, int64_t last, int64_t behind, bool,
                               vf (*sum)[vectors][Rows<T>::parts]) {
    constexpr int parts = Rows<T>::parts, step = Rows<T>::step;
    vf x[vectors][parts];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) Rows<T>::load_step(value + (v == vectors - 1 ? last : v * step), x[v]);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        vf weight = splat(weights[r * wide]);
        if constexpr (scaled<T>) weight *= splat(scale_behind(value, behind));
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) sum[r][v][part] += weight * x[v][part];
    }
}

#if defined(SACCADE_PAIRS)
// The same for two values, of which the second may be missing. wide counts weights.
template <class T, int rows, int vectors>
SACCADE_INLINE void weigh_rows(const bf16* weights, int64_t wide, const T* value, int64_t stride, int64_t last, int64_t, bool alone,
                               vf (*sum)[vectors][Rows<T>::parts]) {
    constexpr int step = Rows<T>::step;
    vu row[2][vectors][1] = {}, x[vectors][2];
#pragma GCC unroll 2
    for (int n = 0; n < 2 - alone; n++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            Rows<T>::load_step(value + n * stride + (v == vectors - 1 ? last : v * step), row[n][v]);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) in_turn(row[0][v][0], row[1][v][0], x[v]);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        uint32_t two;
        memcpy(&two, weights + r * wide, 4);
        const spread_pair weight = splat_pair(alone ? two & 0xffff : two);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) sum[r][v][part] = dot(weight, x[v][part], sum[r][v][part]);
    }
}
#endif

// out[r] += sum_j weights[r][j] value[j] for `vectors` steps.
template <class T, int rows, int vectors, bool fetch>
SACCADE_INLINE void weighted_tile(const typename Rows<T>::weight* weights, int64_t wide, const T* value, int64_t stride,
                                  int64_t last, int64_t behind, int64_t count, float* out, int64_t out_row, Ahead<T> ahead) {
    constexpr int parts = Rows<T>::parts, step = Rows<T>::step;
    vf sum[rows][vectors][parts];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) sum[r][v][part] = load(out + r * out_row + v * step + part * lanes);
    constexpr int at_once = Rows<T>::pairs ? 2 : 1;
    int64_t j = 0;
    for (; j + at_once <= count; j += at_once) {
        if (fetch)
#pragma GCC unroll 2
            for (int k = 0; k < at_once; k++)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) ahead.ask(j + k, v * step);
        weigh_rows<T, rows, vectors>(weights + j, wide, value + j * stride, stride, last, behind, false, sum);
    }
    if (j < count) weigh_rows<T, rows, vectors>(weights + j, wide, value + j * stride, stride, last, behind, true, sum);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) store(out + r * out_row + v * step + part * lanes, sum[r][v][part]);
}

template <class T, int rows, int vectors, bool fetch>
SACCADE_INLINE void weighted_last(int64_t left, const typename Rows<T>::weight* weights, int64_t wide, const T* value, int64_t stride,
                                  int64_t last, int64_t behind, int64_t count, float* out, int64_t out_row, Ahead<T> ahead) {
    if constexpr (vectors > 0) {
        if (left == vectors) return weighted_tile<T, rows, vectors, fetch>(weights, wide, value, stride, last, behind, count, out, out_row, ahead);
        weighted_last<T, rows, vectors - 1, fetch>(left, weights, wide, value, stride, last, behind, count, out, out_row, ahead);
    }
}

// out[r] += sum_j weights[r][j] value[j], out in the order of the steps' vectors.
template <class T, int rows, bool fetch>
__attribute__((noinline)) void weighted_of(const Width& width, const typename Rows<T>::weight* weights, int64_t wide, const T* value,
                                           int64_t stride, int64_t count, float* out, Ahead<T> ahead) {
    constexpr int step = Rows<T>::step, most = std::min(8, registers / 2 / rows) / Rows<T>::parts;
    static_assert(most > 0);
    for (int64_t n = 0; n < width.steps; n += most) {
        const int64_t left = std::min<int64_t>(width.steps - n, most);
        const int64_t last = (n + left == width.steps ? width.last : (n + left - 1) * step) - n * step;
        weighted_last<T, rows, most, fetch>(left, weights, wide, value + n * step, stride, last, width.width - n * step, count,
                                            out + n * step, width.padded(), {ahead.rows + n * step, ahead.stride});
    }
}

template <class T, int rows>
SACCADE_INLINE void weighted(const Width& width, const typename Rows<T>::weight* weights, int64_t wide, const T* value, int64_t stride,
                             int64_t count, float* out, Ahead<T> ahead, bool fetch) {
    (fetch ? weighted_of<T, rows, true> : weighted_of<T, rows, false>)(width, weights, wide, value, stride, count, out, ahead);
}

// tile(integral constant 4, 2 or 1, first row) until `rows` rows are covered.
template <class F> SACCADE_INLINE void in_tiles(int64_t rows, F&& tile) {
    int64_t r = 0;
    for (; rows - r >= 4; r += 4) tile(std::integral_constant<int, 4>(), r);
    if (rows - r >= 2) tile(std::integral_constant<int, 2>(), r), r += 2;
    if (rows - r >= 1) tile(std::integral_constant<int, 1>(), r);
}

}  // namespace SACCADE_SET
}  // namespace saccade

// Products of few rows with a weight as it lies in memory, out = x W^T + b, in an order of sums of our own (a given one:
// ordered_rows.h). Reading W once is the whole cost, so it is read as a stream, line after line, as a copy would be; a bf16 weight is half as long, and is multiplied in float.
//
// Shape legend: R rows (at most kFewRows), E width, F features.
#pragma once

#include <algorithm>

#include "call.h"
#include "ordered_rows.h"
#include "parallel.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// Vectors of a line taken at once, whatever R is: so the order of a row's sums, and its bits, do not depend on the others.
constexpr int stride = 3;
constexpr int rows_at_once = registers == 32 ? 4 : 2;  // with two lines: as many as leave registers for their sums

// R rows, from `first` on, with N lines of W.
template <int R, int N, class T> SACCADE_INLINE void row_products(const FewRows& call, const T* w, int first, int64_t f) {
    constexpr int ahead = 4096;  // bytes: the processor's own prefetching stops at every page
    const float* const x = call.x + first * call.width;
    const int64_t whole = call.width / (stride * lanes) * (stride * lanes);
    vf sum[R][N][stride] = {};
    for (int64_t k = 0; k < whole; k += stride * lanes)
#pragma GCC unroll 3
        for (int u = 0; u < stride; u++) {
            vf line[N];
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) {
                const T* const from = w + n * call.width + k + u * lanes;
                if (first == 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead, 0, 2);
                line[n] = load_as_float(from);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const vf part = load(x + r * call.width + k + u * lanes);
#pragma GCC unroll 2
                for (int n = 0; n < N; n++) sum[r][n][u] += part * line[n];
            }
        }
    for (int64_t k = whole; k < call.width; k += lanes)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const vf part = load_as_float(x + r * call.width + k, call.width - k);
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) sum[r][n][0] += part * load_as_float(w + n * call.width + k, call.width - k);
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++)
            call.out[(first + r) * call.features + f + n] =
                total(sum[r][n][0] + sum[r][n][1] + sum[r][n][2]) + (call.bias ? call.bias[f + n] : 0);
}

// All R rows with N lines, which come from memory once and then from the cache.
template <int R, int N, class T> SACCADE_INLINE void line_products(const FewRows& call, int64_t f) {
    const T* const w = static_cast<const T*>(call.weight) + f * call.width;
    constexpr int last = R % rows_at_once;
    for (int r = 0; r + rows_at_once <= R; r += rows_at_once) row_products<rows_at_once, N, T>(call, w, r, f);
    if constexpr (last > 0) row_products<last, N, T>(call, w, R - last, f);
}

template <int R, class T> void few_rows_of(const FewRows& call) {
    constexpr int64_t piece = 1 << 17;  // bytes of W in a task
    const int64_t lines = std::max<int64_t>(piece / ((int64_t)sizeof(T) * call.width), 1);
    parallel(call.threads, (call.features + lines - 1) / lines, [&](int64_t task, int) {
        const int64_t stop = std::min((task + 1) * lines, call.features);
        int64_t f = task * lines;
        for (; f + 2 <= stop; f += 2) line_products<R, 2, T>(call, f);
        if (f < stop) line_products<R, 1, T>(call, f);
    });
}

template <class T> void few_rows_in(const FewRows& call) {
    static_assert(kFewRows == 8);
    switch (call.rows) {
        case 1: return few_rows_of<1, T>(call);
        case 2: return few_rows_of<2, T>(call);
        case 3: return few_rows_of<3, T>(call);
        case 4: return few_rows_of<4, T>(call);
        case 5: return few_rows_of<5, T>(call);
        case 6: return few_rows_of<6, T>(call);
        case 7: return few_rows_of<7, T>(call);
        case 8: return few_rows_of<8, T>(call);
    }
}

inline void few_rows(const FewRows& call) {
    call.block ? ordered_rows(call) : call.half ? few_rows_in<bf16>(call) : few_rows_in<float>(call);
}

}  // namespace SACCADE_SET
}  // namespace saccade

// Products of few rows with a weight as it lies in memory: out = x W^T + b. Reading W once is the whole cost.
//
// Shape legend: R rows (at most kFewRows), E width, F features.
#pragma once

#include <algorithm>

#include "call.h"
#include "parallel.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// R rows with N lines of W, which lie one behind the other; the N lines after them are asked for meanwhile, since the
// processor's own prefetching stops at every page.
template <int R, int N> SACCADE_INLINE void row_products(const FewRows& call, int64_t f) {
    const float* const w = call.weight + f * call.width;
    const int64_t whole = call.width / lanes * lanes, left = call.width - whole, ahead = f + 2 * N <= call.features ? N * call.width : 0;
    vf sum[R][N] = {};
    const auto step = [&](int64_t k, auto&& read) SACCADE_LAMBDA {
        vf line[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) line[n] = read(w + n * call.width + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vf x = read(call.x + r * call.width + k);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sum[r][n] += x * line[n];
        }
    };
    for (int64_t k = 0; k < whole; k += lanes) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) __builtin_prefetch(w + n * call.width + ahead + k, 0, 2);
        step(k, [](const float* p) SACCADE_LAMBDA { return load(p); });
    }
    if (left) step(whole, [left](const float* p) SACCADE_LAMBDA { return load_as_float(p, left); });
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            call.out[r * call.features + f + n] = total(sum[r][n]) + (call.bias ? call.bias[f + n] : 0);
}

template <int R> void few_rows_of(const FewRows& call) {
    // As many sums as registers hold beside the lines themselves.
    constexpr int lines = registers == 32 ? (R <= 3 ? 8 : R <= 6 ? 4 : 3) : (R <= 3 ? 4 : 2);
    constexpr int64_t piece = 1 << 17;  // bytes of W in a task
    const int64_t some = std::max<int64_t>(piece / (4 * call.width * lines), 1) * lines;
    parallel(call.threads, (call.features + some - 1) / some, [&](int64_t task, int) {
        const int64_t stop = std::min((task + 1) * some, call.features);
        int64_t f = task * some;
        for (; f + lines <= stop; f += lines) row_products<R, lines>(call, f);
        for (; f < stop; f++) row_products<R, 1>(call, f);
    });
}

inline void few_rows(const FewRows& call) {
    static_assert(kFewRows == 8);
    switch (call.rows) {
        case 1: return few_rows_of<1>(call);
        case 2: return few_rows_of<2>(call);
        case 3: return few_rows_of<3>(call);
        case 4: return few_rows_of<4>(call);
        case 5: return few_rows_of<5>(call);
        case 6: return few_rows_of<6>(call);
        case 7: return few_rows_of<7>(call);
        case 8: return few_rows_of<8>(call);
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

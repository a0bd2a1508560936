// Products of few rows with a weight as it lies in memory, out = x W^T + b, whose sums run in a given order: one
// multiply-add after the other, in blocks that are added up as they end. That is oneDNN's order for packed weights, so a
// row has the bits here that it has among many rows there.
//
// A lane is a feature. W (F, E) is turned in registers, `lanes` lines at a time, or lies turned, (E, F).
//
// Shape legend: R rows (at most kOrderedRows), E width, F features.
#pragma once

#include <algorithm>

#include "call.h"
#include "pack.h"
#include "parallel.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

inline void ask_for(const float* from) { __builtin_prefetch(from, 0, 2); }  // an address, never a read

// 16 features from f on: their lines are read side by side, so the next ones are asked for in the order of memory. Every
// multiply-add waits for the one before: 16 features in several vectors leave as little of that to see as in a single one.
constexpr int side = 16, groups = side / lanes;

template <int R> void line_group(const FewRows& call, int64_t f) {
    const float* const w = static_cast<const float*>(call.weight) + f * call.width;
    const float* const next = f + 2 * side <= call.features ? w + side * call.width : w;
    vf all[groups][R] = {}, sum[groups][R];
    for (int64_t first = 0; first < call.width; first += call.block) {
        const int64_t stop = std::min(first + call.block, call.width);
        for (auto& of_group : sum)
            for (vf& x : of_group) x = vf{};
        for (int64_t k = first; k < stop; k += lanes) {
            const int64_t here = std::min<int64_t>(lanes, stop - k);
            const float* const x = call.x + k;
            for (int n = 0; n < side * lanes; n += 64 / (int)sizeof(float)) ask_for(next + k * side + n);
#pragma GCC unroll 4
            for (int g = 0; g < groups; g++) {
                const int64_t count = std::min<int64_t>(lanes, call.features - f - g * lanes);
                const float* const from = w + g * lanes * call.width + k;
                vf column[lanes];
                if (here == lanes && count >= lanes) {
#pragma GCC unroll 16
                    for (int n = 0; n < lanes; n++) column[n] = load(from + n * call.width);
                } else {
                    for (int n = 0; n < lanes; n++) column[n] = n < count ? load_as_float(from + n * call.width, here) : vf{};
                }
                transpose(column);
                if (here == lanes) {
#pragma GCC unroll 16
                    for (int n = 0; n < lanes; n++)
#pragma GCC unroll 2
                        for (int r = 0; r < R; r++) sum[g][r] = fused(splat(x[r * call.width + n]), column[n], sum[g][r]);
                } else {
                    for (int64_t n = 0; n < here; n++)
                        for (int r = 0; r < R; r++) sum[g][r] = fused(splat(x[r * call.width + n]), column[n], sum[g][r]);
                }
            }
        }
        for (int g = 0; g < groups; g++)
            for (int r = 0; r < R; r++) all[g][r] = first == 0 ? sum[g][r] : all[g][r] + sum[g][r];
    }
    for (int g = 0; g < groups; g++)
        for (int r = 0; r < R; r++) {
            const int64_t at = f + g * lanes, count = call.features - at;
            if (count <= 0) continue;
            if (call.bias) all[g][r] += load_as_float(call.bias + at, count);
            store_from_float(call.out + r * call.features + at, all[g][r], count);
        }
}

// Features [from, to) of a weight that lies turned: a few of its lines at a time, onto sums in the cache.
constexpr int turned_lines = 8;
constexpr int64_t turned_features = 1024;  // of which the sums of all rows stay in the cache
constexpr int64_t turned_least = 384;

template <int R, int vectors, int lines> SACCADE_INLINE void add_lines(const FewRows& call, const float* w, const float* x, float* sum) {
    vf some[R][vectors];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) some[r][v] = load(sum + r * turned_features + v * lanes);
#pragma GCC unroll 8
    for (int n = 0; n < lines; n++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const float* const at = w + n * call.features + v * lanes;
            ask_for(at + turned_lines * call.features);
            const vf line = load(at);
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) some[r][v] = fused(splat(x[r * call.width + n]), line, some[r][v]);
        }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(sum + r * turned_features + v * lanes, some[r][v]);
}

template <int R, int lines> SACCADE_INLINE void add_turned(const FewRows& call, int64_t k, int64_t from, int64_t to, float* sum) {
    constexpr int vectors = 4 / R;
    const float* const w = static_cast<const float*>(call.weight) + k * call.features;
    int64_t f = from;
    for (; f + vectors * lanes <= to; f += vectors * lanes) add_lines<R, vectors, lines>(call, w + f, call.x + k, sum + f - from);
    for (; f + lanes <= to; f += lanes) add_lines<R, 1, lines>(call, w + f, call.x + k, sum + f - from);
    if (f == to) return;
    for (int r = 0; r < R; r++) {
        vf some = load(sum + r * turned_features + f - from);
        for (int n = 0; n < lines; n++)
            some = fused(splat(call.x[r * call.width + k + n]), load_as_float(w + n * call.features + f, to - f), some);
        store(sum + r * turned_features + f - from, some);
    }
}

template <int R> void turned_group(const FewRows& call, int64_t from, int64_t to) {
    float* const all = static_cast<float*>(scratch(0, 2 * R * turned_features * sizeof(float)));
    float* const sum = all + R * turned_features;
    for (int64_t first = 0; first < call.width; first += call.block) {
        const int64_t stop = std::min(first + call.block, call.width);
        std::fill_n(sum, R * turned_features, 0.0f);
        int64_t k = first;
        for (; k + turned_lines <= stop; k += turned_lines) add_turned<R, turned_lines>(call, k, from, to, sum);
        for (; k < stop; k++) add_turned<R, 1>(call, k, from, to, sum);
        for (int64_t n = 0; n < R * turned_features; n += lanes) store(all + n, first == 0 ? load(sum + n) : load(all + n) + load(sum + n));
    }
    for (int r = 0; r < R; r++)
        for (int64_t f = from; f < to; f += lanes) {
            vf x = load(all + r * turned_features + f - from);
            if (call.bias) x += load_as_float(call.bias + f, to - f);
            store_from_float(call.out + r * call.features + f, x, to - f);
        }
}

template <int R> void ordered_rows_of(const FewRows& call) {
    // Few and long tasks: what a task reads first is not asked for by anyone before it. Pieces of turned lines are wide
    // enough to be read as a stream.
    const int64_t tasks = 4 * call.threads, even = up_to((call.features + tasks - 1) / tasks, side);
    const int64_t most = call.turned ? std::min(std::max(even, turned_least), turned_features) : even;
    parallel(call.threads, (call.features + most - 1) / most, [&](int64_t task, int) {
        const int64_t from = task * most, to = std::min(from + most, call.features);
        if (call.turned) return turned_group<R>(call, from, to);
        const float* const w = static_cast<const float*>(call.weight) + from * call.width;
        for (int64_t n = 0; n < std::min<int64_t>(side, to - from) * call.width; n += 64 / (int64_t)sizeof(float)) ask_for(w + n);
        for (int64_t f = from; f < to; f += side) line_group<R>(call, f);
    });
}

inline void ordered_rows(const FewRows& call) {
    static_assert(kOrderedRows == 2 && turned_features % lanes == 0);
    call.rows == 1 ? ordered_rows_of<1>(call) : ordered_rows_of<2>(call);
}

}  // namespace SACCADE_SET
}  // namespace saccade

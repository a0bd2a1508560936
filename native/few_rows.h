// Products of few rows with a weight as it lies in memory, out = x W^T + b, in an order of sums of our own (a given one:
// ordered_rows.h). Reading W once is the whole cost, so it is read as a stream, line after line, as a copy would be; a bf16 weight is half as long, and is multiplied in float.
//
// Shape legend: R rows (at most kFewRows), E width, F features.
#pragma once

#include <algorithm>

#include "call.h"
#include "decode_tiles.h"
#include "ordered_rows.h"
#include "parallel.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// Steps of a line taken at once, whatever R is: so the order of a row's sums, and its bits, do not depend on the others. A
// step of bf16 is two vectors of float, its even and its odd entries, and so a row is laid out for it. One step of bf16 at
// once reads 33 GB/s where two read 35 (Zen 5; float 41), and where they are asked for (2 to 16 KB ahead) made no difference.
template <class T> constexpr int strides = Rows<T>::parts == 2 ? 2 : 3;
constexpr int rows_at_once = registers == 32 ? 4 : 2;  // with two lines: as many as leave registers for their sums

// Rows of x as `Rows<T>` multiplies them: whole steps, `stride` apart. `ahead`: bytes from what is read to what is asked for.
struct FewSteps {
    const float* x;
    int64_t stride, ahead;
};

// The processor's own prefetching stops at every page. Of two short lines that are read together the next two are asked for.
inline int64_t ahead_of(int64_t line_bytes) {
    constexpr int64_t least = 4096, most = 16384;
    const int64_t both = 2 * line_bytes;
    return both > most ? least : (least + both - 1) / both * both;
}

// R rows, from `first` on, with N lines of W.
template <int R, int N, class T>
SACCADE_INLINE void row_products(const FewRows& call, const FewSteps& steps, const T* w, int first, int64_t f) {
    constexpr int parts = Rows<T>::parts, step = Rows<T>::step, count = strides<T> * parts;
    const float* const x = steps.x + first * steps.stride;
    const int64_t whole = call.width / (strides<T> * step) * (strides<T> * step);
    vf sum[R][N][count] = {};
    for (int64_t k = 0; k < whole; k += strides<T> * step)
#pragma GCC unroll 3
        for (int u = 0; u < strides<T>; u++) {
            vf line[N][parts];
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) {
                const T* const from = w + n * call.width + k + u * step;
                if (first == 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + steps.ahead, 0, 2);
                Rows<T>::load_step(from, line[n]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int p = 0; p < parts; p++) {
                    const vf part = load(x + r * steps.stride + k + u * step + p * lanes);
#pragma GCC unroll 2
                    for (int n = 0; n < N; n++) sum[r][n][u * parts + p] += part * line[n][p];
                }
        }
    for (int64_t k = whole; k < call.width; k += lanes)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const vf part = load_as_float(call.x + (first + r) * call.width + k, call.width - k);
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) sum[r][n][0] += part * load_as_float(w + n * call.width + k, call.width - k);
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            vf all = sum[r][n][0];
            for (int c = 1; c < count; c++) all += sum[r][n][c];
            call.out[(first + r) * call.features + f + n] = total(all) + (call.bias ? call.bias[f + n] : 0);
        }
}

// All R rows with N lines, which come from memory once and then from the cache.
template <int R, int N, class T> SACCADE_INLINE void line_products(const FewRows& call, const FewSteps& steps, int64_t f) {
    const T* const w = static_cast<const T*>(call.weight) + f * call.width;
    constexpr int last = R % rows_at_once;
    for (int r = 0; r + rows_at_once <= R; r += rows_at_once) row_products<rows_at_once, N, T>(call, steps, w, r, f);
    if constexpr (last > 0) row_products<last, N, T>(call, steps, w, R - last, f);
}

template <int R, class T> void few_rows_of(const FewRows& call, const FewSteps& steps) {
    constexpr int64_t piece = 1 << 17;  // bytes of W in a task, at most
    const int64_t shared = (call.features + 4 * call.threads - 1) / (4 * call.threads);  // nobody waits long for the others
    const int64_t lines = std::max<int64_t>(std::min(piece / ((int64_t)sizeof(T) * call.width), shared) / 2 * 2, 2);
    parallel(call.threads, (call.features + lines - 1) / lines, [&](int64_t task, int) {
        const int64_t stop = std::min((task + 1) * lines, call.features);
        int64_t f = task * lines;
        for (; f + 2 <= stop; f += 2) line_products<R, 2, T>(call, steps, f);
        if (f < stop) line_products<R, 1, T>(call, steps, f);
    });
}

template <class T> void few_rows_in(const FewRows& call) {
    static_assert(kFewRows == 8);
    const Workspace laid(Rows<T>::parts == 1 ? 0 : call.rows * call.width * (int64_t)sizeof(float));
    FewSteps steps{call.x, call.width, ahead_of(call.width * (int64_t)sizeof(T))};
    if constexpr (Rows<T>::parts > 1) {
        constexpr int step = Rows<T>::step;
        float* const to = static_cast<float*>(laid.data());
        steps.x = to, steps.stride = call.width / step * step;
        for (int64_t r = 0; r < call.rows; r++)
            for (int64_t k = 0; k < steps.stride; k += step)
                for (int n = 0; n < step; n++) to[r * steps.stride + k + Rows<T>::place(n)] = call.x[r * call.width + k + n];
    }
    switch (call.rows) {
        case 1: return few_rows_of<1, T>(call, steps);
        case 2: return few_rows_of<2, T>(call, steps);
        case 3: return few_rows_of<3, T>(call, steps);
        case 4: return few_rows_of<4, T>(call, steps);
        case 5: return few_rows_of<5, T>(call, steps);
        case 6: return few_rows_of<6, T>(call, steps);
        case 7: return few_rows_of<7, T>(call, steps);
        case 8: return few_rows_of<8, T>(call, steps);
    }
}

inline void few_rows(const FewRows& call) {
    call.block ? ordered_rows(call) : call.half ? few_rows_in<bf16>(call) : few_rows_in<float>(call);
}

}  // namespace SACCADE_SET
}  // namespace saccade

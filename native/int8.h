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

#include "activations.h"
#include "call.h"
#include "int8_panels.h"
#include "norm.h"
#include "parallel.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// Of a task: their bytes stay in the second-level cache, and what all of them read and write of two blocks of a panel in the first.
constexpr int64_t kInt8RowsAtOnce = 72;

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

// Register-tiled products of small blocks, the inner loops of every kernel.
//
//     c[i][n] (+)= sum_k a(i, k) * b[k][n]        a, b in units, c in float
//
// `Math` says what a unit is: `Single` one float, `Pairs` two bf16 along the reduction. b's rows are contiguous vectors,
// a's units are broadcast one by one, so a may be read along rows (natural) or along columns (turned).
#pragma once

#include "call.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

struct Single {
    typedef float unit;
    typedef vf vector;
    static constexpr int pack = 1;  // entries in a unit
    static SACCADE_INLINE vector spread(unit x) { return splat(x); }
    static SACCADE_INLINE vf multiply(vector a, vector b, vf c) { return a * b + c; }

    static constexpr int degree = 5;  // of the exponential's polynomial
    // Weights of neighbouring keys j, j + 1, ... into a row of units that may lie over the floats they came from.
    static SACCADE_INLINE void put(float* row, int64_t j, vf low) { store(row + j, low); }
    static SACCADE_INLINE void put(float* row, int64_t j, vf low, vf high) { store(row + j, low), store(row + j + lanes, high); }
    static SACCADE_INLINE float entry(unit x, int64_t) { return x; }
};

#if defined(SACCADE_PAIRS)
struct Pairs {
    typedef uint32_t unit;
    typedef vu vector;
    static constexpr int pack = 2;
    static SACCADE_INLINE spread_pair spread(unit x) { return splat_pair(x); }
    static SACCADE_INLINE vf multiply(spread_pair a, vector b, vf c) { return dot(a, b, c); }

    static constexpr int degree = 4;
    static SACCADE_INLINE void put(float* row, int64_t j, vf low) { store_from_float(reinterpret_cast<bf16*>(row) + j, low); }
    static SACCADE_INLINE void put(float* row, int64_t j, vf low, vf high) { store(row + j / 2, (vf)narrow(low, high)); }
    static SACCADE_INLINE float entry(unit x, int64_t j) { return to_float(bf16{(uint16_t)(j % 2 ? x >> 16 : x)}); }
};
#endif

// Rows of a register tile that is `vectors` wide: as many accumulators as leave room for b's vectors and one of a.
constexpr int tile_rows(int vectors) {
    if (registers == 32) return vectors == 1 ? 16 : vectors == 2 ? 12 : vectors == 3 ? 8 : vectors == 4 ? 6 : 5;
    return vectors == 1 ? 12 : vectors == 2 ? 6 : 4;
}
constexpr int widest = registers == 32 ? 5 : 3;

// Vectors of columns to take next when `left` remain, so that tiles stay near the size that keeps the multipliers busy.
constexpr int next_vectors(int left) {
    if (registers == 32) return left <= 5 ? left : left == 6 || left == 9 ? 3 : 4;
    return left <= 3 ? left : 2;
}

enum Layout { natural, turned };  // a(i, k) = a[i * lda + k] or a[k * lda + i]

template <class Math, int rows, int vectors, Layout layout, bool add>
SACCADE_INLINE void tile(const typename Math::unit* a, int64_t lda, const typename Math::unit* b, int64_t ldb, int64_t count,
                         float* c, int64_t ldc) {
    typedef typename Math::vector vector;
    vf sum[rows][vectors];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 5
        for (int n = 0; n < vectors; n++) sum[i][n] = add ? load(c + i * ldc + n * lanes) : vf{};
    for (int64_t k = 0; k < count; k++) {
        vector line[vectors];
#pragma GCC unroll 5
        for (int n = 0; n < vectors; n++) line[n] = load(b + k * ldb + n * lanes);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const auto x = Math::spread(layout == natural ? a[i * lda + k] : a[k * lda + i]);
#pragma GCC unroll 5
            for (int n = 0; n < vectors; n++) sum[i][n] = Math::multiply(x, line[n], sum[i][n]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 5
        for (int n = 0; n < vectors; n++) store(c + i * ldc + n * lanes, sum[i][n]);
}

// The last rows, fewer than a whole tile.
template <class Math, int rows, int vectors, Layout layout, bool add>
SACCADE_INLINE void last_rows(int64_t left, const typename Math::unit* a, int64_t lda, const typename Math::unit* b, int64_t ldb,
                              int64_t count, float* c, int64_t ldc) {
    if constexpr (rows > 0) {
        if (left == rows) return tile<Math, rows, vectors, layout, add>(a, lda, b, ldb, count, c, ldc);
        last_rows<Math, rows - 1, vectors, layout, add>(left, a, lda, b, ldb, count, c, ldc);
    }
}

// `rows` rows by `vectors` vectors of columns.
template <class Math, int vectors, Layout layout, bool add>
__attribute__((noinline)) void strip(int64_t rows, const typename Math::unit* a, int64_t lda, const typename Math::unit* b,
                                     int64_t ldb, int64_t count, float* c, int64_t ldc) {
    constexpr int step = tile_rows(vectors);
    int64_t i = 0;
    for (; i + step <= rows; i += step)
        tile<Math, step, vectors, layout, add>(layout == natural ? a + i * lda : a + i, lda, b, ldb, count, c + i * ldc, ldc);
    if (i < rows)
        last_rows<Math, step - 1, vectors, layout, add>(rows - i, layout == natural ? a + i * lda : a + i, lda, b, ldb, count,
                                                        c + i * ldc, ldc);
}

// c[rows][columns] (+)= a[rows][count] b[count][columns]; columns is a multiple of `lanes`, as are the rows of b and c.
template <class Math, Layout layout, bool add>
SACCADE_INLINE void multiply(int64_t rows, int64_t columns, int64_t count, const typename Math::unit* a, int64_t lda,
                             const typename Math::unit* b, int64_t ldb, float* c, int64_t ldc) {
    for (int64_t left = columns / lanes; left > 0;) {
        int vectors = next_vectors((int)(left < 64 ? left : 64));
        switch (vectors) {
            case 1: strip<Math, 1, layout, add>(rows, a, lda, b, ldb, count, c, ldc); break;
            case 2: strip<Math, 2, layout, add>(rows, a, lda, b, ldb, count, c, ldc); break;
            case 3: strip<Math, 3, layout, add>(rows, a, lda, b, ldb, count, c, ldc); break;
            case 4:
                if constexpr (widest >= 4) strip<Math, 4, layout, add>(rows, a, lda, b, ldb, count, c, ldc);
                break;
            case 5:
                if constexpr (widest >= 5) strip<Math, 5, layout, add>(rows, a, lda, b, ldb, count, c, ldc);
                break;
        }
        b += vectors * lanes, c += vectors * lanes, left -= vectors;
    }
}

// Runs a pass with the products that this instruction set has for the call's type.
template <template <class, class> class Pass, class Call> void run_pass(const Call& call) {
    switch (call.problem.type) {
        case Type::f32: return Pass<Single, float>(call).run();
#if defined(SACCADE_PAIRS)
        case Type::bf16: return Pass<Pairs, bf16>(call).run();
#else
        case Type::bf16: return Pass<Single, bf16>(call).run();
#endif
        case Type::f16: return Pass<Single, f16>(call).run();
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

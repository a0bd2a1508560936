// Copies of queries, keys and values in the order in which the micro-kernels read them. Whatever the element type and
// strides, the copies are aligned, filled up with zeros, and made of units (see gemm.h).
//
//     keys by panel    [D units][panel keys]     b of scores = query . key
//     rows             [keys / pack][width]      b of out = weights . value
//     query block      [rows][D units]           a of the scores
#pragma once

#include <algorithm>
#include <cmath>

#include "call.h"
#include "gemm.h"
#include "mask.h"

namespace saccade {
namespace SACCADE_SET {

constexpr int panel = 3 * lanes;  // keys in a panel: the width of a register tile
constexpr int grain = 48;         // keys, and query rows, in a block of the work list: whole panels on every set
static_assert(grain % panel == 0);

constexpr int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// scale = power * rest. Single floats take it all into the query. Pairs take the power of two and the sign, without
// rounding; the rest, in [1, 2), is multiplied into the exponent.
struct Scale {
    float power, rest = 1;
    Scale(float scale, int pack) : power(scale) {
        if (pack == 1 || scale == 0) return;
        int exponent = 0;
        const float part = std::frexp(std::fabs(scale), &exponent) * 2, whole = std::copysign(std::ldexp(1.0f, exponent - 1), scale);
        if (std::isnormal(whole)) power = whole, rest = part;
    }
};

// Whether everything seen was finite, kept as a vector until it is asked.
struct Finite {
    typedef uint16_t halves __attribute__((vector_size(4 * lanes)));
    vu bits = {};
    halves most = {};                                        // of both halves, without their signs
    SACCADE_INLINE void see(vf x) { bits |= (vu)(x - x); }  // a NaN unless finite
    SACCADE_INLINE void see(vu two) {
        const halves size = (halves)(two + two) & 0xfffe;  // the low half's sign falls into the lowest bit of the high one
        most = size > most ? size : most;
    }
    SACCADE_INLINE bool all() const {
        uint32_t any = 0;
        uint16_t size = 0;
        for (int i = 0; i < lanes; i++) any |= bits[i];
        for (int i = 0; i < 2 * lanes; i++) size = std::max(size, (uint16_t)most[i]);
        return any == 0 && size < 0xff00;  // an exponent of all ones
    }
};

// `lanes` units of a row.
template <class Math, class T> SACCADE_INLINE typename Math::vector load_units(const T* row) {
    if constexpr (Math::pack == 1) return load_as_float(row);
    else return load(reinterpret_cast<const uint32_t*>(row));
}

// The same of a row of which `left` entries remain.
template <class Math, class T> SACCADE_INLINE typename Math::vector load_units(const T* row, int64_t left) {
    if (left >= Math::pack * lanes) return load_units<Math, T>(row);
    T some[Math::pack * lanes] = {};
    memcpy(some, row, (left < 0 ? 0 : left) * sizeof(T));
    return load_units<Math, T>(some);
}

// Rows [low, high) of the `count` of a panel that begins at `rows`; the others are zero and not read, what lies behind
// whole vectors of `count` is left as it is. False when something was not finite.
template <class Math, class T>
bool pack_panel(const T* rows, int64_t stride, int64_t low, int64_t high, int64_t count, int64_t width, typename Math::unit* to) {
    typedef typename Math::vector vector;
    const int64_t units = up_to(width, Math::pack) / Math::pack;
    Finite finite;
    for (int64_t group = 0; group < count; group += lanes)
        for (int64_t u = 0; u < units; u += lanes) {
            vector block[lanes];
            const T* from = rows + group * stride + u * Math::pack;
            const int64_t left = width - u * Math::pack;
            if (low <= group && group + lanes <= high && left >= Math::pack * lanes) {
#pragma GCC unroll 16
                for (int64_t j = 0; j < lanes; j++) block[j] = load_units<Math, T>(from + j * stride);
            } else {
                for (int64_t j = 0; j < lanes; j++) {
                    const bool there = group + j >= low && group + j < high;
                    block[j] = there ? load_units<Math, T>(from + j * stride, left) : vector{};
                }
            }
#pragma GCC unroll 16
            for (int64_t j = 0; j < lanes; j++) finite.see(block[j]);
            transpose(block);
            const int64_t last = units - u < lanes ? units - u : lanes;
            for (int64_t c = 0; c < last; c++) store(to + (u + c) * panel + group, block[c]);
        }
    return finite.all();
}

template <class Math, class T>
bool pack_panel(const T* rows, int64_t stride, int64_t low, int64_t high, int64_t width, typename Math::unit* to) {
    return pack_panel<Math, T>(rows, stride, low, high, panel, width, to);
}

// Rows [low, high) of `count`, in order, `columns` (a multiple of lanes) units wide; the rest is zero and not read. For
// pairs, rows 2n and 2n + 1 share line n.
template <class Math, class T>
bool pack_rows(const T* rows, int64_t stride, int64_t low, int64_t high, int64_t count, int64_t width, typename Math::unit* to,
               int64_t columns) {
    Finite finite;
    for (int64_t j = 0; j < count; j += Math::pack)
        for (int64_t c = 0; c < columns; c += lanes) {
            vf line[2] = {};
            for (int n = 0; n < Math::pack; n++)
                if (j + n >= low && j + n < high) line[n] = load_as_float(rows + (j + n) * stride + c, width - c);
            if constexpr (Math::pack == 1) {
                finite.see(line[0]);
                store(to + j * columns + c, line[0]);
            } else {
                const vu both = ((vu)line[0] >> 16) | (vu)line[1];
                finite.see(both);
                store(to + j / 2 * columns + c, both);
            }
        }
    return finite.all();
}

// Asks for rows [low, high) ahead of their use: the processor's own prefetching starts again at every page.
template <class T> void ask_rows(const T* rows, int64_t stride, int64_t low, int64_t high, int64_t width) {
    for (int64_t j = low; j < high; j++)
        for (int64_t c = 0; c < width; c += 64 / (int64_t)sizeof(T)) __builtin_prefetch(rows + j * stride + c, 0, 2);
}

// Whether rows [low, high) are finite.
template <class T> bool finite_rows(const T* rows, int64_t stride, int64_t low, int64_t high, int64_t width) {
    Finite finite;
    for (int64_t j = low; j < high; j++)
        for (int64_t c = 0; c < width; c += lanes) finite.see(load_as_float(rows + j * stride + c, width - c));
    return finite.all();
}

// `count` query rows times a power of two.
template <class Math, class T>
void pack_query(const T* rows, int64_t stride, int64_t count, int64_t width, float power, typename Math::unit* to, int64_t units) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t u = 0; u < units; u += lanes) {
            const T* from = rows + i * stride + u * Math::pack;
            const int64_t left = width - u * Math::pack;
            const int64_t last = units - u;
            if constexpr (Math::pack == 1) {
                store_from_float(reinterpret_cast<float*>(to) + i * units + u, load_as_float(from, left) * splat(power), last);
            } else {
                const vf low = load_as_float(from, left) * splat(power);
                const vf high = load_as_float(from + (left > lanes ? lanes : 0), left - lanes) * splat(power);
                float some[lanes];
                Math::put(last < lanes ? some : reinterpret_cast<float*>(to + i * units + u), 0, low, high);
                if (last < lanes) memcpy(to + i * units + u, some, last * 4);
            }
        }
}

// Infinities become NaN: softmax makes it NaN of an infinite logit, and sigmoid, which would make it 0 or 1, is not to differ.
inline void spoil(float* units, int64_t count) {
    for (int64_t n = 0; n < count; n++) units[n] += units[n] - units[n];
}
inline void spoil(uint32_t* pairs, int64_t count) {
    for (int64_t n = 0; n < count; n++)
        for (uint32_t half = 0x7f80; half; half = half == 0x7f80 ? half << 16 : 0)
            if ((pairs[n] & half) == half) pairs[n] |= half >> 1;
}

// The keys that some query of a kv head's group may see lie within this range. Heads that share a mask ask it once.
inline Span keys_seen(const Problem& p, int64_t b, int64_t kv_head) {
    if (!p.mask) return {0, p.length_k};
    Span all{p.length_k, 0};
    const int64_t first = kv_head * p.group(), count = p.mask->heads > 1 ? p.group() : 1;
    for (int64_t h = first; h < first + count; h++) {
        const Span span = p.mask->keys_of(b, h, {0, p.length_q});
        if (!span.empty()) all = {std::min(all.start, span.start), std::max(all.stop, span.stop)};
    }
    return {std::max<int64_t>(all.start, 0), std::min(all.stop, p.length_k)};
}

// Element `T` of a strided input at (b, h, row).
template <class T> const T* at(const Input& input, int64_t b, int64_t h, int64_t row) {
    return static_cast<const T*>(input.data) + b * input.batch + h * input.head + row * input.row;
}
template <class T> T* at(const Output& output, int64_t b, int64_t h, int64_t row) {
    return static_cast<T*>(output.data) + b * output.batch + h * output.head + row * output.row;
}

}  // namespace SACCADE_SET
}  // namespace saccade

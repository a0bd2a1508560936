// Keys and values to rows of 8 bits: whole numbers, and behind them the row's scale, a float32. `decode.h` reads them.
//
// The bits are those of `Int8Rows.of` in Python: every operation is rounded as there.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "call.h"
#include "pack.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// scale = max |x| / 127, but no number below the least normal one, which would lose digits; NaN where the row is not finite.
template <class T> void round_row(const T* x, int64_t width, int8_t* to) {
    typedef int8_t bytes __attribute__((vector_size(lanes)));
    vf high = {};
    Finite finite;
    for (int64_t n = 0; n < width; n += lanes) {
        const vf some = load_as_float(x + n, width - n);
        finite.see(some);
        high = maximum((vf)((vu)some & splat_u(0x7fffffff)), high);
    }
    const bool whole = finite.all();
    const float least = std::numeric_limits<float>::min(), none = std::numeric_limits<float>::quiet_NaN();
    const float scale = whole ? std::max(greatest(high) / 127, least) : none;
    const vf divisor = splat(scale), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to even
    for (int64_t n = 0; n < width; n += lanes) {
        const vf quotient = whole ? load_as_float(x + n, width - n) / divisor : vf{};
        const bytes some = __builtin_convertvector((vi)(quotient + magic), bytes);  // the lowest byte
        memcpy(to + n, &some, std::min<int64_t>(lanes, width - n));
    }
    memcpy(to + width, &scale, sizeof scale);
}

template <class T> void round_all(const RoundRows& f) {
    int8_t* to = f.out;
    for (int64_t b = 0; b < f.batch; b++)
        for (int64_t h = 0; h < f.heads; h++)
            for (int64_t i = 0; i < f.rows; i++, to += f.width + (int64_t)sizeof(float))
                round_row(static_cast<const T*>(f.x.data) + b * f.x.batch + h * f.x.head + i * f.x.row, f.width, to);
}

inline void round_rows(const RoundRows& f) {
    switch (f.type) {
        case Type::f32: return round_all<float>(f);
        case Type::bf16: return round_all<bf16>(f);
        case Type::f16: return round_all<f16>(f);
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

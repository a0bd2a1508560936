// Norms of rows.
#pragma once

#include <cmath>

#include "call.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// Rows of `width`; to may be from. T: type of weight and bias.
template <class T, class X> void normalise(const StepNorm& norm, const X* from, X* to, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++, from += width, to += width) {
        float mean = 0;
        if (norm.kind == StepNorm::layer) {
            vf sum = {};
            for (int64_t n = 0; n < width; n += lanes) sum += load_as_float(from + n, width - n);
            mean = total(sum) / width;
        }
        vf squares = {};
        for (int64_t n = 0; n < width; n += lanes) {
            const int64_t left = width - n;
            vf part = load_as_float(from + n, left) - splat(mean);
            if (left < lanes) part = select((1u << left) - 1, part, vf{});
            squares += part * part;
        }
        const vf by = splat(1 / std::sqrt(total(squares) / width + norm.eps));
        for (int64_t n = 0; n < width; n += lanes) {
            const int64_t left = width - n;
            vf y = (load_as_float(from + n, left) - splat(mean)) * by;
            if (norm.weight) y *= load_as_float(static_cast<const T*>(norm.weight) + n, left) + splat(norm.plus);
            if (norm.bias) y += load_as_float(static_cast<const T*>(norm.bias) + n, left);
            store_from_float(to + n, y, left);
        }
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

// The functions between two linear layers.
#pragma once

#include "call.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// x P(X <= x) of a standard normal X. The lower tail is 2^p(|x|): p of degree 8 has the least error relative to |x|, 2.7e-8, and
// falls without end. Neither tail cancels.
SACCADE_INLINE vf gelu(vf x) {
    const vf size = maximum(x, -x);
    vf p = splat(-7.72079638e-07f) * size + splat(1.7020434e-05f);
    for (const float next : {-9.10498217e-05f, -0.000340269273f, 0.00729530562f, -0.0526343536f, -0.459169233f, -1.15110929f, -0.999999923f})
        p = p * size + splat(next);
    const vf tail = exp2_of(p);
    return x * (x > 0 ? splat(1.0f) - tail : tail);
}

SACCADE_INLINE vf silu(vf x, vf slope) { return x / (splat(1.0f) + exp2_of(-x * slope, splat(log2_e))); }

// body(f), f a function of a vector: loops are compiled for each.
template <class Body> SACCADE_INLINE void with_activation(Activation function, const Body& body) {
    switch (function) {
        case Activation::gelu: return body([](vf x) SACCADE_LAMBDA { return gelu(x); });
        case Activation::gelu_tanh:  // 2 sqrt(2 / pi)
            return body([](vf x) SACCADE_LAMBDA { return silu(x, splat(1.59576912f) * fused(splat(0.044715f) * x, x, splat(1.0f))); });
        case Activation::relu: return body([](vf x) SACCADE_LAMBDA { return maximum(vf{}, x); });  // in this order a NaN stays
        case Activation::silu: return body([](vf x) SACCADE_LAMBDA { return silu(x, splat(1.0f)); });
        case Activation::none: return body([](vf x) SACCADE_LAMBDA { return x; });
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

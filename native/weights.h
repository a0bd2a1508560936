// What stands between a product and its weight: softcap, bias, mask bits, dropout. Forward, backward and decoding share it.
#pragma once

#include "call.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// tanh by an odd polynomial below 5/8 (Cephes tanhf, S. Moshier) and 1 - 2 / (e^2x + 1) above.
SACCADE_INLINE vf tanh_of(vf x) {
    vf size = (vf)((vu)x & splat_u(0x7fffffff));
    size = size > splat(40.0f) ? splat(40.0f) : size;  // tanh is 1 from 10 on, and 2^inf need not be right; a NaN stays
    const vf square = x * x;
    vf p = splat(-5.70498872745e-3f) * square + splat(2.06390887954e-2f);
    p = p * square + splat(-5.37397155531e-2f);
    p = p * square + splat(1.33314422036e-1f);
    p = p * square + splat(-3.33332819422e-1f);
    const vf near = p * square * x + x;
    const vf far = splat(1.0f) - splat(2.0f) / (exp2_of(size * splat(2 * log2_e)) + splat(1.0f));
    const vf signed_far = (vf)((vu)far | ((vu)x & splat_u(0x80000000)));
    return size < splat(0.625f) ? near : signed_far;
}

// --- dropout: bit for bit `saccade.Dropout.factor` ----------------------------------------------------------------

SACCADE_INLINE uint32_t mix(uint32_t word) {  // Wellons, "lowbias32"
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    return word ^ (word >> 16);
}
SACCADE_INLINE vu mix(vu word) {
    word = (word ^ (word >> 16)) * splat_u(0x7feb352du);
    word = (word ^ (word >> 15)) * splat_u(0x846ca68bu);
    return word ^ (word >> 16);
}

struct DropoutRow {
    uint32_t row, again, threshold;
    float factor;

    DropoutRow(const Dropout& dropout, int64_t b, int64_t h, int64_t i) : threshold(dropout.threshold), factor(dropout.factor) {
        const uint32_t head = mix(mix((uint32_t)b ^ dropout.low) + (uint32_t)(h + dropout.head_origin)) ^ dropout.high;
        row = mix(mix(head) + (uint32_t)(i + dropout.row_origin));
        again = mix(row ^ 0x9e3779b9u);
    }

    // The factors of keys first, first + 1, ... (counted in the whole problem): 0 or 1 / (1 - p).
    SACCADE_INLINE vf at(int64_t first) const {
        vu key = splat_u((uint32_t)first) + counting();
        vu word = mix(mix(key ^ splat_u(row)) + splat_u(again));
        return word >= splat_u(threshold) ? splat(factor) : splat(0.0f);
    }

    static SACCADE_INLINE vu counting() {
        vu count;
        for (int i = 0; i < lanes; i++) count[i] = (uint32_t)i;
        return count;
    }
};

// --- from logits to weights ------------------------------------------------------------------------------------------

// exp(s - pivot); s and pivot are `natural` of a logit each, and factor = natural log2(e).
struct SoftmaxWeight {
    static constexpr bool summed = true;
    vf pivot, factor;
    SoftmaxWeight(float pivot, float factor) : pivot(splat(pivot)), factor(splat(factor)) {}
    template <int degree> SACCADE_INLINE vf of(vf s) const { return exp2_of<degree>(s - pivot, factor); }  // subtracted first: there is no overflow
};

// 1 / (1 + n exp(-s)), which is sigmoid(s - log n) with an n that is not rounded. Exactly 0 where s is -inf.
// Relative error: for degree 5 up to 4 units in the last place, beside what rounding s log2(e) does; for degree 4 7e-5.
struct SigmoidWeight {
    static constexpr bool summed = false;
    vf count, factor;
    float limit, most;  // s beyond which exp(-s) is nothing beside 1; -log2 exp(s) beyond which the weight is below 2^-126, and is 0
    SigmoidWeight(float n, float factor) : count(splat(n < 1 ? 1 : n)), factor(splat(factor)), limit(126 / factor), most(125 - exponent(n)) {}
    static SACCADE_INLINE float exponent(float n) {  // of 2; n is a number of keys
        uint32_t word;
        memcpy(&word, &n, 4);
        return n < 1 ? 0 : (float)(int32_t)(word >> 23) - 127;
    }
#if defined(__AVX512F__)
    template <int degree> SACCADE_INLINE vf of(vf s) const {
        s = (vf)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)s);  // a power that is denormal would be slow; NaN stays
        const vf y = s * -factor;
        const __mmask16 some = _mm512_cmp_ps_mask((__m512)y, _mm512_set1_ps(most), _CMP_NGT_UQ);  // true for NaN
        const vf n = (vf)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const vf power = (vf)_mm512_scalef_ps((__m512)polynomial<degree>(fused(s, -factor, -n)), (__m512)n);
        const vf all = fused(count, power, splat(1.0f));
        if constexpr (degree == 4) return (vf)_mm512_maskz_rcp14_ps(some, (__m512)all);
        const __m512 guess = _mm512_rcp14_ps((__m512)all);  // one step of Newton squares its error of 2^-14
        return (vf)_mm512_maskz_fmadd_ps(some, guess, _mm512_fnmadd_ps((__m512)all, guess, _mm512_set1_ps(1)), guess);
    }
#else
    template <int degree> SACCADE_INLINE vf of(vf s) const {
        return splat(1.0f) / fused(count, exp2_of<degree>(-s, factor), splat(1.0f));
    }
#endif
};

// --- bias ---------------------------------------------------------------------------------------------------------

template <class T> SACCADE_INLINE vf strided(const T* from, int64_t stride, int64_t count) {
    if (stride == 1) return load_as_float(from, count);
    if (stride == 0) return count > 0 ? splat(to_float(*from)) : vf{};
    vf x = {};
    for (int64_t n = 0; n < (count < lanes ? count : lanes); n++) x[n] = to_float(from[n * stride]);
    return x;
}

// One row of a bias: scores of keys first, first + 1, ... of which `count` exist.
struct BiasRow {
    const Bias& bias;
    int64_t base;
    BiasRow(const Bias& bias, int64_t b, int64_t h, int64_t i) : bias(bias) {
        base = bias.form == Bias::line ? h * bias.line_length - i - bias.placed(b) - bias.least
                                       : b * bias.batch + h * bias.head + i * bias.row;
    }
    SACCADE_INLINE vf at(int64_t first, int64_t count) const {
        if (bias.form == Bias::line) return load_as_float(bias.lines + (base + first), count);
        const int64_t start = base + first * bias.key;
        switch (bias.type) {
            case Type::f32: return strided(static_cast<const float*>(bias.data) + start, bias.key, count);
            case Type::bf16: return strided(static_cast<const bf16*>(bias.data) + start, bias.key, count);
            default: return strided(static_cast<const f16*>(bias.data) + start, bias.key, count);
        }
    }
};

// --- from products to logits --------------------------------------------------------------------------------------

// What is done to a row of products besides the factor: nothing at all is the common case and has its own loop.
struct Logits {
    float rest, softcap;
    const Bias& bias;
    Logits(const Problem& problem, float rest) : rest(rest), softcap(problem.softcap), bias(problem.bias) {}
    bool plain() const { return softcap == 0 && bias.form == Bias::none; }

    // What a score is multiplied by to become a logit, once `turn` has been at it or was not needed.
    float natural() const { return plain() ? rest : 1; }

    // Products of keys first ... first + width - 1, of which `count` exist, to logits.
    // A bias of -inf is a mask: whatever the product is, the logit is -inf.
    void turn(float* s, int64_t width, int64_t b, int64_t h, int64_t i, int64_t first, int64_t count) const {
        const BiasRow row(bias, b, h, i);
        const vf cap = splat(softcap), inverse = splat(softcap == 0 ? 0 : 1 / softcap), none = splat(-infinity);
        for (int64_t j = 0; j < width; j += lanes) {
            vf x = load(s + j) * splat(rest);
            if (softcap != 0) x = cap * tanh_of(x * inverse);
            if (bias.added()) {
                const vf y = row.at(first + j, count - j);
                x = y == none ? none : x + y;
            }
            store(s + j, x);
        }
    }
};

// -inf where a bit is 0; `bits` holds `width` of them.
SACCADE_INLINE void hide(float* s, int64_t width, const uint64_t* bits) {
    for (int64_t j = 0; j < width; j += lanes)
        store(s + j, select((uint32_t)(bits[j / 64] >> (j % 64)), load(s + j), splat(-infinity)));
}

}  // namespace SACCADE_SET
}  // namespace saccade

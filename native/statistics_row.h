// What is known of a row of scores: how far its scores range, and its sums with what follows from them.
#pragma once

#include <algorithm>

#include "call.h"
#include "mask.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// The largest size of all entries seen, as the bits of a float: those of NaN and infinity are larger than any other.
struct Peak {
    vu bits = {};
    uint32_t one = 0;

    SACCADE_INLINE void see(vf x) { raise((vu)x & splat_u(0x7fffffff)); }
    SACCADE_INLINE void see(vu two) { raise(two & splat_u(0x7fff0000)), raise((two << 16) & splat_u(0x7fff0000)); }
    SACCADE_INLINE void see(float x) {
        uint32_t word;
        memcpy(&word, &x, 4);
        one = std::max(one, word & 0x7fffffff);
    }
    SACCADE_INLINE void see(uint32_t two) { one = std::max(one, std::max(two & 0x7fff0000, (two << 16) & 0x7fff0000)); }

    float value() const {
        uint32_t top = one;
        for (int n = 0; n < lanes; n++) top = std::max(top, (uint32_t)bits[n]);
        float x;
        memcpy(&x, &top, 4);
        return x;
    }

  private:
    SACCADE_INLINE void raise(vu x) { bits = x > bits ? x : bits; }
};

// --- the range of a row -------------------------------------------------------------------------------------------

struct Range {
    vf highest[2], low;  // NaN left out
    vu odds;             // something is NaN or +inf; asked where something may be hidden

    SACCADE_INLINE vf high() const { return maximum(highest[0], highest[1]); }
    bool odd() const {
        uint32_t any = 0;
        for (int n = 0; n < lanes; n++) any |= odds[n];
        return any != 0;
    }
};

// hidden: -inf stands where nothing is seen.
template <bool hidden> SACCADE_INLINE Range range_of(const float* s, Span seen) {
    const vf none = splat(-infinity), most = splat(infinity);
    Range range{{none, none}, most, vu{}};
    const auto take = [&](vf x, vf& highest) SACCADE_LAMBDA {
        highest = maximum(x, highest);
        if constexpr (hidden) {
            range.odds |= ~(vu)(x < most);
            x = x == none ? most : x;
        }
        range.low = range.low > x ? x : range.low;
    };
    int64_t j = seen.start;
    for (; j + 2 * lanes <= seen.stop; j += 2 * lanes) take(load(s + j), range.highest[0]), take(load(s + j + lanes), range.highest[1]);
    if (j < seen.stop) take(load(s + j), range.highest[0]);
    return range;
}

inline int64_t first_equal(const float* s, Span seen, float x) {
    int64_t j = seen.start;
    for (; j < seen.stop; j += lanes) {
        const vu same = (vu)(load(s + j) == splat(x));
        for (int n = 0; n < lanes; n++)
            if (same[n]) return j + n;
    }
    return j;
}

// --- sums ---------------------------------------------------------------------------------------------------------

// Of `rows` rows. Scores are in units of logits / natural; sums are relative to e^top.
template <int rows> struct RowSums {
    double total[rows], entropy[rows], distance[rows];         // S, E, sum e^(s - m) |own - j|
    float top[rows];                                           // m; +inf with such a score
    float lowest[rows], highest[rows];                         // of finite scores
    float least[rows];                                         // of those that are not NaN
    float own[rows], previous[rows], next[rows], first[rows];  // scores; -inf: not seen
    int64_t largest_at[rows], nonfinite[rows], nonfinite_at[rows];

    void clear() {
        for (double* x : {total, entropy, distance}) std::fill_n(x, rows, 0.0);
        for (float* x : {top, highest, own, previous, next, first}) std::fill_n(x, rows, -infinity);
        for (float* x : {lowest, least}) std::fill_n(x, rows, infinity);
        std::fill_n(nonfinite, rows, 0);
        for (int64_t* x : {largest_at, nonfinite_at}) std::fill_n(x, rows, -1);
    }

    // inverse: 1 / (S + the sink's share); 0 on rows that see nothing.
    void finish(float (&to)[Statistics::numbers_count][rows], float* inverse, float natural, const float* sink) const {
        typedef Statistics N;
        const vf zero = {}, one = splat(1.0f), none = splat(-infinity), unit = splat(natural), turn = splat(log2_e), factor = splat(natural * log2_e);
        float sums[rows], slopes[rows], distances[rows];
        for (int i = 0; i < rows; i++) {
            sums[i] = (float)total[i], slopes[i] = (float)(-entropy[i] / total[i] * natural), distances[i] = (float)(distance[i] / total[i]);
        }
        for (int i = 0; i < rows; i += lanes) {
            const vf sum = load(sums + i), peak = load(top + i), log = log2_of(sum) * splat(ln_2);
            const vu seen = ~(vu)(sum == zero);
            const auto put = [&](int n, vf x) SACCADE_LAMBDA { store(to[n] + i, seen ? x : zero); };
            vf lse = peak * unit + log, share = one, whole = log;  // share of the keys; log of the denominator / e^top
            if (sink) {
                const vf apart = splat(*sink) - lse, far = splat(80.0f);
                const vf near = exp2_of(apart > far ? far : apart, turn), odds = apart > far ? splat(infinity) : near;
                share = one / (one + odds);
                whole += log2_of(one + near) * splat(ln_2);
                put(N::sink, one / (one + one / odds));
            } else {
                put(N::sink, zero);
            }
            store(to[N::lse] + i, seen ? lse : none);
            const vf weight = share / sum, entropy = share * (whole + load(slopes + i));
            store(inverse + i, seen ? weight : zero);
            const auto weight_of = [&](const float* score) SACCADE_LAMBDA {
                const vf x = load(score + i);
                return x == none ? zero : exp2_of(x - peak, factor) * weight;
            };
            put(N::entropy, maximum(zero, entropy));
            put(N::largest, weight);
            put(N::smallest, weight_of(least));
            put(N::distance, share * load(distances + i));
            put(N::own, weight_of(own)), put(N::previous, weight_of(previous)), put(N::next, weight_of(next));
            put(N::first_key, weight_of(first));
            store(to[N::lowest] + i, load(lowest + i) * unit), store(to[N::highest] + i, load(highest + i) * unit);
        }
    }
};

}  // namespace SACCADE_SET
}  // namespace saccade

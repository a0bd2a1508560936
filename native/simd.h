// Vectors of the instruction set this file is compiled for, in the compilers' portable vector extension; intrinsics only
// where the extension has no word for an instruction. The only file that knows what processors there are.
//
// A *unit* is what one lane of a product takes in: one float, or two bf16 that are multiplied and added in one step.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if !defined(SACCADE_PORTABLE)  // as other architectures have it
#define SACCADE_NEON
#endif
#endif

// Products of two bf16 in one instruction: `dot`, and with it `Pairs` (gemm.h).
#if defined(__AVX512BF16__) || (defined(SACCADE_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define SACCADE_PAIRS
#endif

#define SACCADE_INLINE inline __attribute__((always_inline))
#define SACCADE_LAMBDA __attribute__((always_inline))

namespace saccade {

// 64 bytes to 64 bits: not 0 is 1. Masks are the same for all sets: every processor of the architecture has this.
inline uint64_t pack64(const uint8_t* bytes) {
    uint64_t word = 0;
#if defined(__SSE2__)
    for (int n = 0; n < 4; ++n) {
        const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * n));
        const unsigned absent = _mm_movemask_epi8(_mm_cmpeq_epi8(some, _mm_setzero_si128()));
        word |= static_cast<uint64_t>(~absent & 0xFFFFu) << (16 * n);
    }
#elif defined(__aarch64__)
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const auto some = [=](int n) { return vandq_u8(vtstq_u8(vld1q_u8(bytes + 16 * n), vld1q_u8(bytes + 16 * n)), bit); };
    const uint8x16_t eighths = vpaddq_u8(vpaddq_u8(some(0), some(1)), vpaddq_u8(some(2), some(3)));
    word = vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(eighths, eighths)), 0);
#else
    for (int n = 0; n < 64; ++n) word |= static_cast<uint64_t>(bytes[n] != 0) << n;
#endif
    return word;
}

namespace SACCADE_SET {

#if defined(__AVX512F__)
constexpr int lanes = 16, registers = 32;
#elif defined(__AVX2__)
constexpr int lanes = 8, registers = 16;
#elif defined(SACCADE_NEON)
constexpr int lanes = 4, registers = 32;
#else
constexpr int lanes = 4, registers = 16;
#endif

typedef float vf __attribute__((vector_size(4 * lanes)));
typedef int32_t vi __attribute__((vector_size(4 * lanes)));
typedef uint32_t vu __attribute__((vector_size(4 * lanes)));
typedef int16_t vs __attribute__((vector_size(4 * lanes)));
typedef uint16_t vh __attribute__((vector_size(2 * lanes)));
typedef uint32_t word_loose __attribute__((aligned(1), may_alias));
typedef vf vf_loose __attribute__((aligned(4), may_alias));
typedef vu vu_loose __attribute__((aligned(2), may_alias));  // two bf16 may begin at any of them
typedef vh vh_loose __attribute__((aligned(2), may_alias));

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float log2_e = 1.44269504088896340736f, ln_2 = 0.69314718055994530942f;

SACCADE_INLINE vf splat(float x) { return x - vf{}; }
SACCADE_INLINE vu splat_u(uint32_t x) { return x - vu{}; }
SACCADE_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_loose*>(p); }
SACCADE_INLINE vu load(const uint32_t* p) { return *reinterpret_cast<const vu_loose*>(p); }
SACCADE_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_loose*>(p) = x; }
SACCADE_INLINE void store(uint32_t* p, vu x) { *reinterpret_cast<vu_loose*>(p) = x; }

// Either argument may be NaN: the second one comes back then, as x86's own maximum does.
SACCADE_INLINE vf maximum(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}

SACCADE_INLINE vf root_of(vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)x);
#elif defined(SACCADE_NEON)
    return (vf)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < lanes; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

// from[at] in each lane.
SACCADE_INLINE vf gather(const float* from, vi at) {
#if defined(__AVX512F__)
    return (vf)_mm512_i32gather_ps((__m512i)at, from, 4);
#elif defined(__AVX2__)
    return (vf)_mm256_i32gather_ps(from, (__m256i)at, 4);
#else
    vf x;
    for (int i = 0; i < lanes; i++) x[i] = from[at[i]];
    return x;
#endif
}

// The greatest lane that is not NaN.
SACCADE_INLINE float greatest(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(SACCADE_NEON)
    return vmaxnmvq_f32((float32x4_t)x);
#else
    float top = x[0];
    for (int i = 1; i < lanes; i++) top = x[i] > top ? x[i] : top;
    return top;
#endif
}

SACCADE_INLINE float total(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(SACCADE_NEON)
    const float32x2_t half = vadd_f32(vget_low_f32((float32x4_t)x), vget_high_f32((float32x4_t)x));
    return vget_lane_f32(vpadd_f32(half, half), 0);
#else
    for (int half = lanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
#endif
}

// `bits & (1 << lane)` ? a : b in each lane.
SACCADE_INLINE vf select(uint32_t bits, vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_mask_mov_ps((__m512)b, (__mmask16)bits, (__m512)a);
#else
    vu lane;
    for (int i = 0; i < lanes; i++) lane[i] = 1u << i;
    return (splat_u(bits) & lane) != 0 ? a : b;
#endif
}

// Lanes where x > bar as bits; never those of a NaN.
SACCADE_INLINE uint32_t above(vf x, float bar) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bar), _CMP_GT_OQ);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(bar), _CMP_GT_OQ));
#elif defined(SACCADE_NEON)
    const vu lane = {1, 2, 4, 8};
    return vaddvq_u32((uint32x4_t)((vu)(x > splat(bar)) & lane));
#else
    uint32_t bits = 0;
    for (int n = 0; n < lanes; n++) bits |= (uint32_t)(x[n] > bar) << n;
    return bits;
#endif
}

// The lanes of `from` whose bits are set, and their keys, `key` being the first lane's, one behind the other. Whole vectors
// may be written.
SACCADE_INLINE void compress(uint32_t bits, const float* from, int32_t key, float* to, int32_t* keys) {
#if defined(__AVX512F__)
    const __m512i counting = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    _mm512_mask_compressstoreu_ps(to, (__mmask16)bits, (__m512)load(from));
    _mm512_mask_compressstoreu_epi32(keys, (__mmask16)bits, _mm512_add_epi32(_mm512_set1_epi32(key), counting));
#else
    for (int64_t n = 0; bits; bits &= bits - 1, n++) to[n] = from[__builtin_ctz(bits)], keys[n] = key + __builtin_ctz(bits);
#endif
}

// A value that the compiler must take to be needed and changed here.
template <class V> SACCADE_INLINE void keep(V& x) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(x));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(x));
#else
    asm volatile("" : "+m"(x));
#endif
}

// What a thread does that looks at memory again and again.
SACCADE_INLINE void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` is nothing on most processors; this waits until the pipeline is empty
#endif
}

// --- 2^x ----------------------------------------------------------------------------------------------------------
// 2^x = 2^n 2^f with n = round(x), |f| <= 1/2. The polynomials are minimax in relative error on [-1/2, 1/2].
// Exactly 0 below -127 (below -126 on AVX-512), so that a masked weight is 0.
// Greatest error of degree 5: 2.1 units in the last place, without FMA 2.3 (tests/native/test_exponential.py).

template <int degree> SACCADE_INLINE vf polynomial(vf f) {
    if constexpr (degree == 4) {
        // Greatest relative error 2.8e-6: far below half a unit of bf16, into which the weights are rounded.
        vf p = splat(0.00958285316891f) * f + splat(0.0559064250365f);
        p = p * f + splat(0.240240986113f);
        p = p * f + splat(0.693124193368f);
        return p * f + splat(1.0f);
    } else {
        static_assert(degree == 5);  // greatest relative error 9.1e-8, 2^0 exact
        vf p = splat(0.0013264727247f) * f + splat(0.00967151268815f);
        p = p * f + splat(0.0555073374357f);
        p = p * f + splat(0.240222420846f);
        p = p * f + splat(0.693146977599f);
        return p * f + splat(1.0f);
    }
}

// a * b + c, rounded once where there is an instruction for it.
SACCADE_INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(SACCADE_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// 2^(x factor). The product is not rounded before its integer part is gone: with x = -10 that would cost the weight ten
// times the error of all the rest.
template <int degree = 5> SACCADE_INLINE vf exp2_of(vf x, vf factor) {
#if defined(__AVX512F__)
    const vf y = x * factor;
    // What would be denormal is 0, and masked weights never get that far: a denormal result costs scalef 150 cycles.
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // true for NaN
    const vf n = (vf)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vf)_mm512_maskz_scalef_ps(some, (__m512)polynomial<degree>(fused(x, factor, -n)), (__m512)n);
#else
    const vf bound = splat(-127.0f) / factor, top = splat(128.0f) / factor;  // loops have them once
#if defined(SACCADE_NEON)
    x = (vf)vminq_f32(vmaxq_f32((float32x4_t)x, (float32x4_t)bound), (float32x4_t)top);  // a NaN stays
#else
    x = maximum(bound, x);  // in this order a NaN stays
    x = x > top ? top : x;  // 2^128 is inf
#endif
    const vf magic = splat(12582912.0f), shifted = fused(x, factor, magic);  // 1.5 * 2^23: adding it rounds
    const vu power = ((vu)shifted - (vu)magic + splat_u(127)) << 23;
    return polynomial<degree>(fused(x, factor, magic - shifted)) * (vf)power;
#endif
}

template <int degree = 5> SACCADE_INLINE vf exp2_of(vf x) { return exp2_of<degree>(x, splat(1.0f)); }
SACCADE_INLINE float exp2_of(float x) { return exp2_of<5>(splat(x))[0]; }

// log2 of positive normal numbers: the exponent, and 2 / ln 2 * atanh((m - 1) / (m + 1)) of what is left. inf and NaN stay.
SACCADE_INLINE vf log2_of(vf x) {
    const vu bits = (vu)x;
    const vu shifted = bits - splat_u(0x3f3504f3);  // sqrt(1/2): the mantissa falls into [sqrt(1/2), sqrt(2))
    const vi exponent = (vi)shifted >> 23;
    const vf mantissa = (vf)((shifted & splat_u(0x007fffff)) + splat_u(0x3f3504f3));
    const vf s = (mantissa - splat(1.0f)) / (mantissa + splat(1.0f)), square = s * s;
    vf p = splat(0.320598897f) * square + splat(0.412198583f);
    p = p * square + splat(0.577078016f);
    p = p * square + splat(0.961796694f);
    p = p * square + splat(2.88539008f);
    const vf value = p * s + __builtin_convertvector(exponent, vf);
    return x < splat(infinity) ? value : x;
}

// --- transposing lanes x lanes blocks of 32-bit units -------------------------------------------------------------

// Entries first, first + 1, ... of a and b in turn.
template <int first, class V, int... i> SACCADE_INLINE V interleave(V a, V b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i & 1) * lanes + i / 2 + first...);
}

// Each step interleaves rows i and i + lanes/2; after log2(lanes) steps the block is transposed.
template <class V> SACCADE_INLINE void transpose(V (&row)[lanes]) {
    V other[lanes];
    constexpr std::make_integer_sequence<int, lanes> all{};
    V *from = row, *to = other;
#pragma GCC unroll 4
    for (int size = 1; size < lanes; size *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < lanes / 2; i++) {
            to[2 * i] = interleave<0>(from[i], from[i + lanes / 2], all);
            to[2 * i + 1] = interleave<lanes / 2>(from[i], from[i + lanes / 2], all);
        }
        V* swap = from;
        from = to;
        to = swap;
    }
    if (from != row)
        for (int i = 0; i < lanes; i++) row[i] = other[i];
}

// --- element types ------------------------------------------------------------------------------------------------

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

SACCADE_INLINE float to_float(float x) { return x; }
SACCADE_INLINE float to_float(bf16 x) {
    uint32_t word = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}
SACCADE_INLINE float to_float(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif defined(SACCADE_NEON)
    __fp16 half;
    memcpy(&half, &x, 2);
    return half;
#else
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff, word;
    if (rest >= 0x7c00) {
        word = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x0400) {
        word = sign | ((rest << 13) + 0x38000000);
    } else {
        float tiny = (float)rest * 5.9604644775390625e-8f;  // 2^-24
        memcpy(&word, &tiny, 4);
        word |= sign;
    }
    float value;
    memcpy(&value, &word, 4);
    return value;
#endif
}

SACCADE_INLINE void from_float(float& to, float x) { to = x; }
SACCADE_INLINE void from_float(bf16& to, float x) {  // round to nearest even; a NaN stays one
    uint32_t word;
    memcpy(&word, &x, 4);
    to.bits = x != x ? 0x7fc0 : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}
SACCADE_INLINE void from_float(f16& to, float x) {
#if defined(__F16C__)
    to.bits = (uint16_t)_cvtss_sh(x, 0);
#elif defined(SACCADE_NEON)
    const __fp16 half = (__fp16)x;
    memcpy(&to, &half, 2);
#else
    uint32_t word;
    memcpy(&word, &x, 4);
    uint32_t sign = (word >> 16) & 0x8000, rest = word & 0x7fffffff;
    if (rest > 0x7f800000) {
        to.bits = (uint16_t)(sign | 0x7e00);
    } else if (rest >= 0x477ff000) {
        to.bits = (uint16_t)(sign | 0x7c00);  // from 65520 on
    } else if (rest >= 0x38800000) {
        uint32_t rounded = rest + 0xfff + ((rest >> 13) & 1);
        to.bits = (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
    } else {
        float magnitude, shifted;
        memcpy(&magnitude, &rest, 4);
        shifted = magnitude + 0.5f;  // rounds to a multiple of 2^-24, to nearest even
        uint32_t bits;
        memcpy(&bits, &shifted, 4);
        to.bits = (uint16_t)(sign | (bits - 0x3f000000));
    }
#endif
}

// `lanes` entries as float.
SACCADE_INLINE vf load_as_float(const float* p) { return load(p); }
SACCADE_INLINE vf load_as_float(const bf16* p) {
    return (vf)(__builtin_convertvector(*reinterpret_cast<const vh_loose*>(p), vu) << 16);
}
SACCADE_INLINE vf load_as_float(const f16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(SACCADE_NEON)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
    vf x;
    for (int i = 0; i < lanes; i++) x[i] = to_float(p[i]);
    return x;
#endif
}

SACCADE_INLINE vi load_whole(const int8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef int8_t vb __attribute__((vector_size(lanes)));
    vb some;
    memcpy(&some, p, lanes);
    return __builtin_convertvector(some, vi);
#endif
}
SACCADE_INLINE vf load_as_float(const int8_t* p) { return __builtin_convertvector(load_whole(p), vf); }

// The first `count` entries as float, 0 in the other lanes; nothing beyond them is read.
template <class T> SACCADE_INLINE vf load_as_float(const T* p, int64_t count) {
    if (count >= lanes) return load_as_float(p);
    T some[lanes] = {};
    memcpy(some, p, (count < 0 ? 0 : count) * sizeof(T));
    return load_as_float(some);
}

SACCADE_INLINE void store_from_float(float* p, vf x) { store(p, x); }
SACCADE_INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#elif defined(SACCADE_NEON) && defined(SACCADE_PAIRS)
    return (vh)vcvt_bf16_f32((float32x4_t)x);
#else
    const vu word = (vu)x;
    const vu rounded = (word + splat_u(0x7fff) + ((word >> 16) & splat_u(1))) >> 16;
    return __builtin_convertvector(x == x ? rounded : splat_u(0x7fc0), vh);
#endif
}
SACCADE_INLINE void store_from_float(bf16* p, vf x) { *reinterpret_cast<vh_loose*>(p) = narrow(x); }
SACCADE_INLINE void store_from_float(f16* p, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, 0));
#elif defined(SACCADE_NEON)
    vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    for (int i = 0; i < lanes; i++) from_float(p[i], x[i]);
#endif
}
template <class T> SACCADE_INLINE void store_from_float(T* p, vf x, int64_t count) {
    if (count >= lanes) return store_from_float(p, x);
    T some[lanes];
    store_from_float(some, x);
    memcpy(p, some, (count < 0 ? 0 : count) * sizeof(T));
}

// --- products of whole numbers -------------------------------------------------------------------------------------

// The sum of two products of 16 bits in each lane.
SACCADE_INLINE vi pair_sums(vs a, vs b) {
#if defined(__AVX512F__)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const vi x = (vi)a, y = (vi)b;
    return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

#if defined(__AVX512F__)
// sum + four products of a byte of a, unsigned, and one of b, signed: AVX512_VNNI, which not every processor of a set has, so
// the compiler may not be told of it.
SACCADE_INLINE vi quad_sums(vi sum, vi a, vi b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#endif

// --- products of two bf16 ------------------------------------------------------------------------------------------

#if defined(SACCADE_PAIRS)
// c + a.low * b.low + a.high * b.high in each lane, `a` the same in all. Inputs and results below the smallest normal
// number count as 0. x86 adds one product and then the other, rounded to nearest each time; ARM adds the sum of both
// products, and rounds that and the result to odd: an error below one unit in the last place, not half a unit.
#if defined(__AVX512BF16__)
typedef vu spread_pair;
SACCADE_INLINE spread_pair splat_pair(uint32_t two) { return (vu)_mm512_set1_epi32((int)two); }
SACCADE_INLINE vf dot(spread_pair a, vu b, vf c) { return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
SACCADE_INLINE vf dot_lanes(vu a, vu b, vf c) { return dot(a, b, c); }
#else
// The instruction takes `a` from one lane of a register.
typedef bfloat16x4_t spread_pair;
SACCADE_INLINE spread_pair splat_pair(uint32_t two) { return vreinterpret_bf16_u32(vset_lane_u32(two, vdup_n_u32(0), 0)); }
SACCADE_INLINE vf dot(spread_pair a, vu b, vf c) { return (vf)vbfdotq_lane_f32((float32x4_t)c, (bfloat16x8_t)b, a, 0); }
SACCADE_INLINE vf dot_lanes(vu a, vu b, vf c) { return (vf)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b); }
#endif

// Entries of low and then of high as bf16, in order.
SACCADE_INLINE vu narrow(vf low, vf high) {
#if defined(__AVX512BF16__)
    return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    return (vu)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
#endif
}

typedef uint16_t vp __attribute__((vector_size(4 * lanes)));
template <int... i> SACCADE_INLINE vu halves_in_turn(vu x, std::integer_sequence<int, i...>) {
    return (vu)__builtin_shufflevector((vp)x, (vp)x, i / 2 + i % 2 * lanes...);
}
// Entries of one and of next in turn: of each 128 bits four, the first of them in x[0], the others in x[1].
template <int... i> SACCADE_INLINE void in_turn(vu one, vu next, vu (&x)[2], std::integer_sequence<int, i...>) {
    x[0] = (vu)__builtin_shufflevector((vp)one, (vp)next, i / 8 * 8 + i % 8 / 2 + i % 2 * 2 * lanes...);
    x[1] = (vu)__builtin_shufflevector((vp)one, (vp)next, i / 8 * 8 + i % 8 / 2 + 4 + i % 2 * 2 * lanes...);
}
SACCADE_INLINE void in_turn(vu one, vu next, vu (&x)[2]) { in_turn(one, next, x, std::make_integer_sequence<int, 2 * lanes>()); }

// Entries of the lower and the upper half in turn.
SACCADE_INLINE vu halves_in_turn(vu x) { return halves_in_turn(x, std::make_integer_sequence<int, 2 * lanes>()); }

template <int... i> SACCADE_INLINE void store_halves(uint32_t* low, uint32_t* high, vu x, std::integer_sequence<int, i...>) {
    *reinterpret_cast<vh_loose*>(low) = (vh)__builtin_shufflevector(x, x, i...);
    *reinterpret_cast<vh_loose*>(high) = (vh)__builtin_shufflevector(x, x, i + lanes / 2 ...);
}
SACCADE_INLINE void store_halves(uint32_t* low, uint32_t* high, vu x) {
    store_halves(low, high, x, std::make_integer_sequence<int, lanes / 2>());
}
#endif

}  // namespace SACCADE_SET
}  // namespace saccade

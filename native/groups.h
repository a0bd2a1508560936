// Products with weights of few bits in groups, out = x W^T + b. A weight is scale * q - minimum with q from 0 to 15 or 255, and
// of each group of 32 terms (or 16) a scale and a minimum: `offset` scales, or numbers of their own. Rows of x become signed
// bytes as they come, with a scale for each group. Products of a group are summed in int32, exactly, then scaled and added to
// the sum of the groups in float. So a row's result depends on no other row.
//
// W is packed in panels of 64 features, bytes [F / 64][E / 4][64][4], or two q in a byte, [F / 64][E / 8][64][4], E up to a
// multiple of 32: the low half of a byte belongs to one of the first four of 8 terms, the high half to one of the last four.
//
// Shape legend: R rows, E width, F features, G groups of E.
#pragma once

#include <type_traits>

#include "int8.h"

namespace saccade {
namespace SACCADE_SET {

// As `Halves` and `Quads` of int8.h, with weights from 0 and signed x. A line is four bytes, or the low halves of four.
template <int B> struct GroupHalves : Halves {
    static constexpr int bits = B;
    static SACCADE_INLINE void line(vu w, Line& to) {
        constexpr uint32_t all = (1u << B) - 1;
        to[0] = (vs)(w & splat_u(all << 16 | all)), to[1] = (vs)(w >> 8 & splat_u(all << 16 | all));
    }
    static void widen(const int8_t* from, int64_t count, uint8_t* to) {
        int16_t* wide = reinterpret_cast<int16_t*>(to);
        for (int64_t k = 0; k < count; k += 4)
            wide[k] = from[k], wide[k + 1] = from[k + 2], wide[k + 2] = from[k + 1], wide[k + 3] = from[k + 3];
    }
};

#if defined(__AVX512F__)
template <int B> struct GroupQuads : Quads {
    static constexpr int bits = B;
    static SACCADE_INLINE void line(vu w, Line& to) { to[0] = (vi)(B == 8 ? w : w & splat_u(0x0f0f0f0f)); }
    static SACCADE_INLINE vi add(vi sum, const Spread& x, const Line& w) { return quad_sums(sum, w[0], x[0]); }
};
#endif

// One group of a row as bytes q: x = scale q; `offset` is that of the weights times minus the sum of q, `total` the sum of x.
struct SignedGroup {
    float scale;
    int32_t offset;
    float total;
};

// Whether all numbers of the row are finite. Beyond its width the bytes are 0.
template <int K, class T> bool row_as_signed_bytes(const T* x, int64_t width, uint32_t offset, int8_t* to, SignedGroup* groups) {
    typedef int8_t vb __attribute__((vector_size(lanes)));
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    vf nothing = {};
    for (int64_t first = 0; first < width; first += K) {
        vf part[K / lanes], high = {};
        vu sum = {};
        for (int n = 0; n < K / lanes; n++) {
            part[n] = load_as_float(x + first + n * lanes, width - first - n * lanes);
            nothing += part[n] - part[n];  // NaN for infinities, too
            high = maximum(maximum(part[n], -part[n]), high);
        }
        const float scale = std::max(greatest(high) / 127, FLT_MIN), inverse = 1 / scale;
        for (int n = 0; n < K / lanes; n++) {
            const vi q = (vi)fused(part[n], splat(inverse), splat(magic)) - (vi)splat(magic);
            const vb some = __builtin_convertvector(q, vb);
            memcpy(to + first + n * lanes, &some, lanes);
            sum += (vu)q;
        }
        uint32_t all = 0;
        for (int i = 0; i < lanes; i++) all += sum[i];
        groups[first / K] = {scale, int32_t(0u - offset * all), scale * int32_t(all)};
    }
    return total(nothing) == 0;
}

// Scales of the vectors of features from `feature` of a panel on, and their minima, as they are held. Of `1 << shift` groups
// there is a number, times one of the group where there are steps; minima are alike, or multiples of the scales' numbers.
struct HeldScales {
    const uint16_t *units, *minima;
    const int8_t *steps, *zeros;
    int shift;
    bool half;

    HeldScales(const GroupForm& form, int64_t groups, const uint16_t* panel, int64_t feature) : shift(form.shift), half(form.half) {
        const int64_t numbers = form.units(groups) * kInt8Panel, pairs = (groups + 1) / 2 * kInt8Panel;
        const uint16_t* const whole = panel + numbers * (1 + form.minima);
        units = panel + feature, minima = form.minima ? units + numbers : units;
        steps = form.steps ? reinterpret_cast<const int8_t*>(whole) + feature : nullptr;
        zeros = form.zeros ? reinterpret_cast<const int8_t*>(whole + form.steps * pairs) + feature : nullptr;
    }
    SACCADE_INLINE vf number(const uint16_t* of, const int8_t* times, int64_t at) const {
        of += (at / kInt8Panel >> shift) * kInt8Panel + at % kInt8Panel;
        const vf x = half ? load_as_float(reinterpret_cast<const f16*>(of)) : load_as_float(reinterpret_cast<const bf16*>(of));
        return times ? x * load_as_float(times + at) : x;
    }
};

// A part of a panel, and the scales of its groups: as they are held for one row and where they are plain bf16, otherwise as
// floats, those of a group's features and then their minima.
template <class S> struct GroupPanel {
    const uint8_t* bytes;
    S scales;
    int64_t feature;
};
template <int, bool> SACCADE_INLINE vf scale_of(const bf16* scales, int64_t g, int n) { return load_as_float(scales + g * kInt8Panel + n * lanes); }
template <int M, bool Minima> SACCADE_INLINE vf scale_of(const float* scales, int64_t g, int n) { return load(scales + (g * (1 + Minima) * M + n) * lanes); }
template <int M, bool> SACCADE_INLINE vf scale_of(const HeldScales& scales, int64_t g, int n) {
    if (n < M) return scales.number(scales.units, scales.steps, g * kInt8Panel + n * lanes);
    return scales.number(scales.minima, scales.zeros, g * kInt8Panel + (n - M) * lanes);
}

// What the tasks of one call share.
struct GroupRows {
    const GroupProduct& call;
    const uint8_t* bytes;
    const SignedGroup* groups;  // (R, G)
    int64_t stride;             // of `bytes`
    int64_t first;              // row of the call that `bytes` begins with
};

// R rows from `row` on with M vectors of a panel, from `feature` on.
template <class D, int K, bool Minima, int R, int M, class S>
void group_tile(const GroupRows& all, int64_t row, const GroupPanel<S>& panel, bool ahead) {
    const GroupProduct& call = all.call;
    const int64_t groups = (call.width + K - 1) / K;
    const uint8_t* const x = all.bytes + row * all.stride;
    vf out[R][M] = {};
    for (int64_t g = 0; g < groups; g++) {
        vi sum[R][M];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) sum[r][n] = (vi)splat_u(all.groups[(row + r) * groups + g].offset);
        for (int64_t k = g * K; k < (g + 1) * K; k += 8) {
            const uint8_t* const w = panel.bytes + k * D::bits / 8 * kInt8Panel;
            if (ahead)
                for (int n = 0; n < D::bits; n++) __builtin_prefetch(w + 4096 + 64 * n, 0, 2);
#pragma GCC unroll 2
            for (int high = 0; high < 2; high++) {
                typename D::Line line[M];
#pragma GCC unroll 4
                for (int n = 0; n < M; n++) {
                    const uint8_t* const at = w + 4 * lanes * n + (D::bits == 8) * high * 4 * kInt8Panel;
                    D::line(load(reinterpret_cast<const uint32_t*>(at)) >> (D::bits == 4) * 4 * high, line[n]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    typename D::Spread four;
                    D::spread(x + r * all.stride + (k + 4 * high) * D::bytes, four);
#pragma GCC unroll 4
                    for (int n = 0; n < M; n++) sum[r][n] = D::add(sum[r][n], four, line[n]);
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) {
            const vf scale = scale_of<M, Minima>(panel.scales, g, n);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vf both = splat(all.groups[(row + r) * groups + g].scale) * scale;
                out[r][n] = fused(__builtin_convertvector(sum[r][n], vf), both, out[r][n]);
            }
        }
        if constexpr (Minima)
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) {
                const vf minimum = scale_of<M, Minima>(panel.scales, g, M + n);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) out[r][n] = fused(splat(-all.groups[(row + r) * groups + g].total), minimum, out[r][n]);
            }
    }
    const auto finish = [&](auto* to) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++, to += call.features)
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) {
                const int64_t f = panel.feature + n * lanes, left = call.features - f;
                if (left <= 0) break;
                store_from_float(to + f, call.bias ? out[r][n] + load_as_float(call.bias + f, left) : out[r][n], left);
            }
    };
    const int64_t from = (all.first + row) * call.features;
    if (call.half) finish(static_cast<bf16*>(call.out) + from);
    else finish(static_cast<float*>(call.out) + from);
}

template <class D, int K, bool Minima, class S>
SACCADE_INLINE void group_tiles(const GroupRows& all, int64_t row, int64_t rows, const GroupPanel<S>& panel) {
    constexpr int M = D::vectors;
    bool ahead = rows <= 8;
    for (const int64_t stop = row + rows; row < stop; ahead = false) {
        const int64_t left = stop - row, size = left <= D::rows ? left : left < 2 * D::rows ? (left + 1) / 2 : D::rows;
        switch (size) {
            case 1: group_tile<D, K, Minima, 1, M>(all, row, panel, ahead); break;
            case 2: group_tile<D, K, Minima, 2, M>(all, row, panel, ahead); break;
            case 3: group_tile<D, K, Minima, 3, M>(all, row, panel, ahead); break;
            case 4: if constexpr (D::rows >= 4) group_tile<D, K, Minima, 4, M>(all, row, panel, ahead); break;
            case 5: if constexpr (D::rows >= 5) group_tile<D, K, Minima, 5, M>(all, row, panel, ahead); break;
            case 6: if constexpr (D::rows >= 6) group_tile<D, K, Minima, 6, M>(all, row, panel, ahead); break;
        }
        row += size;
    }
}

// Quantise up to 16 MiB of rows, then multiply them, by the same tasks as in int8.h.
template <class D, int K, bool Minima, class S, class T> int64_t group_rows(const GroupProduct& call) {
    static_assert(D::rows <= 6 && kInt8Panel / lanes % D::vectors == 0 && K % lanes == 0 && K % 8 == 0);
    const int64_t groups_of = (call.width + K - 1) / K, padded = (call.width + 31) / 32 * 32;
    const int64_t scale_stride = call.form.rows(groups_of) * kInt8Panel;
    const int64_t stride = (padded + 63) / 64 * 64 * D::bytes + 64;  // not a multiple of a page
    const int64_t panels = (call.features + kInt8Panel - 1) / kInt8Panel;
    const int64_t most = std::min(call.rows, std::max<int64_t>((1 << 24) / stride, 1));
    const Workspace memory(most * (stride + groups_of * (int64_t)sizeof(SignedGroup)));
    uint8_t* const bytes = static_cast<uint8_t*>(memory.data());
    SignedGroup* const of_rows = reinterpret_cast<SignedGroup*>(bytes + most * stride);
    std::atomic<int64_t> odd{0};
    for (int64_t first = 0; first < call.rows; first += most) {
        const int64_t count = std::min(most, call.rows - first);
        const int64_t at_once = std::max<int64_t>((1 << 14) / call.width, 1);
        parallel(call.threads, (count + at_once - 1) / at_once, [&](int64_t task, int) {
            for (int64_t r = task * at_once; r < std::min(count, (task + 1) * at_once); r++) {
                const T* const x = static_cast<const T*>(call.x) + (first + r) * call.width;
                int8_t* to = reinterpret_cast<int8_t*>(bytes + r * stride);
                if constexpr (D::bytes == 2) to = static_cast<int8_t*>(scratch(0, stride));
                if (!row_as_signed_bytes<K>(x, call.width, call.form.offset, to, of_rows + r * groups_of)) {
                    odd++;
                    memset(to, 0, padded);
                    std::fill_n(of_rows + r * groups_of, groups_of, SignedGroup{std::numeric_limits<float>::quiet_NaN(), 0, 0});
                }
                if constexpr (D::bytes == 2) D::widen(to, padded, bytes + r * stride);
            }
        });
        const GroupRows all{call, bytes, of_rows, stride, first};
        const int64_t fitting = std::max<int64_t>((1 << 18) / stride, D::rows);
        const int64_t blocks = (count + fitting - 1) / fitting;
        const int64_t block = ((count + blocks - 1) / blocks + D::rows - 1) / D::rows * D::rows;
        const int64_t tasks = std::min(panels, std::max<int64_t>((8 * call.threads + blocks - 1) / blocks, 1));
        parallel(call.threads, blocks * tasks, [&](int64_t task, int) {
            const int64_t row = task / tasks * block, size = std::min(block, count - row), group = task % tasks;
            if (size <= 0) return;
            for (int64_t p = group * panels / tasks; p < (group + 1) * panels / tasks; p++)
                for (int n = 0; n < kInt8Panel / lanes; n += D::vectors) {
                    const uint8_t* const part = call.weight + p * padded * D::bits / 8 * kInt8Panel + 4 * lanes * n;
                    const uint16_t* scales = call.scales + p * scale_stride;
                    const int64_t feature = p * kInt8Panel + n * lanes;
                    if constexpr (std::is_same_v<S, bf16>) {
                        const bf16* const plain = reinterpret_cast<const bf16*>(scales) + n * lanes;
                        group_tiles<D, K, false>(all, row, size, GroupPanel<const bf16*>{part, plain, feature});
                        continue;
                    }
                    constexpr int M = D::vectors, each = (1 + Minima) * M;
                    const HeldScales held(call.form, groups_of, scales, n * lanes);
                    if (size == 1) {
                        group_tile<D, K, Minima, 1, M>(all, row, GroupPanel<HeldScales>{part, held, feature}, true);
                        continue;
                    }
                    float* const wide = static_cast<float*>(scratch(0, groups_of * each * lanes * (int64_t)sizeof(float)));
                    for (int64_t g = 0; g < groups_of; g++)
                        for (int i = 0; i < each; i++) store(wide + (g * each + i) * lanes, scale_of<M, Minima>(held, g, i));
                    group_tiles<D, K, Minima>(all, row, size, GroupPanel<const float*>{part, wide, feature});
                }
        });
    }
    return odd;
}

template <class D, int K, bool Minima, class S = float> int64_t groups_in(const GroupProduct& call) {
    return call.half ? group_rows<D, K, Minima, S, bf16>(call) : group_rows<D, K, Minima, S, float>(call);
}
template <template <int> class D> int64_t groups_by(const GroupProduct& call) {
    const GroupForm& form = call.form;
    const bool minima = form.minima || form.zeros;
    if (form.bits == 4) {
        if (!minima && !form.half && !form.steps && !form.shift) return groups_in<D<4>, 32, false, bf16>(call);
        return minima ? groups_in<D<4>, 32, true>(call) : groups_in<D<4>, 32, false>(call);
    }
    if (form.group == 16) return minima ? groups_in<D<8>, 16, true>(call) : groups_in<D<8>, 16, false>(call);
    return minima ? groups_in<D<8>, 32, true>(call) : groups_in<D<8>, 32, false>(call);
}

inline int64_t group_product(const GroupProduct& call) { return groups_by<GroupHalves>(call); }
#if defined(__AVX512F__)
inline int64_t group_product_quads(const GroupProduct& call) { return groups_by<GroupQuads>(call); }
#endif

}  // namespace SACCADE_SET
}  // namespace saccade

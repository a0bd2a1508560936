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

#include "int8.h"

namespace saccade {
namespace SACCADE_SET {

constexpr int kPart = 32;  // terms of a group of "int4"
constexpr int64_t kGroupRowsAtOnce = 160;  // of a task: a panel becomes bytes for each of them

// As `Halves` and `Quads` of int8_panels.h, with weights from 0 and signed x.
struct GroupHalves : Halves {
    static SACCADE_INLINE void line(vu w, Line& to) { to[0] = (vs)(w & splat_u(0x00ff00ff)), to[1] = (vs)(w >> 8 & splat_u(0x00ff00ff)); }
    static void widen(const int8_t* from, int64_t count, uint8_t* to) {
        int16_t* wide = reinterpret_cast<int16_t*>(to);
        for (int64_t k = 0; k < count; k += 4)
            wide[k] = from[k], wide[k + 1] = from[k + 2], wide[k + 2] = from[k + 1], wide[k + 3] = from[k + 3];
    }
};

#if defined(__AVX512F__)
struct GroupQuads : Quads {
    static SACCADE_INLINE void line(vu w, Line& to) { to[0] = (vi)w; }
    static SACCADE_INLINE vi add(vi sum, const Spread& x, const Line& w) { return quad_sums(sum, w[0], x[0]); }
};
#endif

// One group of a row as bytes q: x = scale q; `offset` is that of the weights times minus the sum of q, `total` the sum of x.
template <int K> struct SignedGroup {
    float scale;
    int32_t offset;
    float total;
    int32_t parts[std::max(K / kPart, 1)];  // sums of q
};
template <int K> struct SignedBlock {
    SignedGroup<K> groups[kInt8Block / K];
};
template <int K> using SignedRows = RowBlocks<SignedBlock<K>>;

// Whether all numbers of the row are finite. Beyond its width the bytes of its last group are 0.
template <class D, int K, class T> bool row_as_signed_bytes(const T* x, int64_t width, uint32_t offset, const SignedRows<K>& rows, int64_t row) {
    typedef int8_t vb __attribute__((vector_size(lanes)));
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    constexpr int vectors = K / lanes, parts = std::max(K / kPart, 1);
    vf nothing = {};
    for (int64_t k = 0; k < width; k += K) {
        const int64_t place = rows.place(k / kInt8Block, row), within = k % kInt8Block;
        vf some[vectors], high = {};
        for (int n = 0; n < vectors; n++) {
            some[n] = load_as_float(x + k + n * lanes, width - k - n * lanes);
            nothing += some[n] - some[n];  // NaN for infinities, too
            high = maximum(maximum(some[n], -some[n]), high);
        }
        const float scale = std::max(greatest(high) / 127, FLT_MIN), inverse = 1 / scale;
        SignedGroup<K>& group = rows.blocks[place].groups[within / K];
        uint8_t* const to = rows.bytes + (place * kInt8Block + within) * D::bytes;
        int8_t signs[K];
        uint32_t all = 0;
        for (int part = 0; part < parts; part++) {
            vu sum = {};
            for (int n = part * vectors / parts; n < (part + 1) * vectors / parts; n++) {
                const vi q = (vi)fused(some[n], splat(inverse), splat(magic)) - (vi)splat(magic);
                const vb bytes = __builtin_convertvector(q, vb);
                memcpy(signs + n * lanes, &bytes, lanes);
                sum += (vu)q;
            }
            const uint32_t before = all;
            for (int i = 0; i < lanes; i++) all += sum[i];
            group.parts[part] = int32_t(all - before);
        }
        if constexpr (D::bytes == 2) D::widen(signs, K, to);
        else memcpy(to, signs, K);
        group.scale = scale, group.offset = int32_t(0u - offset * all), group.total = scale * int32_t(all);
    }
    if (total(nothing) == 0) return true;
    for (int64_t n = 0; n * kInt8Block < width; n++) {
        const int64_t place = rows.place(n, row);
        memset(rows.bytes + place * kInt8Block * D::bytes, 0, kInt8Block * D::bytes);
        for (SignedGroup<K>& group : rows.blocks[place].groups) group = {std::numeric_limits<float>::quiet_NaN(), 0, 0, {}};
    }
    return false;
}

// Scales are a stream of their own, of which the processor's own prefetching stops at every page.
SACCADE_INLINE void ask_ahead(const void* scales) { __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(scales) + 512), 0, 2); }

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
    static SACCADE_INLINE vi whole(const int8_t* of, int64_t at) {
        ask_ahead(of + at);
        return load_whole(of + at);
    }
    SACCADE_INLINE vf number(const uint16_t* of, const int8_t* times, int64_t at) const {
        of += (at / kInt8Panel >> shift) * kInt8Panel + at % kInt8Panel;
        ask_ahead(of);
        const vf x = half ? load_as_float(reinterpret_cast<const f16*>(of)) : load_as_float(reinterpret_cast<const bf16*>(of));
        return times ? x * __builtin_convertvector(whole(times, at), vf) : x;
    }
};

// Scales of groups, and then their minima: as they are held for one row, otherwise as floats.
template <int M, bool Minima> SACCADE_INLINE vf scale_of(const float* scales, int64_t g, int n) { return load(scales + (g * (1 + Minima) * M + n) * lanes); }
template <int M, bool> SACCADE_INLINE vf scale_of(const HeldScales& scales, int64_t g, int n) {
    if (n < M) return scales.number(scales.units, scales.steps, g * kInt8Panel + n * lanes);
    return scales.number(scales.minima, scales.zeros, g * kInt8Panel + (n - M) * lanes);
}

// Groups of M vectors of features, of a block or a part of it.
template <class S> struct GroupPart {
    const uint8_t* bytes;  // kInt8Panel lines of four terms, or of eight in 4 bits
    S scales;
    int64_t block, count, first;  // group of the panel that `scales` begins after
};

// R rows from `row` on: added to `out`, rows of kInt8Panel numbers, or put there by block 0.
template <class D, int bits, int K, bool Minima, int R, int M, class S>
void group_tile(const SignedRows<K>& rows, int64_t row, const GroupPart<S>& part, float* out, bool ahead) {
    const int64_t place = rows.place(part.block, row);
    const SignedBlock<K>* const of = rows.blocks + place;
    const uint8_t* const x = rows.bytes + place * kInt8Block * D::bytes;
    vf sums[R][M] = {};
    if (part.block)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) sums[r][n] = load(out + r * kInt8Panel + n * lanes);
    for (int64_t g = 0; g < part.count; g++) {
        vi sum[R][M];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) sum[r][n] = (vi)splat_u(of[r].groups[g].offset);
        for (int64_t k = g * K; k < (g + 1) * K; k += 32 / bits) {
            const uint8_t* const w = part.bytes + k * bits / 8 * kInt8Panel;
            if (ahead)
                for (int n = 0; n < 4; n++) __builtin_prefetch(w + 4096 + 64 * n, 0, 2);
#pragma GCC unroll 2
            for (int high = 0; high < 8 / bits; high++) {
                typename D::Line line[M];
#pragma GCC unroll 4
                for (int n = 0; n < M; n++) {
                    const vu some = load(reinterpret_cast<const uint32_t*>(w + 4 * lanes * n));
                    D::line(bits == 4 ? some >> 4 * high & splat_u(0x0f0f0f0f) : some, line[n]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    typename D::Spread four;
                    D::spread(x + (r * kInt8Block + k + 4 * high) * D::bytes, four);
#pragma GCC unroll 4
                    for (int n = 0; n < M; n++) sum[r][n] = D::add(sum[r][n], four, line[n]);
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) {
            const vf scale = scale_of<M, Minima>(part.scales, part.first + g, n);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vf both = splat(of[r].groups[g].scale) * scale;
                sums[r][n] = fused(__builtin_convertvector(sum[r][n], vf), both, sums[r][n]);
            }
        }
        if constexpr (Minima)
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) {
                const vf minimum = scale_of<M, Minima>(part.scales, part.first + g, M + n);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sums[r][n] = fused(splat(-of[r].groups[g].total), minimum, sums[r][n]);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) store(out + r * kInt8Panel + n * lanes, sums[r][n]);
}

template <class D, int K, bool Minima, int M>
SACCADE_INLINE void group_tiles(const SignedRows<K>& of, int64_t row, int64_t rows, const GroupPart<const float*>& part, float* out) {
    bool ahead = rows <= 8;
    for (const int64_t stop = row + rows; row < stop; ahead = false) {
        const int64_t left = stop - row, size = left <= D::rows ? left : left < 2 * D::rows ? (left + 1) / 2 : D::rows;
        switch (size) {
            case 1: group_tile<D, 8, K, Minima, 1, M>(of, row, part, out, ahead); break;
            case 2: group_tile<D, 8, K, Minima, 2, M>(of, row, part, out, ahead); break;
            case 3: group_tile<D, 8, K, Minima, 3, M>(of, row, part, out, ahead); break;
            case 4: if constexpr (D::rows >= 4) group_tile<D, 8, K, Minima, 4, M>(of, row, part, out, ahead); break;
            case 5: if constexpr (D::rows >= 5) group_tile<D, 8, K, Minima, 5, M>(of, row, part, out, ahead); break;
            case 6: if constexpr (D::rows >= 6) group_tile<D, 8, K, Minima, 6, M>(of, row, part, out, ahead); break;
        }
        row += size, out += size * kInt8Panel;
    }
}

// "int4": steps and minima are whole multiples of one scale for kInt8Block terms, so that a weight is a byte q step - zero times it.
// A row alone with M vectors of a panel multiplies sums of q by steps.
template <class D, int M> void stepped_row(const SignedRows<kInt8Block>& rows, int64_t row, int64_t width, const uint8_t* w, const HeldScales& held, float* out) {
    constexpr int each = kInt8Block / kPart;
    const int64_t parts = (width + kPart - 1) / kPart;
    vf sums[M] = {};
    for (int64_t first = 0; first < parts; first += each) {
        const int64_t place = rows.place(first / each, row);
        const SignedGroup<kInt8Block>& of = rows.blocks[place].groups[0];
        const uint8_t* x = rows.bytes + place * kInt8Block * D::bytes;
        vi whole[M] = {};
        for (int64_t part = first; part < std::min(parts, first + each); part++) {
            vi sum[M] = {};
#pragma GCC unroll 4
            for (int k = 0; k < kPart; k += 8, x += 8 * D::bytes, w += 4 * kInt8Panel) {
                for (int n = 0; n < 4; n++) __builtin_prefetch(w + 2048 + 64 * n, 0, 3);
                typename D::Spread low, high;
                D::spread(x, low), D::spread(x + 4 * D::bytes, high);
#pragma GCC unroll 4
                for (int n = 0; n < M; n++) {
                    typename D::Line line;
                    const vu both = load(reinterpret_cast<const uint32_t*>(w + 4 * lanes * n));
                    D::line(both & splat_u(0x0f0f0f0f), line), sum[n] = D::add(sum[n], low, line);
                    D::line(both >> 4 & splat_u(0x0f0f0f0f), line), sum[n] = D::add(sum[n], high, line);
                }
            }
#pragma GCC unroll 4
            for (int n = 0; n < M; n++) {
                const int64_t at = part * kInt8Panel + n * lanes;
                whole[n] += sum[n] * held.whole(held.steps, at) - (vi)splat_u(of.parts[part - first]) * held.whole(held.zeros, at);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < M; n++) {
            const vf both = splat(of.scale) * held.number(held.units, nullptr, first * kInt8Panel + n * lanes);
            sums[n] = fused(__builtin_convertvector(whole[n], vf), both, sums[n]);
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < M; n++) store(out + n * lanes, sums[n]);
}

// Lines of eight terms in 4 bits as lines of four bytes q, or q step - zero + 128; `held` is that of the first terms of the panel.
template <bool stepped> void group_bytes(const uint8_t* from, int64_t first, int64_t terms, const HeldScales& held, uint8_t* to) {
    typedef uint8_t vb __attribute__((vector_size(4 * lanes)));
    typedef uint16_t vw __attribute__((vector_size(4 * lanes)));
    for (int64_t part = 0; part < terms / kPart; part++)
        for (int n = 0; n < kInt8Panel; n += lanes) {
            vw step;
            vb plus;
            if constexpr (stepped) {
                const int64_t at = (first / kPart + part) * kInt8Panel + n;
                step = (vw)((vu)held.whole(held.steps, at) * 0x00010001u);
                plus = (vb)(((128u - (vu)held.whole(held.zeros, at)) & 255u) * 0x01010101u);
            }
#pragma GCC unroll 4
            for (int64_t k = part * kPart; k < (part + 1) * kPart; k += 8) {
                const uint8_t* const at = from + k / 2 * kInt8Panel + 4 * n;
                __builtin_prefetch(at + 4096, 0, 2);
                const vu both = load(reinterpret_cast<const uint32_t*>(at));
                vu low = both & splat_u(0x0f0f0f0f), high = both >> 4 & splat_u(0x0f0f0f0f);
                // Two bytes at once: no product is above 255.
                if constexpr (stepped) low = (vu)((vb)((vw)low * step) + plus), high = (vu)((vb)((vw)high * step) + plus);
                store(reinterpret_cast<uint32_t*>(to + k * kInt8Panel + 4 * n), low);
                store(reinterpret_cast<uint32_t*>(to + (k + 4) * kInt8Panel + 4 * n), high);
            }
        }
}

// Rows of a panel from `first` of the call on, with their bias.
template <class T> void group_finish(const GroupProduct& call, const float* from, int64_t first, int64_t rows, int64_t f) {
    for (T* to = static_cast<T*>(call.out) + first * call.features + f; rows-- > 0; from += kInt8Panel, to += call.features)
        for (int n = 0; n < kInt8Panel && f + n < call.features; n += lanes) {
            const int64_t left = call.features - f - n;
            const vf sum = load(from + n);
            store_from_float(to + n, call.bias ? sum + load_as_float(call.bias + f + n, left) : sum, left);
        }
}

// Panel p times rows to `out`, rows of kInt8Panel numbers. Of many rows a block of the panel, 8 KiB of bytes, stays in the
// first-level cache for all of them; a row alone reads numbers as they are held.
template <class D, int bits, int K, bool Minima> void group_panel(const GroupProduct& call, const SignedRows<K>& of, int64_t row, int64_t rows, int64_t p, float* out) {
    constexpr int M = D::vectors, each = (1 + Minima) * M, group = std::min(K, kPart);
    constexpr bool stepped = K > kPart;
    const int64_t groups = (call.width + group - 1) / group, padded = (call.width + 31) / 32 * 32;
    const uint8_t* const weight = call.weight + p * padded * bits / 8 * kInt8Panel;
    const uint16_t* const scales = call.scales + p * call.form.rows(groups) * kInt8Panel;
    if (stepped && rows == 1) {
        if constexpr (stepped)
            for (int n = 0; n < kInt8Panel; n += M * lanes) stepped_row<D, M>(of, row, call.width, weight + 4 * n, HeldScales(call.form, groups, scales, n), out + n);
        return;
    }
    alignas(64) uint8_t bytes[bits == 4 ? kInt8Block * kInt8Panel : 1];
    alignas(64) float wide[kInt8Block / K * each * lanes];
    for (int64_t k = 0; k < padded; k += kInt8Block) {
        const int64_t terms = std::min<int64_t>(kInt8Block, padded - k), count = std::min<int64_t>(kInt8Block / K, (call.width - k + K - 1) / K);
        const uint8_t* from = weight + k * bits / 8 * kInt8Panel;
        if (bits == 4 && rows > 1) {
            if (terms < count * K) memset(bytes, 0, sizeof bytes);
            group_bytes<stepped>(from, k, terms, HeldScales(call.form, groups, scales, 0), bytes), from = bytes;
        }
        for (int n = 0; n < kInt8Panel; n += M * lanes) {
            const HeldScales held(call.form, groups, scales, n);
            if (rows == 1) {
                group_tile<D, bits, K, Minima, 1, M>(of, row, GroupPart<HeldScales>{from + 4 * n, held, k / kInt8Block, count, k / K}, out + n, true);
                continue;
            }
            for (int64_t g = 0; g < count; g++)
                for (int i = 0; i < each; i++)
                    store(wide + (g * each + i) * lanes, stepped ? held.number(held.units, nullptr, k / kPart * kInt8Panel + i * lanes) : scale_of<M, Minima>(held, k / K + g, i));
            group_tiles<D, K, Minima, M>(of, row, rows, GroupPart<const float*>{from + 4 * n, wide, k / kInt8Block, count, 0}, out + n);
        }
    }
}

// Quantise up to 16 MiB of rows, then multiply them, by the same tasks as in int8.h.
template <class D, int bits, int K, bool Minima, class T> int64_t group_rows(const GroupProduct& call) {
    static_assert(D::rows <= 6 && kInt8Panel / lanes % D::vectors == 0 && K % lanes == 0 && K % 8 == 0);
    const uint32_t offset = call.form.bytes ? 128 : call.form.offset;
    const int64_t panels = (call.features + kInt8Panel - 1) / kInt8Panel;
    const int64_t most = std::min(call.rows, std::max<int64_t>((1 << 24) / SignedRows<K>::size(1, call.width, D::bytes), 1));
    const Workspace memory(SignedRows<K>::size(most, call.width, D::bytes));
    const SignedRows<K> of(memory.data(), most, call.width, D::bytes);
    std::atomic<int64_t> odd{0};
    for (int64_t first = 0; first < call.rows; first += most) {
        const int64_t count = std::min(most, call.rows - first);
        const int64_t at_once = std::max<int64_t>((1 << 14) / call.width, 1);
        parallel(call.threads, (count + at_once - 1) / at_once, [&](int64_t task, int) {
            for (int64_t r = task * at_once; r < std::min(count, (task + 1) * at_once); r++)
                odd += !row_as_signed_bytes<D, K>(static_cast<const T*>(call.x) + (first + r) * call.width, call.width, offset, of, r);
        });
        const int64_t blocks = (count + kGroupRowsAtOnce - 1) / kGroupRowsAtOnce;
        const int64_t block = ((count + blocks - 1) / blocks + D::rows - 1) / D::rows * D::rows;
        const int64_t tasks = std::min(panels, std::max<int64_t>((8 * call.threads + blocks - 1) / blocks, 1));
        parallel(call.threads, blocks * tasks, [&](int64_t task, int) {
            const int64_t row = task / tasks * block, size = std::min(block, count - row), group = task % tasks;
            if (size <= 0) return;
            float* const out = static_cast<float*>(scratch(0, size * kInt8Panel * (int64_t)sizeof(float)));
            for (int64_t p = group * panels / tasks; p < (group + 1) * panels / tasks; p++) {
                group_panel<D, bits, K, Minima>(call, of, row, size, p, out);
                group_finish<T>(call, out, first + row, size, p * kInt8Panel);
            }
        });
    }
    return odd;
}

template <class D, int bits, int K, bool Minima> int64_t groups_in(const GroupProduct& call) {
    return call.half ? group_rows<D, bits, K, Minima, bf16>(call) : group_rows<D, bits, K, Minima, float>(call);
}
template <class D> int64_t groups_by(const GroupProduct& call) {
    const GroupForm& form = call.form;
    const bool minima = form.minima || form.zeros;
    if (form.bits == 4) {
        if (form.bytes) return groups_in<D, 4, kInt8Block, false>(call);
        return minima ? groups_in<D, 4, 32, true>(call) : groups_in<D, 4, 32, false>(call);
    }
    if (form.group == 16) return minima ? groups_in<D, 8, 16, true>(call) : groups_in<D, 8, 16, false>(call);
    return minima ? groups_in<D, 8, 32, true>(call) : groups_in<D, 8, 32, false>(call);
}

inline int64_t group_product(const GroupProduct& call) { return groups_by<GroupHalves>(call); }
#if defined(__AVX512F__)
inline int64_t group_product_quads(const GroupProduct& call) { return groups_by<GroupQuads>(call); }
#endif

}  // namespace SACCADE_SET
}  // namespace saccade

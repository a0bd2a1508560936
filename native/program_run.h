// Runs a score program: vectors of keys, one instruction after the other over a row of scores that stays in the cache.
#pragma once

#include <cmath>

#include "pack.h"
#include "parallel.h"
#include "score_program.h"
#include "weights.h"

namespace saccade {
namespace SACCADE_SET {

// --- operations -----------------------------------------------------------------------------------------------------

template <class F> SACCADE_INLINE vf by_lane(vf x, F&& f) {
    for (int n = 0; n < lanes; n++) x[n] = f(x[n]);
    return x;
}

SACCADE_INLINE vf log_of(vf x) {
    const vf tiny = splat(1.17549435e-38f), more = splat(8388608.0f);  // denormal numbers are scaled by 2^23
    const vf scaled = x < tiny ? x * more : x;
    vf y = log2_of(scaled) * splat(ln_2) - (x < tiny ? splat(23 * ln_2) : vf{});
    y = x == vf{} ? splat(-infinity) : y;
    return x < vf{} ? splat(std::numeric_limits<float>::quiet_NaN()) : y;
}

// Sine, or cosine with `quarters` 1: Cody and Waite's reduction, and the polynomials of Cephes' sinf (S. Moshier).
SACCADE_INLINE vf sine_of(vf x, int quarters) {
    const vf magic = splat(12582912.0f), shifted = x * splat(0.63661977236758134f) + magic, n = shifted - magic;
    const vi turn = ((vi)shifted - (vi)magic + quarters) & 3;
    vf r = fused(n, splat(-1.5703125f), x);
    r = fused(n, splat(-4.837512969970703125e-4f), r);
    r = fused(n, splat(-7.549789948768648e-8f), r);
    const vf square = r * r;
    vf s = splat(-1.9515295891e-4f) * square + splat(8.3321608736e-3f);
    s = (s * square + splat(-1.6666654611e-1f)) * square * r + r;
    vf c = splat(2.443315711809948e-5f) * square + splat(-1.388731625493765e-3f);
    c = (c * square + splat(4.166664568298827e-2f)) * square * square - splat(0.5f) * square + splat(1.0f);
    vf y = (turn & 1) != 0 ? c : s;
    y = (turn & 2) != 0 ? -y : y;
    const vf size = (vf)((vu)x & splat_u(0x7fffffff));
    if (above(size, 8192.0f) || total(x - x) != 0)  // further out the reduction is not exact; of infinities it is NaN
        for (int l = 0; l < lanes; l++)
            if (!(size[l] <= 8192.0f)) y[l] = (float)(quarters ? std::cos((double)x[l]) : std::sin((double)x[l]));
    return y;
}

SACCADE_INLINE vf sigmoid_of(vf x) {
    const vf size = (vf)((vu)x | splat_u(0x80000000)), e = exp2_of(size, splat(log2_e));  // exp(-|x|): it never overflows
    const vf small = e / (e + splat(1.0f));
    const vf y = x < vf{} ? small : splat(1.0f) - small;
    return x == x ? y : x;
}

// The quotient of ints rounded down, or towards 0. A divisor of 0 counts as 1. Floats hold ints below 2^23; larger ones go one by one.
SACCADE_INLINE vi quotient(vi x, vi y, bool down) {
    y = y == 0 ? (y | 1) : y;
    const vf fx = __builtin_convertvector(x, vf), fy = __builtin_convertvector(y, vf), size = (vf)((vu)fx & splat_u(0x7fffffff));
    vi q;
    if (above(size, 8388607.0f)) {
        for (int n = 0; n < lanes; n++) q[n] = x[n] / y[n];
    } else {
        q = __builtin_convertvector(fx / fy, vi);  // towards 0, perhaps one too far: fx / fy is rounded
        const vi rest = x - q * y;
        const vi over = (rest ^ x) < 0 && rest != 0;  // went past x: one back towards 0
        q += over ? ((x ^ y) < 0 ? (vi)(y - y + 1) : (vi)(y - y - 1)) : (vi)(y - y);
    }
    if (down) {
        const vi rest = x - q * y;
        q -= (rest != 0 && (rest ^ y) < 0) ? (vi)(y - y + 1) : (vi)(y - y);
    }
    return q;
}

SACCADE_INLINE vi least(vi x, int32_t bar) { return x < bar ? x : x - x + bar; }
SACCADE_INLINE vi most(vi x, int32_t bar) { return x > bar ? x : x - x + bar; }
SACCADE_INLINE vi within(vi x, int32_t last) { return most(least(x, last), 0); }

class ProgramRun {
    const ScoreProgram& program;
    const Problem& p;
    float* base[ScoreProgram::levels];
    int64_t stride[ScoreProgram::levels];
    float *keys, *distances;  // the key of each column; the distance at each of its places
    const int64_t wide;       // columns of a row
    const int64_t diagonal;   // places of distances
    const int64_t item, head;

  public:
    static constexpr int64_t spread = 2 * grain;  // places of distances for a grain of keys

    // Of one item and head. What an earlier one of the same thread and call has computed is still there.
    ProgramRun(const Problem& p, int64_t wide, int64_t b, int64_t h)
        : program(*p.bias.code), p(p), wide(wide), diagonal(wide / grain * spread), item(b), head(h) {
        int64_t floats = 0;
        int64_t place[ScoreProgram::levels];
        const int64_t size[] = {lanes, lanes, wide, diagonal, wide};
        for (int level = 0; level < ScoreProgram::levels; level++)
            place[level] = floats, stride[level] = size[level], floats += program.counts[level] * size[level];
        float* const memory = static_cast<float*>(scratch(2, (floats + wide + diagonal) * 4));
        for (int level = 0; level < ScoreProgram::levels; level++) base[level] = memory + place[level];
        keys = memory + floats, distances = keys + wide;
    }

    // Columns 48 n ... are keys start(n) ... . Rows first ... first + 47 follow.
    template <class Start> void columns(int64_t count, int64_t first, Start&& start_of) {
        run(ScoreProgram::uniform, lanes, nullptr);
        const vi counting = (vi)DropoutRow::counting();
        const int32_t last = (int32_t)(p.length_k - 1 + p.bias.key_origin);
        for (int64_t n = 0; n < count; n++) {
            const int32_t start = (int32_t)(start_of(n) + p.bias.key_origin);
            for (int j = 0; j < grain; j += lanes) put(keys + n * grain + j, least(counting + (start + j), last));
        }
        if (program.has(ScoreProgram::key)) run(ScoreProgram::key, count * grain, nullptr);
        if (!program.has(ScoreProgram::distance)) return;
        // Beyond the last row and key there are places, too: they repeat the ends.
        const int64_t origin = p.bias.placed(item);
        const int32_t near = (int32_t)(1 - p.length_q - origin), far = (int32_t)(p.length_k - 1 - origin);
        for (int64_t n = 0; n < count; n++) {
            const int32_t start = (int32_t)(start_of(n) - first - (grain - 1) - origin);
            for (int j = 0; j < spread; j += lanes) put(distances + n * spread + j, most(least(counting + (start + j), far), near));
        }
        run(ScoreProgram::distance, count * spread, nullptr);
    }

    // The scores of a row, `offset` rows after the first, become what the program makes of them.
    void row(int64_t i, int64_t offset, float* scores, int64_t width) {
        position = (int32_t)(i + p.bias.placed(item) + p.bias.key_origin), below = grain - 1 - offset;
        run(ScoreProgram::row, lanes, nullptr);
        run(ScoreProgram::pair, width, scores);
        if (program.result.level == ScoreProgram::pair && program.result.index == 0) return;
        for (int64_t j = 0; j < width; j += lanes) store(scores + j, value(program.result, j, scores));
    }

    // `lanes` entries of a value of the row that ran last, from a column on.
    SACCADE_INLINE vf value(ScoreProgram::Operand of, int64_t column, const float* scores) const {
        if (of.level == ScoreProgram::pair && of.index == 0) return load(scores + column);
        const float* const from = base[of.level] + of.index * stride[of.level];
        if (of.level == ScoreProgram::distance) return load(from + column / grain * spread + below + column % grain);
        return load(from + (of.level < ScoreProgram::key ? 0 : column));
    }

    // Whether a pair that is seen, whose score is not -inf, has read outside of a table in the row that ran last.
    bool strayed(const float* scores, int64_t width) const {
        if (program.outside.level < 0) return false;
        vf any = {};
        for (int64_t j = 0; j < width; j += lanes)
            any += ((vi)value(program.outside, j, scores) & (vi)(load(scores + j) != splat(-infinity))) != 0 ? splat(1.0f) : vf{};
        return total(any) != 0;
    }

    SACCADE_INLINE const int32_t* keys_from(int64_t column) const { return reinterpret_cast<const int32_t*>(keys + column); }

    // The whole line of a value by key or distance, as ints.
    const int32_t* line(ScoreProgram::Operand of) const { return reinterpret_cast<const int32_t*>(base[of.level] + of.index * stride[of.level]); }

  private:
    int64_t below = 0;
    int32_t position = 0;

    static SACCADE_INLINE void put(float* to, vi x) { store(to, (vf)x); }
    struct Argument {
        const float* from;
        int64_t mask;  // 0: one vector for all columns
        SACCADE_INLINE vf at(int64_t j) const { return load(from + (j & mask)); }
    };

    Argument argument(ScoreProgram::Operand of, float* scores) const {
        if (of.level < 0) return {base[0], 0};
        if (of.level == ScoreProgram::pair && of.index == 0) return {scores, -1};
        return {base[of.level] + of.index * stride[of.level], of.level < ScoreProgram::key ? 0 : -1};
    }

    void run(int level, int64_t width, float* scores) const {
        for (const ScoreProgram::Instruction& x : program.code[level]) {
            float* const to = level == ScoreProgram::pair && x.to.index == 0 ? scores : base[level] + x.to.index * stride[level];
            step(x, to, width, scores);
        }
    }

    template <class F> static SACCADE_INLINE void each(float* to, int64_t width, F&& f) {
        for (int64_t j = 0; j < width; j += lanes) store(to + j, (vf)f(j));
    }

    void step(const ScoreProgram::Instruction& x, float* to, int64_t width, float* scores) const;
    void load_entries(const Bias::Table& table, const Argument& at, float* to, int64_t width) const;
    void load_line(const Bias::Table& table, int32_t start, float* to, int64_t width) const;
};

// The entries of a table. Nothing outside of it is read, whatever the indices are.
inline void ProgramRun::load_entries(const Bias::Table& table, const Argument& at, float* to, int64_t width) const {
    const int32_t last = (int32_t)table.size - 1;
    if (table.type == Bias::Table::bits) {
        const uint8_t* const from = static_cast<const uint8_t*>(table.data);
        each(to, width, [&](int64_t j) SACCADE_LAMBDA {
            vi x = within((vi)at.at(j), last);
            for (int n = 0; n < lanes; n++) x[n] = from[x[n]] ? -1 : 0;
            return x;
        });
        return;
    }
    const float* const from = static_cast<const float*>(table.data);
    each(to, width, [&](int64_t j) SACCADE_LAMBDA { return gather(from, within((vi)at.at(j), last)); });
}

// Entries start + key of a table.
inline void ProgramRun::load_line(const Bias::Table& table, int32_t start, float* to, int64_t width) const {
    const int64_t last = table.size - lanes;
    for (int64_t j = 0; j < width; j += lanes) {
        const vi key = (vi)load(keys + j);
        const int64_t first = (int64_t)start + key[0];
        if (key[lanes - 1] != key[0] + lanes - 1 || first < 0 || first > last) {
            const vi at = key + start;
            load_entries(table, {(const float*)&at, 0}, to + j, lanes);
        } else if (table.type == Bias::Table::bits) {
            const uint8_t* const from = static_cast<const uint8_t*>(table.data) + first;
            vi x;
            for (int n = 0; n < lanes; n++) x[n] = from[n] ? -1 : 0;
            put(to + j, x);
        } else {
            store(to + j, load(static_cast<const float*>(table.data) + first));
        }
    }
}

inline void ProgramRun::step(const ScoreProgram::Instruction& x, float* to, int64_t width, float* scores) const {
    const Argument a = argument(x.arguments[0], scores), b = argument(x.arguments[1], scores), c = argument(x.arguments[2], scores);
    const auto one = [&](auto&& f) SACCADE_LAMBDA { each(to, width, [&](int64_t j) SACCADE_LAMBDA { return f(a.at(j)); }); };
    const auto two = [&](auto&& f) SACCADE_LAMBDA { each(to, width, [&](int64_t j) SACCADE_LAMBDA { return f(a.at(j), b.at(j)); }); };
    const auto ints = [&](auto&& f) SACCADE_LAMBDA { each(to, width, [&](int64_t j) SACCADE_LAMBDA { return f((vi)a.at(j), (vi)b.at(j)); }); };
    const auto either = [&](auto&& f) SACCADE_LAMBDA { if (x.kind == ScoreProgram::a_float) two(f); else ints(f); };
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    switch (x.op) {
        case 0: return either([](auto x, auto y) SACCADE_LAMBDA { return x + y; });
        case 1: return either([](auto x, auto y) SACCADE_LAMBDA { return x - y; });
        case 2: return either([](auto x, auto y) SACCADE_LAMBDA { return x * y; });
        case 3: return two([](vf x, vf y) SACCADE_LAMBDA { return x / y; });
        case 4:  // a NaN in either stays
            if (x.kind != ScoreProgram::a_float) return ints([](vi x, vi y) SACCADE_LAMBDA { return x < y ? x : y; });
            return two([](vf x, vf y) SACCADE_LAMBDA { return x != x ? x : x < y ? x : y; });
        case 5:
            if (x.kind != ScoreProgram::a_float) return ints([](vi x, vi y) SACCADE_LAMBDA { return x > y ? x : y; });
            return two([](vf x, vf y) SACCADE_LAMBDA { return x != x ? x : x > y ? x : y; });
        case 6:
            if (x.kind != ScoreProgram::a_float) return ints([](vi x, vi) SACCADE_LAMBDA { return -x; });
            return one([](vf x) SACCADE_LAMBDA { return -x; });
        case 7:
            if (x.kind != ScoreProgram::a_float) return ints([](vi x, vi) SACCADE_LAMBDA { return x < 0 ? -x : x; });
            return one([](vf x) SACCADE_LAMBDA { return (vf)((vu)x & splat_u(0x7fffffff)); });
        case 8:
            if (x.kind != ScoreProgram::a_float) return ints([](vi x, vi) SACCADE_LAMBDA { return (x < 0) - (x > 0); });
            return one([](vf x) SACCADE_LAMBDA { return x > vf{} ? splat(1.0f) : x < vf{} ? splat(-1.0f) : vf{}; });  // of NaN 0, as PyTorch
        case 9: return one([](vf x) SACCADE_LAMBDA { return exp2_of(x, splat(log2_e)); });
        case 10: return one([](vf x) SACCADE_LAMBDA { return log_of(x); });
        case 11: return one([](vf x) SACCADE_LAMBDA { return root_of(x); });
        case 12: return one([](vf x) SACCADE_LAMBDA { return sine_of(x, 0); });
        case 13: return one([](vf x) SACCADE_LAMBDA { return sine_of(x, 1); });
        case 14: return one([](vf x) SACCADE_LAMBDA { return tanh_of(x); });
        case 15: return one([](vf x) SACCADE_LAMBDA { return sigmoid_of(x); });
        case 16:
            return two([](vf x, vf y) SACCADE_LAMBDA {
                for (int n = 0; n < lanes; n++) x[n] = std::pow(x[n], y[n]);
                return x;
            });
        case 17: return one([](vf x) SACCADE_LAMBDA { return by_lane(x, [](float y) { return std::floor(y); }); });
        case 18: return one([](vf x) SACCADE_LAMBDA { return by_lane(x, [](float y) { return std::ceil(y); }); });
        case 19: return one([](vf x) SACCADE_LAMBDA { return by_lane(x, [](float y) { return std::nearbyint(y); }); });
        case 20: return one([](vf x) SACCADE_LAMBDA { return by_lane(x, [](float y) { return std::trunc(y); }); });
        case 21: return ints([](vi x, vi y) SACCADE_LAMBDA { return quotient(x, y, true); });
        case 22: return ints([](vi x, vi y) SACCADE_LAMBDA { return quotient(x, y, false); });
        case 23:
            return ints([](vi x, vi y) SACCADE_LAMBDA {
                y = y == 0 ? (y | 1) : y;
                return x - quotient(x, y, true) * y;
            });
        case 24: case 33: return ints([](vi x, vi y) SACCADE_LAMBDA { return x & y; });
        case 25: case 34: return ints([](vi x, vi y) SACCADE_LAMBDA { return x | y; });
        case 26: case 35: return ints([](vi x, vi y) SACCADE_LAMBDA { return x ^ y; });
        case 27: return either([](auto x, auto y) SACCADE_LAMBDA { return (vi)(x == y); });
        case 28: return either([](auto x, auto y) SACCADE_LAMBDA { return (vi)(x != y); });
        case 29: return either([](auto x, auto y) SACCADE_LAMBDA { return (vi)(x < y); });
        case 30: return either([](auto x, auto y) SACCADE_LAMBDA { return (vi)(x <= y); });
        case 31: return either([](auto x, auto y) SACCADE_LAMBDA { return (vi)(x > y); });
        case 32: return either([](auto x, auto y) SACCADE_LAMBDA { return (vi)(x >= y); });
        case 36: return ints([](vi x, vi) SACCADE_LAMBDA { return ~x; });
        case 37: return each(to, width, [&](int64_t j) SACCADE_LAMBDA { return (vi)a.at(j) != 0 ? b.at(j) : c.at(j); });
        case 38:
            if (x.kind == ScoreProgram::a_bool) return ints([](vi x, vi) SACCADE_LAMBDA { return x & (vi)splat(1.0f); });
            return each(to, width, [&](int64_t j) SACCADE_LAMBDA { return __builtin_convertvector((vi)a.at(j), vf); });
        case 39:
            if (x.kind == ScoreProgram::a_bool) return ints([](vi x, vi) SACCADE_LAMBDA { return -x; });
            return one([](vf x) SACCADE_LAMBDA { return __builtin_convertvector(x, vi); });
        case 40:
            if (x.kind == ScoreProgram::a_float) return one([](vf x) SACCADE_LAMBDA { return (vi)(x != vf{}); });
            return ints([](vi x, vi) SACCADE_LAMBDA { return (vi)(x != 0); });
        case 41: return one([](vf x) SACCADE_LAMBDA { return (vi)(x != x); });
        case 64: return;  // the score is where it is
        case 65: return each(to, width, [&](int64_t) SACCADE_LAMBDA { return (vi)splat_u((uint32_t)item); });
        case 66: return each(to, width, [&](int64_t) SACCADE_LAMBDA { return (vi)splat_u((uint32_t)head); });
        case 67:  // along distances queries stand at 0
            return each(to, width, [&](int64_t) SACCADE_LAMBDA { return (vi)splat_u(x.to.level == ScoreProgram::distance ? 0 : (uint32_t)position); });
        case 68: {
            const float* const from = x.to.level == ScoreProgram::distance ? distances : keys;
            return each(to, width, [&](int64_t j) SACCADE_LAMBDA { return load(from + j); });
        }
        case 70: return each(to, width, [&](int64_t) SACCADE_LAMBDA { return (vi)splat_u((uint32_t)x.number); });
        case 71: return load_entries(p.bias.tables[x.number], a, to, width);
        case 72:  // of distances, along the diagonal of this row
            for (int64_t n = 0; n * grain < width; n++)
                for (int64_t j = 0; j < std::min<int64_t>(grain, width - n * grain); j += lanes)
                    store(to + n * grain + j, load(a.from + n * spread + below + j));
            return;
        case 74: return load_line(p.bias.tables[x.number], ((vi)a.at(0))[0], to, width);
        case 42: case 73: return one([](vf x) SACCADE_LAMBDA { return x; });
        default: return each(to, width, [&](int64_t) SACCADE_LAMBDA { return splat(nan); });
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

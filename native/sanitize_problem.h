// Random attention problems for the sanitizer runs: tensors that end where their memory ends, strides with gaps, pointers
// aligned to nothing but their element, every kind of bias, dropout, and masks with what they mean written out.
//
// Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv widths.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "call.h"
#include "mask_program.h"

namespace saccade::sanitize {

using Random = std::mt19937_64;

inline int64_t draw(Random& random, int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); }
inline bool chance(Random& random, double p) { return std::bernoulli_distribution(p)(random); }
template <class T> const T& one_of(Random& random, const std::vector<T>& list) { return list[draw(random, 0, int64_t(list.size()) - 1)]; }

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

inline int size_of(Type type) { return type == Type::f32 ? 4 : 2; }

inline double get(const char* at, Type type) {
    uint32_t word = 0;
    float value;
    std::memcpy(&word, at, size_of(type));
    if (type == Type::f16) {
        const int exponent = word >> 10 & 31;
        const double part = std::ldexp(double((word & 1023) + (exponent ? 1024 : 0)), std::max(exponent, 1) - 25);
        const double size = exponent == 31 ? (word & 1023 ? kNan : kInfinity) : part;
        return word & 0x8000 ? -size : size;
    }
    if (type == Type::bf16) word <<= 16;
    std::memcpy(&value, &word, 4);
    return value;
}

inline void put(char* at, Type type, double value) {
    const float single = static_cast<float>(value);
    uint32_t word;
    std::memcpy(&word, &single, 4);
    if (type == Type::bf16) word = std::isnan(single) ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    if (type == Type::f16) {
        uint32_t best = 0x7e00;  // only numbers of moderate size are put: steps of the last bit are good enough
        if (std::isinf(value)) best = 0x7c00;
        if (std::isfinite(value)) {
            int exponent;
            std::frexp(value, &exponent);
            const int last = std::max(exponent - 11, -24);
            const uint32_t steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), -last)));
            best = last == -24 ? steps : (uint32_t(last + 24) << 10) + steps;
        }
        word = best | (value < 0 ? 0x8000 : 0);
    }
    std::memcpy(at, &word, size_of(type));
}

// A (B, H, L, W) tensor of its own memory. What lies between its elements is NaN.
class Tensor {
  public:
    Type type = Type::f32;
    int64_t shape[4] = {}, stride[4] = {0, 0, 0, 1};

    Tensor() = default;
    Tensor(Random& random, Type type, int64_t b, int64_t h, int64_t l, int64_t w) : type(type), shape{b, h, l, w} {
        const int64_t gap = chance(random, 0.5) ? draw(random, 0, 5) : 0, offset = chance(random, 0.5) ? draw(random, 0, 3) : 0;
        if (chance(random, 0.5)) {
            stride[2] = w + gap, stride[1] = l * stride[2] + gap, stride[0] = h * stride[1];
        } else {  // (B, L, H, W) transposed
            stride[1] = w + gap, stride[2] = h * stride[1] + gap, stride[0] = l * stride[2];
        }
        const int64_t count = b * h * l * w == 0 ? 0 : 1 + (b - 1) * stride[0] + (h - 1) * stride[1] + (l - 1) * stride[2] + (w - 1);
        memory_ = std::make_unique<char[]>((offset + count) * size_of(type));
        start_ = memory_.get() + offset * size_of(type);
        bytes_ = (offset + count) * size_of(type);
        for (int64_t n = 0; n < bytes_ / size_of(type); n++) saccade::sanitize::put(memory_.get() + n * size_of(type), type, kNan);
    }

    double at(int64_t b, int64_t h, int64_t i, int64_t c) const { return get(start_ + place(b, h, i, c), type); }
    void put(int64_t b, int64_t h, int64_t i, int64_t c, double value) { saccade::sanitize::put(start_ + place(b, h, i, c), type, value); }
    template <class F> void fill(F&& value) {
        for (int64_t b = 0; b < shape[0]; b++)
            for (int64_t h = 0; h < shape[1]; h++)
                for (int64_t i = 0; i < shape[2]; i++)
                    for (int64_t c = 0; c < shape[3]; c++) put(b, h, i, c, value());
    }
    Input input() const { return {start_, stride[0], stride[1], stride[2]}; }
    Output output() { return {start_, stride[0], stride[1], stride[2]}; }
    std::vector<char> bytes() const { return {memory_.get(), memory_.get() + bytes_}; }

    // Whether everything between the elements is the NaN that was put there.
    bool gaps_are_whole() const {
        std::vector<bool> element(bytes_ / size_of(type), false);
        const int64_t offset = (start_ - memory_.get()) / size_of(type);
        for (int64_t b = 0; b < shape[0]; b++)
            for (int64_t h = 0; h < shape[1]; h++)
                for (int64_t i = 0; i < shape[2]; i++)
                    for (int64_t c = 0; c < shape[3]; c++) element[offset + place(b, h, i, c) / size_of(type)] = true;
        for (size_t n = 0; n < element.size(); n++)
            if (!element[n] && !std::isnan(get(memory_.get() + n * size_of(type), type))) return false;
        return true;
    }

  private:
    int64_t place(int64_t b, int64_t h, int64_t i, int64_t c) const {
        return (b * stride[0] + h * stride[1] + i * stride[2] + c) * size_of(type);
    }

    std::unique_ptr<char[]> memory_;
    char* start_ = nullptr;
    int64_t bytes_ = 0;
};

// A mask and, written out, what it means.
struct Masking {
    std::unique_ptr<Mask> mask;
    std::vector<int64_t> key_lengths, row_lengths;
    std::vector<uint8_t> bits;  // (b?, h?, i?, j?)
    int64_t shape[4] = {1, 1, 1, 1};
    int64_t left = 0, right = 0, offset = 0;
    bool window = false;
    // What the remainders of positions show: `kind` is an operation of theirs, of `numbers`, the other way round if inverted.
    struct Residues {
        masks::Operation kind;
        std::vector<int64_t> numbers;
        bool inverted;

        bool sees(int64_t p, int64_t j) const {
            const auto chunk = [&](int64_t place) { return int64_t(std::floor(double(place) / double(numbers[0]))); };
            const int64_t away = chunk(j) - chunk(p);
            switch (kind) {
                case masks::Operation::dilated: return (j - p) % numbers[0] == 0;
                case masks::Operation::chunks: return -numbers[1] <= away && away <= numbers[2];
                default: return j % numbers[0] >= numbers[0] - numbers[1];
            }
        }
    };
    std::vector<Residues> residues;

    bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
        if (!key_lengths.empty() && j >= key_lengths[b]) return false;
        if (!row_lengths.empty() && i >= row_lengths[b]) return false;
        if (window && (j - i - offset < -left || j - i - offset > right)) return false;
        for (const Residues& part : residues)
            if (part.sees(i + offset, j) == part.inverted) return false;
        if (bits.empty()) return true;
        const auto step = [&](int axis, int64_t n) { return shape[axis] > 1 ? n : 0; };
        return bits[((step(0, b) * shape[1] + step(1, h)) * shape[2] + step(2, i)) * shape[3] + step(3, j)];
    }
};

struct Case {
    Problem problem;
    Masking masking;
    Tensor query, key, value, d_out, bias;
    std::vector<float> lines, sink, d_lse, counts;
    std::vector<int64_t> placements;
};

inline masks::Table lengths_table(const std::vector<int64_t>& lengths) {
    masks::Table table;
    table.data = lengths.data(), table.axes = 1, table.shape[0] = int64_t(lengths.size()), table.stride[0] = 1;
    return table;
}

inline masks::Table bits_table(const Masking& masking) {
    masks::Table table;
    table.data = masking.bits.data(), table.axes = 4, table.code = masks::Table::boolean;
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; axis--) {
        table.shape[axis] = masking.shape[axis], table.stride[axis] = stride;
        stride *= masking.shape[axis];
    }
    return table;
}

inline Masking::Residues draw_residues(Random& random, int64_t length_k) {
    const auto size = [&] { return chance(random, 0.1) ? length_k + draw(random, 1, 9) : draw(random, 1, 60); };
    const auto reach = [&] { return chance(random, 0.1) ? int64_t(1) << 60 : draw(random, 0, 2); };
    const bool inverted = chance(random, 0.3);
    if (chance(random, 0.3)) return {masks::Operation::dilated, {size()}, inverted};
    if (chance(random, 0.5)) return {masks::Operation::chunks, {size(), reach(), reach()}, inverted};
    const int64_t stride = size();
    return {masks::Operation::columns, {stride, draw(random, 1, stride)}, inverted};
}

// Any of a tensor of booleans, a window (a causal one often), remainders, and lengths, all of them together at times.
inline void draw_mask(Random& random, Problem& p, Masking& m) {
    std::vector<int64_t> parts;
    std::vector<masks::Table> tables;
    int64_t count = 0;
    const auto add = [&](const std::vector<int64_t>& numbers) { parts.insert(parts.end(), numbers.begin(), numbers.end()), count++; };
    m.offset = chance(random, 0.7) ? p.length_k - p.length_q : draw(random, -20, 20);
    if (chance(random, 0.5)) {
        m.window = true;
        m.left = chance(random, 0.5) ? p.length_q + p.length_k : draw(random, 0, 70);
        m.right = chance(random, 0.6) ? 0 : draw(random, 0, 70);
        add({int64_t(masks::Operation::at), 0, m.offset, int64_t(masks::Operation::window), m.left, m.right});
    }
    while (chance(random, 0.3)) {
        m.residues.push_back(draw_residues(random, p.length_k));
        const Masking::Residues& part = m.residues.back();
        if (part.inverted) parts.push_back(int64_t(masks::Operation::invert));
        add({int64_t(masks::Operation::at), 0, m.offset, int64_t(part.kind)});
        parts.insert(parts.end(), part.numbers.begin(), part.numbers.end());
    }
    if (chance(random, 0.4) && p.batch > 0) {
        const bool rows = chance(random, 0.5);
        for (int64_t b = 0; b < p.batch; b++) {
            m.key_lengths.push_back(draw(random, 0, p.length_k));
            if (rows) m.row_lengths.push_back(draw(random, 0, p.length_q));
        }
        const int64_t first = int64_t(tables.size());
        tables.push_back(lengths_table(m.key_lengths));
        if (rows) tables.push_back(lengths_table(m.row_lengths));
        add({int64_t(masks::Operation::padding), first, rows ? first + 1 : -1});
    }
    if (chance(random, 0.4)) {
        const int64_t whole[4] = {p.batch, p.heads, p.length_q, p.length_k};
        int64_t size = 1;
        for (int axis = 0; axis < 4; axis++) size *= m.shape[axis] = chance(random, axis < 2 ? 0.4 : 0.8) ? whole[axis] : 1;
        const double share = one_of<double>(random, {0.02, 0.5, 0.97});
        m.bits.resize(size);
        for (auto& bit : m.bits) bit = chance(random, share);
        if (size) {
            add({int64_t(masks::Operation::tensor), int64_t(tables.size())});
            tables.push_back(bits_table(m));
        }
    }
    if (count == 0) return;
    std::vector<int64_t> program{int64_t(masks::Operation::all), count};
    program.insert(program.end(), parts.begin(), parts.end());
    m.mask = masks::read_mask(program, tables, p.length_q, p.length_k);
    p.mask = m.mask.get();
}

inline void draw_bias(Random& random, Case& c) {
    Problem& p = c.problem;
    std::normal_distribution<double> normal;
    const auto number = [&] { return chance(random, 0.02) ? -kInfinity : normal(random); };
    Bias& bias = p.bias;
    if (chance(random, 0.4)) {
        const int64_t shape[4] = {chance(random, 0.5) ? p.batch : 1, chance(random, 0.5) ? p.heads : 1,
                                  chance(random, 0.7) ? p.length_q : 1, chance(random, 0.7) ? p.length_k : 1};
        bias.form = Bias::tensor, bias.type = chance(random, 0.5) ? Type::f32 : p.type;
        c.bias = Tensor(random, bias.type, shape[0], shape[1], shape[2], shape[3]);
        c.bias.fill(number);
        const Input input = c.bias.input();
        const auto step = [&](int axis) { return shape[axis] > 1 ? c.bias.stride[axis] : 0; };
        bias.data = input.data, bias.batch = step(0), bias.head = step(1), bias.row = step(2), bias.key = step(3);
        return;
    }
    bias.form = Bias::line;
    int64_t low = draw(random, -9, 9), high = low;
    bias.placement = low;
    if (chance(random, 0.5) && p.batch > 0) {
        for (int64_t b = 0; b < p.batch; b++) c.placements.push_back(draw(random, -9, 9));
        bias.placements = c.placements.data();
        low = *std::min_element(c.placements.begin(), c.placements.end());
        high = *std::max_element(c.placements.begin(), c.placements.end());
    }
    bias.least = -(p.length_q - 1) - high;
    bias.line_length = std::max<int64_t>(p.length_k - 1 - low - bias.least + 1, 0);
    c.lines.resize(p.heads * bias.line_length);
    for (auto& x : c.lines) x = static_cast<float>(number());
    bias.lines = c.lines.data();
}

// NaN where nobody may look: keys that no query of their item sees, and padded queries. Now and then one that some see.
inline void poison(Random& random, Case& c) {
    const Problem& p = c.problem;
    const auto seen = [&](int64_t b, int64_t j) {
        for (int64_t h = 0; h < p.heads; h++)
            for (int64_t i = 0; i < p.length_q; i++)
                if (c.masking.sees(b, h, i, j)) return true;
        return false;
    };
    const auto fill = [](Tensor& tensor, int64_t b, int64_t row) {
        for (int64_t h = 0; h < tensor.shape[1]; h++)
            for (int64_t x = 0; x < tensor.shape[3]; x++) tensor.put(b, h, row, x, kNan);
    };
    for (int64_t b = 0; b < p.batch; b++) {
        for (int64_t j = 0; j < p.length_k; j++)
            if (!seen(b, j)) fill(c.key, b, j), fill(c.value, b, j);
        if (!c.masking.row_lengths.empty())
            for (int64_t i = c.masking.row_lengths[b]; i < p.length_q; i++) fill(c.query, b, i), fill(c.d_out, b, i);
    }
    if (!chance(random, 0.2) || p.batch * p.length_k == 0) return;
    Tensor& tensor = chance(random, 0.5) ? c.key : c.value;
    tensor.put(draw(random, 0, p.batch - 1), draw(random, 0, p.kv_heads - 1), draw(random, 0, p.length_k - 1),
               draw(random, 0, tensor.shape[3] - 1), one_of<double>(random, {kNan, kInfinity, -kInfinity}));
}

inline void draw_shape(Random& random, Problem& p) {
    const auto length = [&] { return chance(random, 0.1) ? draw(random, 0, 1) : chance(random, 0.5) ? draw(random, 2, 50) : draw(random, 51, 210); };
    p.type = static_cast<Type>(draw(random, 0, 2));
    p.batch = chance(random, 0.05) ? 0 : draw(random, 1, 3);
    p.kv_heads = draw(random, 1, 3);
    p.heads = p.kv_heads * one_of<int64_t>(random, {1, 1, 2, 3});
    p.length_q = length(), p.length_k = length();
    if (chance(random, 0.2)) p.length_q = draw(random, 1, 5), p.length_k = draw(random, 0, 1600);  // decoding
    p.width = chance(random, 0.5) ? one_of<int64_t>(random, {8, 16, 32, 64, 80, 128}) : draw(random, 1, 70);
    p.value_width = chance(random, 0.5) ? p.width : draw(random, 1, 70);
    p.threads = int(draw(random, 1, 3));
}

inline Case draw_case(Random& random) {
    Case c;
    Problem& p = c.problem;
    draw_shape(random, p);
    p.scale = static_cast<float>(one_of<double>(random, {1 / std::sqrt(double(p.width)), 0.37, -0.2, 0.0, 1e-3}));
    if (chance(random, 0.2)) p.softcap = 3;
    if (chance(random, 0.6)) draw_mask(random, p, c.masking);
    if (chance(random, 0.4)) draw_bias(random, c);
    if (chance(random, 0.3)) {
        p.dropout.on = true, p.dropout.threshold = uint32_t(0.3 * 4294967296.0), p.dropout.factor = float(1 / 0.7);
        p.dropout.low = uint32_t(random()), p.dropout.high = uint32_t(random());
        p.dropout.row_origin = draw(random, 0, 99), p.dropout.key_origin = draw(random, 0, 99);
        p.dropout.head_origin = draw(random, 0, 9);
    }
    std::normal_distribution<double> normal;
    const auto number = [&] { return normal(random); };
    if (chance(random, 0.3)) {
        for (int64_t h = 0; h < p.heads; h++) c.sink.push_back(static_cast<float>(number()));
        p.sink = c.sink.data();
    }
    c.query = Tensor(random, p.type, p.batch, p.heads, p.length_q, p.width);
    c.key = Tensor(random, p.type, p.batch, p.kv_heads, p.length_k, p.width);
    c.value = Tensor(random, p.type, p.batch, p.kv_heads, p.length_k, p.value_width);
    c.d_out = Tensor(random, p.type, p.batch, p.heads, p.length_q, p.value_width);
    for (Tensor* tensor : {&c.query, &c.key, &c.value, &c.d_out}) tensor->fill(number);
    if (chance(random, 0.5))
        for (int64_t n = 0; n < p.batch * p.heads * p.length_q; n++) c.d_lse.push_back(static_cast<float>(number()));
    poison(random, c);
    return c;
}

}  // namespace saccade::sanitize

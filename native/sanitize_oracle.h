// What a problem's answer is, in plain double loops, and how large its terms are: the scale its rounding is judged by.
#pragma once

#include "sanitize_problem.h"

namespace saccade::sanitize {

// An array (B, H, L, W) of sums and of the sums of the terms' sizes.
struct Sums {
    int64_t heads = 0, length = 0, width = 0;
    std::vector<double> value, size;

    Sums(int64_t batch, int64_t heads, int64_t length, int64_t width)
        : heads(heads), length(length), width(width), value(batch * heads * length * width), size(value.size()) {}
    int64_t place(int64_t b, int64_t h, int64_t i, int64_t c) const { return ((b * heads + h) * length + i) * width + c; }
    void add(int64_t place, double term, double term_size) { value[place] += term, size[place] += term_size; }
};

inline uint32_t mix(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    return word ^ (word >> 16);
}

// saccade.Dropout.factor, in words of 32 bits.
inline double dropout_factor(const Dropout& d, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!d.on) return 1;
    const uint32_t head = mix(mix(uint32_t(b) ^ d.low) + uint32_t(h + d.head_origin)) ^ d.high;
    const uint32_t row = mix(mix(head) + uint32_t(i + d.row_origin)), again = mix(row ^ 0x9e3779b9u);
    return mix(mix(uint32_t(j + d.key_origin) ^ row) + again) >= d.threshold ? d.factor : 0;
}

// One query row: which keys it sees, and with what weights. Sigmoid attention's are its own, and it has no lse.
struct Row {
    std::vector<int64_t> keys;
    std::vector<double> weight, slope;  // after the sink's share, before dropout; d logit / d (scale * product)
    double lse = -kInfinity;            // without the sink
};

inline double bias_at(const Case& c, int64_t b, int64_t h, int64_t i, int64_t j) {
    const Bias& bias = c.problem.bias;
    if (bias.form == Bias::none) return 0;
    if (bias.form == Bias::line) return bias.lines[h * bias.line_length + j - i - bias.placed(b) - bias.least];
    return get(static_cast<const char*>(bias.data) + (b * bias.batch + h * bias.head + i * bias.row + j * bias.key) * size_of(bias.type),
               bias.type);
}

inline Row row_of(const Case& c, int64_t b, int64_t h, int64_t i) {
    const Problem& p = c.problem;
    Row row;
    double top = -kInfinity, sum = 0;
    for (int64_t j = 0; j < p.length_k; j++) {
        const double bias = c.masking.sees(b, h, i, j) ? bias_at(c, b, h, i, j) : -kInfinity;
        if (bias == -kInfinity) continue;
        double x = 0;
        for (int64_t d = 0; d < p.width; d++) x += c.query.at(b, h, i, d) * c.key.at(b, h / p.group(), j, d);
        x *= p.scale;
        if (p.sigmoid) x += x - x;  // of an infinite product NaN, before softcap would bend it to a number
        const double bent = p.softcap ? std::tanh(x / p.softcap) : 0;
        row.keys.push_back(j);
        row.slope.push_back(1 - bent * bent);
        row.weight.push_back((p.softcap ? p.softcap * bent : x) + bias);
        top = std::max(top, row.weight.back());
    }
    if (p.sigmoid) {
        const double n = p.sigmoid.at(b, h, i);
        for (double& x : row.weight) x = 1 / (1 + n * std::exp(-x));
        return row;
    }
    for (double& x : row.weight) sum += x = std::exp(x - top);
    if (!row.keys.empty()) row.lse = top + std::log(sum);
    const double whole = p.sink ? sum + std::exp(p.sink[h] - top) : sum;
    for (double& x : row.weight) x /= whole;
    return row;
}

struct Expected {
    Sums out, d_query, d_key, d_value, d_bias;
    std::vector<double> lse, delta, delta_size;

    // d_bias is (B, Hq, Lq, Lk) for a tensor, to be summed where it is broadcast, and (B, Hq, 1, line length) for a line.
    explicit Expected(const Case& c)
        : out(c.problem.batch, c.problem.heads, c.problem.length_q, c.problem.value_width),
          d_query(c.problem.batch, c.problem.heads, c.problem.length_q, c.problem.width),
          d_key(c.problem.batch, c.problem.kv_heads, c.problem.length_k, c.problem.width),
          d_value(c.problem.batch, c.problem.kv_heads, c.problem.length_k, c.problem.value_width),
          d_bias(c.problem.batch, c.problem.heads, c.problem.bias.form == Bias::line ? 1 : c.problem.length_q,
                 c.problem.bias.form == Bias::line ? c.problem.bias.line_length : c.problem.length_k) {
        const Problem& p = c.problem;
        for (int64_t b = 0; b < p.batch; b++)
            for (int64_t h = 0; h < p.heads; h++)
                for (int64_t i = 0; i < p.length_q; i++) add(c, b, h, i);
    }

  private:
    void add(const Case& c, int64_t b, int64_t h, int64_t i) {
        const Problem& p = c.problem;
        const Row row = row_of(c, b, h, i);
        const int64_t kv = h / p.group();
        double by_out = 0, by_out_size = 0;  // d_out . out
        for (int64_t x = 0; x < p.value_width && !row.keys.empty(); x++) {
            const int64_t place = out.place(b, h, i, x);
            for (size_t n = 0; n < row.keys.size(); n++) {
                const double factor = dropout_factor(p.dropout, b, h, i, row.keys[n]);
                const double term = row.weight[n] * factor * c.value.at(b, kv, row.keys[n], x);
                out.add(place, term, std::fabs(term));
            }
            by_out += c.d_out.at(b, h, i, x) * out.value[place];
            by_out_size += std::fabs(c.d_out.at(b, h, i, x)) * out.size[place];
        }
        const double cotangent = c.d_lse.empty() ? 0 : c.d_lse[(b * p.heads + h) * p.length_q + i];
        lse.push_back(row.lse);
        delta.push_back(p.sigmoid ? 0 : by_out - cotangent);
        delta_size.push_back(p.sigmoid ? 0 : by_out_size + std::fabs(cotangent));
        for (size_t n = 0; n < row.keys.size(); n++) add_pair(c, row, n, b, h, i);
    }

    void add_pair(const Case& c, const Row& row, size_t n, int64_t b, int64_t h, int64_t i) {
        const Problem& p = c.problem;
        const int64_t kv = h / p.group(), j = row.keys[n];
        const double factor = dropout_factor(p.dropout, b, h, i, j);
        double by_weight = 0, by_weight_size = 0;
        for (int64_t x = 0; x < p.value_width; x++) {
            const double term = factor * c.d_out.at(b, h, i, x) * c.value.at(b, kv, j, x);
            by_weight += term, by_weight_size += std::fabs(term);
            const double to_value = row.weight[n] * factor * c.d_out.at(b, h, i, x);
            d_value.add(d_value.place(b, kv, j, x), to_value, std::fabs(to_value));
        }
        const double steep = row.weight[n] * (p.sigmoid ? 1 - row.weight[n] : 1);
        const double to_logit = steep * (by_weight - delta.back()), size = row.weight[n] * (by_weight_size + delta_size.back());
        if (p.bias.form == Bias::line) d_bias.add(d_bias.place(b, h, 0, j - i - p.bias.placed(b) - p.bias.least), to_logit, size);
        else d_bias.add(d_bias.place(b, h, i, j), to_logit, size);
        const double to_product = to_logit * row.slope[n] * p.scale, product_size = size * std::fabs(p.scale);
        for (int64_t x = 0; x < p.width; x++) {
            const double q = c.query.at(b, h, i, x), k = c.key.at(b, kv, j, x);
            d_query.add(d_query.place(b, h, i, x), to_product * k, product_size * std::fabs(k));
            d_key.add(d_key.place(b, kv, j, x), to_product * q, product_size * std::fabs(q));
        }
    }
};

}  // namespace saccade::sanitize

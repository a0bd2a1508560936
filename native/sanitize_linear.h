// Causal linear attention, token by token in doubles, and the kernel's chunks and spans against it.
//
// Shape legend: B batch, Hq / Hkv heads, L length, M features, W value width.
#pragma once

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// A random call and the memory it reads. Everything beyond a tensor's entries and in tokens that are left out is NaN.
struct LinearCase {
    Linear call;
    Tensor query, key, value, d_out;
    std::vector<uint8_t> rows, keys;
    std::vector<float> log_scale, running, before, d_after;  // before, d_after: (B, Hkv, M, W + 1)

    explicit LinearCase(Random& random) {
        std::normal_distribution<double> normal;
        call.batch = draw(random, 1, 3), call.kv_heads = draw(random, 1, 3), call.heads = call.kv_heads * draw(random, 1, 3);
        call.length = chance(random, 0.1) ? draw(random, kLinearSpan - 1, 2 * kLinearSpan + 70) : draw(random, 1, 210);
        const bool far = call.length > 210;
        call.width = one_of<int64_t>(random, far ? std::vector<int64_t>{3, 17} : std::vector<int64_t>{1, 5, 16, 31, 64, 71});
        call.value_width = one_of<int64_t>(random, far ? std::vector<int64_t>{1, 19} : std::vector<int64_t>{1, 7, 16, 37, 64, 73});
        call.type = static_cast<Type>(draw(random, 0, 2)), call.map = static_cast<Linear::Map>(draw(random, 0, 1));
        call.normalise = chance(random, 0.6), call.threads = int(draw(random, 1, 3));
        call.least = call.normalise ? one_of<float>(random, {1e-6f, 3.0f}) : 0;
        query = Tensor(random, call.type, call.batch, call.heads, call.length, call.width);
        key = Tensor(random, call.type, call.batch, call.kv_heads, call.length, call.width);
        value = Tensor(random, call.type, call.batch, call.kv_heads, call.length, call.value_width);
        d_out = Tensor(random, call.type, call.batch, call.heads, call.length, call.value_width);
        // What divides is a sum of positive numbers, so that its rounding stays small beside it.
        const bool positive = call.normalise && call.map == Linear::identity;
        for (Tensor* tensor : {&query, &key}) tensor->fill([&] { return positive ? std::fabs(normal(random)) + 0.1 : normal(random); });
        for (Tensor* tensor : {&value, &d_out}) tensor->fill([&] { return normal(random); });
        leave_out(random, rows, call.rows, call.rows_batch, {&query, &d_out});
        leave_out(random, keys, call.keys, call.keys_batch, {&key, &value});
        const int64_t heads = call.batch * call.kv_heads;
        for (int64_t n = 0; n < heads * call.width * (call.value_width + 1); n++) {
            before.push_back(n % (call.value_width + 1) == call.value_width ? float(std::fabs(normal(random))) : float(normal(random)));
            d_after.push_back(float(normal(random)));
        }
        if (chance(random, 0.5)) return;
        for (int64_t n = 0; n < heads; n++)
            for (int64_t i = 0; i <= call.length; i++) {
                log_scale.push_back(chance(random, i ? 0.05 : 0.3) ? -float(kInfinity) : float(3 * normal(random)));
                running.push_back(i ? std::max(running.back(), log_scale.back()) : log_scale.back());
            }
        call.log_scale = log_scale.data(), call.running = running.data();
    }

    bool row(int64_t b, int64_t i) const { return rows.empty() || rows[b * call.rows_batch + i]; }
    bool key_kept(int64_t b, int64_t j) const { return keys.empty() || keys[b * call.keys_batch + j]; }
    // Of what stands in units of entry `from` (0: the state before, 1 + j: key j) in those of the greatest of the first 1 + `to`.
    double unit(const std::vector<float>& units, int64_t n, int64_t from, int64_t to) const {
        if (units.empty()) return 1;
        const double own = units[n * (call.length + 1) + from];
        return own == -kInfinity ? 0 : std::exp(own - running[n * (call.length + 1) + to]);
    }

  private:
    void leave_out(Random& random, std::vector<uint8_t>& kept, const uint8_t*& data, int64_t& stride, std::initializer_list<Tensor*> tensors) {
        if (chance(random, 0.5)) return;
        const int64_t items = chance(random, 0.5) ? call.batch : 1;
        for (int64_t n = 0; n < items * call.length; n++) kept.push_back(chance(random, 0.8));
        data = kept.data(), stride = items > 1 ? call.length : 0;
        for (Tensor* tensor : tensors)
            for (int64_t b = 0; b < call.batch; b++)
                for (int64_t h = 0; h < tensor->shape[1]; h++)
                    for (int64_t i = 0; i < call.length; i++)
                        for (int64_t x = 0; x < tensor->shape[3] && !kept[b * stride + i]; x++) tensor->put(b, h, i, x, kNan);
    }
};

// A sum, and the sum of its terms' sizes.
struct Sized {
    double value = 0, size = 0;
    void add(double term, double term_size) { value += term, size += term_size; }
    void times(double factor) { value *= factor, size *= factor; }
};

// Results of one call, or what they should be.
struct LinearExpected {
    Sums out, d_query, d_key, d_value, denominator, states, d_states;  // states: (B, Hkv, spans + 1, M (W + 1))

    explicit LinearExpected(const LinearCase& c)
        : out(c.call.batch, c.call.heads, c.call.length, c.call.value_width), d_query(c.call.batch, c.call.heads, c.call.length, c.call.width),
          d_key(c.call.batch, c.call.kv_heads, c.call.length, c.call.width), d_value(c.call.batch, c.call.kv_heads, c.call.length, c.call.value_width),
          denominator(c.call.batch, c.call.heads, c.call.length, 1),
          states(c.call.batch, c.call.kv_heads, c.call.spans() + 1, c.call.width * (c.call.value_width + 1)), d_states(states), c(c), p(c.call),
          line(p.value_width + 1) {
        for (int64_t b = 0; b < p.batch; b++)
            for (int64_t h = 0; h < p.kv_heads; h++) walk(b, h);
    }

  private:
    const LinearCase& c;
    const Linear& p;
    const int64_t line;

    double feature(const Tensor& tensor, bool kept, int64_t b, int64_t h, int64_t i, int64_t m) const {
        if (!kept) return 0;
        const double x = tensor.at(b, h, i, m);
        return p.map == Linear::identity ? x : x > 0 ? x + 1 : std::exp(x);
    }
    double slope(double feature) const { return p.map == Linear::identity ? 1 : std::min(feature, 1.0); }
    double value(int64_t b, int64_t h, int64_t j, int64_t x) const { return x == line - 1 ? 1 : c.key_kept(b, j) ? c.value.at(b, h, j, x) : 0; }

    void keep(Sums& to, int64_t b, int64_t h, int64_t span, const std::vector<Sized>& state) const {
        for (size_t n = 0; n < state.size(); n++) to.add(to.place(b, h, span, int64_t(n)), state[n].value, state[n].size);
    }

    // Forward with the sums after each token, [M][W + 1], the last column the denominator's; then backward.
    void walk(int64_t b, int64_t h) {
        const int64_t n = b * p.kv_heads + h, size = p.width * line;
        std::vector<std::vector<Sized>> all(p.length + 1, std::vector<Sized>(size));
        for (int64_t s = 0; s < size; s++) all[0][s].add(c.before[n * size + s], std::fabs(c.before[n * size + s]));
        keep(states, b, h, 0, all[0]);
        for (int64_t j = 0; j < p.length; j++) {
            std::vector<Sized>& state = all[j + 1] = all[j];
            for (Sized& one : state) one.times(c.unit(c.running, n, j, j + 1));
            for (int64_t m = 0; m < p.width; m++) {
                const double psi = feature(c.key, c.key_kept(b, j), b, h, j, m) * c.unit(c.log_scale, n, j + 1, j + 1);
                for (int64_t x = 0; x < line; x++) state[m * line + x].add(psi * value(b, h, j, x), std::fabs(psi * value(b, h, j, x)));
            }
            if ((j + 1) % kLinearSpan == 0 || j + 1 == p.length) keep(states, b, h, j / kLinearSpan + 1, state);
        }
        std::vector<Sized> later(size);  // gradient of the state after token i, and of what stands in it
        for (int64_t s = 0; s < size; s++) later[s].add(c.d_after[n * size + s], std::fabs(c.d_after[n * size + s]));
        keep(d_states, b, h, p.spans(), later);
        for (int64_t i = p.length - 1; i >= 0; i--) {
            if ((i + 1) % kLinearSpan == 0 && i + 1 < p.length) keep(d_states, b, h, (i + 1) / kLinearSpan, later);
            for (int64_t g = 0; g < p.heads / p.kv_heads; g++) add_row(b, h * (p.heads / p.kv_heads) + g, i, all[i + 1], later);
            add_key(b, h, i, c.unit(c.log_scale, n, i + 1, i + 1), later);
            for (Sized& one : later) one.times(c.unit(c.running, n, i, i + 1));
        }
        keep(d_states, b, h, 0, later);
    }

    // out and d_query of row i, and what it adds to the gradient of its state.
    void add_row(int64_t b, int64_t h, int64_t i, const std::vector<Sized>& state, std::vector<Sized>& later) {
        std::vector<Sized> read(line);
        std::vector<double> phi(p.width);
        for (int64_t m = 0; m < p.width; m++) {
            phi[m] = feature(c.query, c.row(b, i), b, h, i, m);
            for (int64_t x = 0; x < line; x++) read[x].add(phi[m] * state[m * line + x].value, std::fabs(phi[m]) * state[m * line + x].size);
        }
        const Sized sum = read[line - 1];
        denominator.add(denominator.place(b, h, i, 0), sum.value, sum.size);
        const bool live = !p.normalise || !(std::fabs(sum.value) < p.least);
        const double divisor = p.normalise ? sum.value : 1, strain = p.normalise ? sum.size / std::fabs(sum.value) : 1;
        Sized to_sum;  // gradient of the denominator
        std::vector<Sized> to(line);
        for (int64_t x = 0; x < p.value_width && live; x++) {
            const double got = read[x].value / divisor, size = read[x].size / std::fabs(divisor) * strain;
            const double cotangent = c.row(b, i) ? c.d_out.at(b, h, i, x) : 0;
            out.add(out.place(b, h, i, x), got, size);
            to[x].add(cotangent / divisor, std::fabs(cotangent / divisor) * strain);
            if (p.normalise) to_sum.add(-cotangent * got / divisor, std::fabs(cotangent / divisor) * size * strain);
        }
        to[line - 1] = to_sum;
        for (int64_t m = 0; m < p.width; m++) {
            Sized d_phi;
            for (int64_t x = 0; x < line; x++) {
                d_phi.add(state[m * line + x].value * to[x].value, state[m * line + x].size * to[x].size);
                later[m * line + x].add(phi[m] * to[x].value, std::fabs(phi[m]) * to[x].size);
            }
            d_query.add(d_query.place(b, h, i, m), d_phi.value * slope(phi[m]), d_phi.size * slope(phi[m]));
        }
    }

    void add_key(int64_t b, int64_t h, int64_t j, double unit, const std::vector<Sized>& later) {
        if (!c.key_kept(b, j)) return;
        for (int64_t m = 0; m < p.width; m++) {
            const double psi = feature(c.key, true, b, h, j, m);
            for (int64_t x = 0; x < line; x++) {
                const double factor = unit * slope(psi) * value(b, h, j, x), gradient = later[m * line + x].value, size = later[m * line + x].size;
                d_key.add(d_key.place(b, h, j, m), factor * gradient, std::fabs(factor) * size);
                if (x < p.value_width) d_value.add(d_value.place(b, h, j, x), unit * psi * gradient, std::fabs(unit * psi) * size);
            }
        }
    }
};

struct LinearRun {
    Tensor out, d_query, d_key, d_value;
    std::vector<float> denominator, states, d_states;

    LinearRun(const LinearCase& c, Random& random, int threads) {
        Linear call = c.call;
        const int64_t heads = call.batch * call.kv_heads, size = call.width * (call.value_width + 1), all = (call.spans() + 1) * size;
        call.threads = threads, call.query = c.query.input(), call.key = c.key.input(), call.value = c.value.input();
        out = Tensor(random, call.type, call.batch, call.heads, call.length, call.value_width);
        d_query = Tensor(random, call.type, call.batch, call.heads, call.length, call.width);
        d_key = Tensor(random, call.type, call.batch, call.kv_heads, call.length, call.width);
        d_value = Tensor(random, call.type, call.batch, call.kv_heads, call.length, call.value_width);
        denominator.assign(call.batch * call.heads * call.length, float(kNan));
        states.assign(heads * all, float(kNan)), d_states = states;
        for (int64_t n = 0; n < heads; n++) {
            std::copy_n(c.before.begin() + n * size, size, states.begin() + n * all);
            std::copy_n(c.d_after.begin() + n * size, size, d_states.begin() + n * all + all - size);
        }
        call.out = out.output(), call.denominator = denominator.data(), call.states = states.data();
        kernels().linear(call);
        call.out_read = out.input(), call.d_out = c.d_out.input(), call.d_states = d_states.data();
        call.d_query = d_query.output(), call.d_key = d_key.output(), call.d_value = d_value.output();
        kernels().linear(call);
    }
};

// `judge` as in sanitize.cpp.
template <class Judge> void check_linear_run(const LinearRun& run, const LinearExpected& expected, Judge& judge) {
    const auto numbers = [&](const char* what, const std::vector<float>& got, const Sums& want) {
        for (size_t n = 0; n < got.size(); n++) judge.near(what, got[n], want.value[n], want.size[n]);
    };
    judge.tensor("out", run.out, expected.out), numbers("denominator", run.denominator, expected.denominator);
    numbers("states", run.states, expected.states), numbers("d_states", run.d_states, expected.d_states);
    judge.tensor("d_query", run.d_query, expected.d_query);
    judge.tensor("d_key", run.d_key, expected.d_key), judge.tensor("d_value", run.d_value, expected.d_value);
}

}  // namespace saccade::sanitize

// Runs the kernels on random problems under the sanitizers and against plain loops: bash native/sanitize.sh
// Usage: sanitize [--openmp] [--cases N] [--seed N] [--workers N] [instruction set ...]
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "dispatch.h"
#include "parallel.h"
#include "sanitize_digest.h"
#include "sanitize_few_rows.h"
#include "sanitize_groups.h"
#include "sanitize_heads.h"
#include "sanitize_int8.h"
#include "sanitize_step.h"
#include "sanitize_linear.h"
#include "sanitize_oracle.h"
#include "sanitize_pooled.h"
#include "sanitize_program.h"
#include "sanitize_round_rows.h"
#include "sanitize_statistics.h"
#include "sanitize_weight_tile.h"

namespace saccade::sanitize {
namespace {

std::atomic<int> faults{0};

std::string describe(const Case& c, uint64_t seed) {
    const Problem& p = c.problem;
    char text[400];
    std::snprintf(text, sizeof text,
                  "seed %llu, %s: type %d, B %lld, Hq %lld, Hkv %lld, Lq %lld, Lk %lld, D %lld, Dv %lld, threads %d, scale %g, softcap %g, "
                  "bias %d, dropout %d, sink %d, sigmoid %d, mask: window %d (%lld, %lld, at %lld), residues %d, lengths %d, rows %d, bits %d",
                  (unsigned long long)seed, kernels().name, int(p.type), (long long)p.batch, (long long)p.heads, (long long)p.kv_heads,
                  (long long)p.length_q, (long long)p.length_k, (long long)p.width, (long long)p.value_width, p.threads, p.scale,
                  p.softcap, p.bias.form, p.dropout.on, p.sink != nullptr, bool(p.sigmoid), c.masking.window, (long long)c.masking.left,
                  (long long)c.masking.right, (long long)c.masking.offset, int(c.masking.residues.size()), !c.masking.key_lengths.empty(),
                  !c.masking.row_lengths.empty(), !c.masking.bits.empty());
    return text;
}

std::string describe(const LinearCase& c, uint64_t seed) {
    const Linear& p = c.call;
    char text[300];
    std::snprintf(text, sizeof text,
                  "seed %llu, %s: type %d, B %lld, Hq %lld, Hkv %lld, L %lld, M %lld, W %lld, threads %d, map %d, normalised %d (%g), rows %d, "
                  "keys %d, scales %d",
                  (unsigned long long)seed, kernels().name, int(p.type), (long long)p.batch, (long long)p.heads, (long long)p.kv_heads,
                  (long long)p.length, (long long)p.width, (long long)p.value_width, p.threads, int(p.map), p.normalise, p.least,
                  p.rows != nullptr, p.keys != nullptr, p.running != nullptr);
    return text;
}

// One problem and one kernel, judged.
class Judge {
  public:
    Judge(const Case& c, uint64_t seed, const char* kernel)
        : type_(c.problem.type), kernel_(kernel), describe_([&c, seed] { return describe(c, seed); }) {}
    Judge(const LinearCase& c, uint64_t seed) : type_(c.call.type), kernel_("linear"), describe_([&c, seed] { return describe(c, seed); }) {}

    void fault(const char* what, double got, double want, double allowed) {
        if (said_) return;
        said_ = true;
        faults++;
        std::printf("%s: %s is %.9g, not %.9g +- %.2g (%s)\n", kernel_, what, got, want, allowed, describe_().c_str());
        std::fflush(stdout);
    }

    // `size` bounds the sum of the terms' sizes. Where the answer is not finite only the sanitizers judge.
    void near(const char* what, double got, double want, double size) {
        static constexpr double relative[] = {3e-5, 0.03, 3e-3};
        const double allowed = relative[int(type_)] * size + 1e-6;
        if (std::isfinite(want) && !(std::fabs(got - want) <= allowed)) fault(what, got, want, allowed);
    }

    void tensor(const char* what, const Tensor& got, const Sums& want) {
        for (int64_t b = 0; b < got.shape[0]; b++)
            for (int64_t h = 0; h < got.shape[1]; h++)
                for (int64_t i = 0; i < got.shape[2]; i++)
                    for (int64_t x = 0; x < got.shape[3]; x++) {
                        const int64_t place = want.place(b, h, i, x);
                        near(what, got.at(b, h, i, x), want.value[place], want.size[place]);
                    }
        if (!got.gaps_are_whole()) fault(what, 1, 0, 0);
    }

    void lse(const std::vector<float>& got, const std::vector<double>& want) {
        for (size_t n = 0; n < want.size(); n++)
            if (want[n] == -kInfinity ? got[n] != want[n] : std::isfinite(want[n]) && !(std::fabs(got[n] - want[n]) <= 1e-4))
                fault("lse", got[n], want[n], 1e-4);
    }

  private:
    Type type_;
    const char* kernel_;
    std::function<std::string()> describe_;
    bool said_ = false;
};

struct ForwardRun {
    Tensor out;
    std::vector<float> lse, low;

    ForwardRun(const Case& c, Random& random, void (*kernel)(const Forward&)) {
        const Problem& p = c.problem;
        out = Tensor(random, p.type, p.batch, p.heads, p.length_q, p.value_width);
        lse.assign(p.batch * p.heads * p.length_q, float(kNan));
        low = lse;
        Forward call;
        call.problem = p;
        call.query = c.query.input(), call.key = c.key.input(), call.value = c.value.input();
        call.out = out.output();
        if (!p.sigmoid) call.lse = lse.data(), call.lse_low = low.data();
        kernel(call);
    }
};

template <class T> bool same(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

void check_forward(Case& c, uint64_t seed, const Expected& expected, const char* name, void (*kernel)(const Forward&)) {
    Random random(seed);
    Judge judge(c, seed, name);
    const ForwardRun run(c, random, kernel);
    judge.tensor("out", run.out, expected.out);
    if (!c.problem.sigmoid) judge.lse(run.lse, expected.lse);
    const int threads = std::exchange(c.problem.threads, 1);
    random.seed(seed);
    const ForwardRun alone(c, random, kernel);
    c.problem.threads = threads;
    if (!same(run.out.bytes(), alone.out.bytes()) || !same(run.lse, alone.lse)) judge.fault("differs by threads", 1, 0, 0);
}

// d_bias as the contract of `Backward` lays it out: summed over the batch and the heads only where rows and keys are kept.
struct BiasGradient {
    int64_t shape[4] = {}, stride[4] = {};
    std::vector<float> data;

    explicit BiasGradient(const Case& c) {
        const Problem& p = c.problem;
        const int64_t whole[4] = {p.batch, p.heads, p.length_q, p.length_k};
        const bool line = p.bias.form == Bias::line, summed = c.bias.shape[2] == p.length_q && c.bias.shape[3] == p.length_k;
        int64_t size = 1;
        for (int axis = 3; axis >= 0; axis--) {
            shape[axis] = axis < 2 && !summed ? whole[axis] : c.bias.shape[axis];
            stride[axis] = shape[axis] > 1 ? size : 0;
            size *= shape[axis];
        }
        data.assign(line ? p.batch * p.heads * p.bias.line_length : size, 0.0f);
    }

    void judge(Judge& judge, const Case& c, const Sums& want) const {
        const Problem& p = c.problem;
        if (p.bias.form == Bias::line) {
            for (size_t n = 0; n < data.size(); n++) judge.near("d_bias", data[n], want.value[n], want.size[n]);
            return;
        }
        Sums all(1, 1, 1, int64_t(data.size()));
        for (int64_t b = 0; b < p.batch; b++)
            for (int64_t h = 0; h < p.heads; h++)
                for (int64_t i = 0; i < p.length_q; i++)
                    for (int64_t j = 0; j < p.length_k; j++) {
                        const int64_t from = want.place(b, h, i, j);
                        all.add(b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3], want.value[from], want.size[from]);
                    }
        for (size_t n = 0; n < data.size(); n++) judge.near("d_bias", data[n], all.value[n], all.size[n]);
    }
};

struct BackwardRun {
    Tensor d_query, d_key, d_value;
    std::vector<float> delta;
    BiasGradient d_bias;

    BackwardRun(const Case& c, Random& random, const ForwardRun& forward, bool queries, bool keys, bool bias) : d_bias(c) {
        const Problem& p = c.problem;
        d_query = Tensor(random, p.type, p.batch, p.heads, p.length_q, p.width);
        d_key = Tensor(random, p.type, p.batch, p.kv_heads, p.length_k, p.width);
        d_value = Tensor(random, p.type, p.batch, p.kv_heads, p.length_k, p.value_width);
        delta.assign(forward.lse.size(), float(kNan));
        compute(c, forward, queries, keys, [&](Backward& call) {
            if (!bias) return;
            call.d_bias = d_bias.data.data();
            call.d_bias_batch = d_bias.stride[0], call.d_bias_head = d_bias.stride[1];
            call.d_bias_row = d_bias.stride[2], call.d_bias_key = d_bias.stride[3];
        });
    }

    template <class Set> void compute(const Case& c, const ForwardRun& forward, bool queries, bool keys, Set&& set) {
        const Problem& p = c.problem;
        Backward call;
        call.problem = p;
        call.query = c.query.input(), call.key = c.key.input(), call.value = c.value.input();
        call.d_out = c.d_out.input();
        if (!p.sigmoid) {
            call.out = forward.out.input(), call.lse = forward.lse.data(), call.lse_low = forward.low.data();
            call.d_lse = c.d_lse.empty() ? nullptr : c.d_lse.data(), call.delta = delta.data();
        }
        if (queries) call.d_query = d_query.output();
        if (keys) call.d_key = d_key.output(), call.d_value = d_value.output();
        set(call);
        kernels().backward(call);
    }
};

// The same numbers of a bias that is stated as a program.
void check_program(Case& c, uint64_t seed, const Expected& expected) {
    const Bias meant = c.problem.bias;
    if (meant.form == Bias::none || (meant.form == Bias::tensor && meant.type != Type::f32) || !c.problem.length_k) return;
    Random choices(~seed);  // not `seed`: its first number has drawn the type already
    ProgramForm form(c, chance(choices, 0.5) || hides_poison(c));
    if (form.entries.empty()) return;
    const auto compute = [&](int threads) {
        Random random(seed);
        const int before = std::exchange(c.problem.threads, threads);
        c.problem.bias = form.bias(meant);
        ForwardRun forward(c, random, kernels().forward);
        c.problem.bias = meant;
        BackwardRun run(c, random, forward, true, true, false);
        run.d_bias.data.assign(form.entries.size(), 0.0f);
        c.problem.bias = form.bias(meant);
        run.compute(c, forward, true, true, [&](Backward& call) {
            call.d_bias = run.d_bias.data.data(), call.d_bias_size = int64_t(form.entries.size());
            call.d_bias_batch = form.batch, call.d_bias_head = form.head;
        });
        c.problem.bias = meant;
        c.problem.threads = before;
        return std::make_pair(std::move(forward), std::move(run));
    };
    const auto [forward, run] = compute(c.problem.threads);
    Judge judge(c, seed, "program");
    judge.tensor("out", forward.out, expected.out);
    if (c.problem.length_q * c.problem.group() <= 16) {
        c.problem.bias = form.bias(meant);
        check_forward(c, seed, expected, "program decode", kernels().decode);
        c.problem.bias = meant;
    }
    judge.tensor("d_query", run.d_query, expected.d_query);
    judge.tensor("d_key", run.d_key, expected.d_key), judge.tensor("d_value", run.d_value, expected.d_value);
    Sums all(1, 1, 1, int64_t(form.entries.size()));
    const Problem& p = c.problem;
    const bool line = meant.form == Bias::line;
    const auto step = [&](int axis, int64_t n) { return c.bias.shape[axis] > 1 ? n : 0; };
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t h = 0; h < p.heads; h++)
            for (int64_t i = 0; i < (line ? 1 : p.length_q); i++)
                for (int64_t j = 0; j < (line ? meant.line_length : p.length_k); j++) {
                    const int64_t from = expected.d_bias.place(b, h, i, j);
                    const int64_t to = line ? h * meant.line_length + j
                                            : ((step(0, b) * c.bias.shape[1] + step(1, h)) * c.bias.shape[2] + step(2, i)) * c.bias.shape[3] + step(3, j);
                    all.add(to, expected.d_bias.value[from], expected.d_bias.size[from]);
                }
    for (size_t n = 0; n < form.entries.size(); n++) judge.near("d_table", run.d_bias.data[n], all.value[n], all.size[n]);
    const auto [forward_alone, alone] = compute(1);
    if (!same(forward.out.bytes(), forward_alone.out.bytes()) || !same(run.d_query.bytes(), alone.d_query.bytes()) ||
        !same(run.d_key.bytes(), alone.d_key.bytes()) || !same(run.d_value.bytes(), alone.d_value.bytes()) ||
        !same(run.d_bias.data, alone.d_bias.data))
        judge.fault("differs by threads", 1, 0, 0);
}

void check_backward(Case& c, uint64_t seed, const Expected& expected) {
    Random choices(seed);
    const bool queries = chance(choices, 0.8), keys = chance(choices, 0.8), bias = c.problem.bias.form != Bias::none && chance(choices, 0.8);
    const auto compute = [&] {
        Random random(seed);
        const ForwardRun forward(c, random, kernels().forward);
        return BackwardRun(c, random, forward, queries, keys, bias);
    };
    const BackwardRun run = compute();
    Judge judge(c, seed, "backward");
    if (queries) judge.tensor("d_query", run.d_query, expected.d_query);
    if (keys) judge.tensor("d_key", run.d_key, expected.d_key), judge.tensor("d_value", run.d_value, expected.d_value);
    if (bias) run.d_bias.judge(judge, c, expected.d_bias);
    for (size_t n = 0; n < run.delta.size() && !c.problem.sigmoid; n++) judge.near("delta", run.delta[n], expected.delta[n], expected.delta_size[n]);
    const int threads = std::exchange(c.problem.threads, 1);
    const BackwardRun alone = compute();
    c.problem.threads = threads;
    if (!same(run.d_query.bytes(), alone.d_query.bytes()) || !same(run.d_key.bytes(), alone.d_key.bytes()) ||
        !same(run.d_value.bytes(), alone.d_value.bytes()) || !same(run.d_bias.data, alone.d_bias.data))
        judge.fault("differs by threads", 1, 0, 0);
}

void check_statistics(const Case& c, uint64_t seed) {
    const auto compute = [&](int threads) {
        Random random(seed);
        return StatisticsRun(c, random, threads);
    };
    const StatisticsRun run = compute(c.problem.threads), alone = compute(1);
    Judge judge(c, seed, "statistics");
    StatisticsCheck<Judge>(c, run, judge);
    if (!same(run.numbers, alone.numbers) || !same(run.mass, alone.mass) || !same(run.received, alone.received) ||
        !same(run.top_weights, alone.top_weights) || !same(run.top_keys, alone.top_keys) || !same(run.largest_at, alone.largest_at))
        judge.fault("differs by threads", 1, 0, 0);
}

void check_pooled(const Case& c, uint64_t seed) {
    const auto compute = [&](int threads) {
        Random random(seed);
        return PooledRun(c, random, threads);
    };
    const PooledRun run = compute(c.problem.threads), alone = compute(1);
    Judge judge(c, seed, "pooled");
    check_pooled_run(c, run, judge);
    if (!same(run.out, alone.out)) judge.fault("differs by threads", 1, 0, 0);
}

void check_weight_tile(const Case& c, uint64_t seed) {
    const auto compute = [&](int threads) {
        Random random(seed);
        return WeightTileRun(c, random, threads);
    };
    const WeightTileRun run = compute(c.problem.threads), alone = compute(1);
    Judge judge(c, seed, "weight tile");
    check_weight_tile_run(c, run, judge);
    if (!same(run.all, alone.all) || !same(run.products, alone.products)) judge.fault("differs by threads", 1, 0, 0);
}

void check_few_rows(const Case& c, uint64_t seed) {
    const auto compute = [&](int threads) {
        Random random(seed);
        return FewRowsRun(random, threads);
    };
    const FewRowsRun run = compute(c.problem.threads), alone = compute(1);
    Judge judge(c, seed, "few rows");
    check_few_rows_run(run, judge);
    if (!same(run.out, alone.out)) judge.fault("differs by threads", 1, 0, 0);
}

// Products of bytes, with one thread and several.
template <class Run, class Product> void check_bytes(const Case& c, uint64_t seed, const char* name, Product product) {
    const auto compute = [&](int threads) {
        Random random(seed);
        return Run(random, threads, product);
    };
    const Run run = compute(c.problem.threads), alone = compute(1);
    Judge judge(c, seed, name);
    check_run(run, judge);
    if (!same(run.out, alone.out)) judge.fault("differs by threads", 1, 0, 0);
}

void check_step(const Case& c, uint64_t seed) {
    Random random(seed), again(seed);
    const StepRun run(random, c.problem.threads), alone(again, 1);
    Judge judge(c, seed, "step");
    check_step_run(run, judge);
    if (!same(run.out, alone.out)) judge.fault("differs by threads", 1, 0, 0);
}

// The same problem with sigmoid's weights; n is how many keys each row sees, or a number for all rows that see any.
void check_sigmoid(Case& c, uint64_t seed) {
    Random random(seed);
    Problem& p = c.problem;
    p.sink = nullptr, c.d_lse.clear();
    c.counts.assign(p.batch * p.heads * p.length_q, float(kNan));
    KeyCounts call;
    call.problem = p, call.batch = p.batch, call.heads = p.heads, call.out = c.counts.data();
    kernels().key_counts(call);
    Judge judge(c, seed, "key counts");
    for (int64_t n = 0; n < int64_t(c.counts.size()); n++) {
        const int64_t b = n / p.length_q / p.heads, h = n / p.length_q % p.heads, i = n % p.length_q;
        int64_t want = 0;
        for (int64_t j = 0; j < p.length_k; j++)
            want += c.masking.sees(b, h, i, j) && !(p.bias.form == Bias::tensor && bias_at(c, b, h, i, j) == -kInfinity);
        if (c.counts[n] != float(want)) judge.fault("count", c.counts[n], double(want), 0);
    }
    if (chance(random, 0.3))
        for (float& count : c.counts) count = count > 0 ? 7 : 0;
    p.sigmoid = {c.counts.data(), p.heads * p.length_q, p.length_q};
    const bool same_rows = !p.mask && p.bias.form != Bias::tensor;
    if (same_rows && chance(random, 0.5)) p.sigmoid.batch = p.sigmoid.head = 0;
    const Expected expected(c);
    check_forward(c, seed, expected, "sigmoid", kernels().forward);
    if (p.length_q * p.group() <= 16) check_forward(c, seed, expected, "sigmoid decode", kernels().decode);
    check_backward(c, seed, expected);
    check_program(c, seed, expected);
}

void check_int8_rows(uint64_t seed) {
    Random random(seed);
    Case c = draw_case(random);
    const Problem& p = c.problem;
    Judge judge(c, seed, "int8 rows");
    const RoundedRows key(random, c.key), value(random, c.value);
    if (!key.near || !value.near) judge.fault("a rounded row", 1, 0, 0);
    if (p.length_q * p.group() > 16) return;
    Tensor out(random, p.type, p.batch, p.heads, p.length_q, p.value_width);
    std::vector<float> lse(p.batch * p.heads * p.length_q, float(kNan));
    Forward call;
    call.problem = p, call.int8_rows = true, call.quads = sums_quads() && chance(random, 0.7);
    call.query = c.query.input(), call.key = key.input, call.value = value.input;
    call.out = out.output(), call.lse = lse.data();
    kernels().decode(call);
    const Expected expected(c);
    judge.tensor("out", out, expected.out), judge.lse(lse, expected.lse);
}

void check_linear(uint64_t seed) {
    Random random(seed);
    const LinearCase c(random);
    const auto compute = [&](int threads) {
        Random random(seed);
        return LinearRun(c, random, threads);
    };
    const LinearRun run = compute(c.call.threads), alone = compute(1);
    Judge judge(c, seed);
    check_linear_run(run, LinearExpected(c), judge);
    if (!same(run.out.bytes(), alone.out.bytes()) || !same(run.states, alone.states) || !same(run.d_states, alone.d_states) ||
        !same(run.d_query.bytes(), alone.d_query.bytes()) || !same(run.d_key.bytes(), alone.d_key.bytes()) ||
        !same(run.d_value.bytes(), alone.d_value.bytes()))
        judge.fault("differs by threads", 1, 0, 0);
}

void check_exp2(uint64_t seed) {
    Random random(seed);
    const int64_t count = draw(random, 0, 70);
    std::vector<float> from(count), to(count, float(kNan));
    for (auto& x : from) x = std::uniform_real_distribution<float>(-126, 100)(random);
    kernels().exp2(from.data(), to.data(), count);
    for (int64_t n = 0; n < count; n++)
        if (!(std::fabs(to[n] / std::exp2(double(from[n])) - 1) < 1e-6)) faults++, std::printf("exp2(%g) is %g\n", from[n], to[n]);
}

void check_heads(uint64_t seed) {
    for (const std::string& fault : {fault_of_linear_step(seed), fault_of_head_ranges(seed)})
        if (!fault.empty()) faults++, std::printf("%s (%s, seed %llu)\n", fault.c_str(), kernels().name, (unsigned long long)seed);
}

void check_digest(uint64_t seed) {
    const std::string fault = fault_of_digest(seed);
    if (!fault.empty()) faults++, std::printf("%s (seed %llu)\n", fault.c_str(), (unsigned long long)seed);
}

void check(uint64_t seed) {
    Random random(seed);
    Case c = draw_case(random);
    const Problem& p = c.problem;
    const Expected expected(c);
    const Kernels& set = kernels();
    if (set.forward) check_forward(c, seed, expected, "forward", set.forward);
    if (set.decode && p.length_q * p.group() <= 16) check_forward(c, seed, expected, "decode", set.decode);
    if (set.forward && set.backward) check_backward(c, seed, expected), check_program(c, seed, expected);
    if (set.statistics) check_statistics(c, seed);
    if (set.round_rows && set.decode) check_int8_rows(seed);
    if (set.pooled && p.batch && p.length_q && p.length_k) check_pooled(c, seed);
    if (set.weight_tile && p.batch && p.length_q && p.length_k) check_weight_tile(c, seed);
    if (set.few_rows) check_few_rows(c, seed);
    if (set.int8_product) check_bytes<Int8Run>(c, seed, "int8", set.int8_product);
    if (set.int8_product_quads && sums_quads()) check_bytes<Int8Run>(c, seed, "int8 by quads", set.int8_product_quads);
    if (set.int8_product_tiles && sums_tiles()) check_bytes<Int8Run>(c, seed, "int8 by tiles", set.int8_product_tiles);
    if (set.step) check_step(c, seed);
    if (set.group_product) check_bytes<GroupRun>(c, seed, "groups", set.group_product);
    if (set.group_product_quads && sums_quads()) check_bytes<GroupRun>(c, seed, "groups by quads", set.group_product_quads);
    if (set.exp2) check_exp2(seed);
    check_digest(seed);
    if (set.linear_step && set.head_ranges) check_heads(seed);
    if (set.linear && seed % 4 == 0) check_linear(seed);
    if (set.key_counts && seed % 2 == 0) check_sigmoid(c, seed);  // changes the case
}

// What the benchmark calls: only that it stays within its memory.
void check_limits() {
    const std::unique_ptr<char[]> data(new char[100003]());
    if (kernels().peak_f32) kernels().peak_f32(2, 1);
    if (kernels().peak_bf16) kernels().peak_bf16(2, 1);
    if (kernels().read_bandwidth) kernels().read_bandwidth(data.get(), 100003, 2);
}

// An exception of a task comes out on the caller's thread.
void check_failure() {
    bool caught = false;
    try {
        parallel(3, 100, [](int64_t n, int) {
            if (n % 7 == 5) throw std::bad_alloc();
        });
    } catch (const std::bad_alloc&) {
        caught = true;
    }
    if (!caught) faults++, std::printf("parallel: an exception was lost\n");
}

void run(const std::string& set, uint64_t seed, int64_t cases, int workers) {
    use(set);
    std::atomic<int64_t> next{0};
    std::vector<std::thread> team;
    for (int n = 0; n < workers; n++)
        team.emplace_back([&] {
            for (int64_t n; (n = next++) < cases;) check(seed + uint64_t(n));
        });
    for (auto& thread : team) thread.join();
    check_limits();
    std::printf("%s: %lld problems, %d faults so far\n", set.c_str(), (long long)cases, faults.load());
    std::fflush(stdout);
}

}  // namespace
}  // namespace saccade::sanitize

int main(int count, char** words) {
    using namespace saccade;
    int64_t cases = 300, seed = 1, workers = 2;
    std::vector<std::string> sets;
    for (int n = 1; n < count; n++) {
        const std::string word = words[n];
        if (word == "--openmp") {
            if (!dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL)) return std::printf("no libgomp.so.1\n"), 2;
        } else if ((word == "--cases" || word == "--seed" || word == "--workers") && n + 1 < count) {
            (word == "--cases" ? cases : word == "--seed" ? seed : workers) = std::atoll(words[++n]);
        } else {
            sets.push_back(word);
        }
    }
    if (sets.empty()) sets = supported_sets();
    sanitize::check_failure();
    for (const auto& set : sets) sanitize::run(set, uint64_t(seed), cases, int(workers));
    return sanitize::faults ? 1 : 0;
}

// Pooled weights in plain double loops, and the kernel's against them.
#pragma once

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// One call of the kernel on a case: which part of which head, in which bins, and the memory it writes.
struct PooledRun {
    Pooled call;
    std::vector<int64_t> listed;
    std::vector<double> lse, row_lse;
    std::vector<float> out;

    PooledRun(const Case& c, Random& random, int threads) {
        const Problem& p = c.problem;
        call.problem = p, call.problem.threads = threads;
        call.query = c.query.input(), call.key = c.key.input();
        call.item = draw(random, 0, p.batch - 1), call.head = draw(random, 0, p.heads - 1);
        call.key_bin = int64_t(1) << draw(random, 0, 7), call.row_bin = draw(random, 1, 70);
        const int64_t unit = std::max<int64_t>(16, call.key_bin);
        call.key_start = unit * draw(random, 0, p.length_k / unit);
        const int64_t stop = 16 * draw(random, call.key_start / 16, p.length_k / 16);
        call.key_stop = chance(random, 0.5) ? p.length_k : stop;
        if (chance(random, 0.4)) {
            for (int64_t n = draw(random, 0, 60); n > 0 && p.length_q; n--) listed.push_back(draw(random, 0, p.length_q - 1));
            call.row_count = int64_t(listed.size());
        } else {
            call.row_start = draw(random, 0, p.length_q), call.row_count = draw(random, 0, p.length_q - call.row_start);
        }
        if (!listed.empty()) call.rows = listed.data();
        call.logits = chance(random, 0.2);
        if (chance(random, 0.5)) {
            for (int64_t i = 0; i < p.length_q; i++) lse.push_back(whole_lse(c, row_of(c, call.item, call.head, i)));
            call.lse = lse.data();
        }
        out.assign(3 * lines() * columns(), float(kNan));
        call.out = out.data();
        if (!call.lse && !call.logits && chance(random, 0.7)) {
            row_lse.assign(call.row_count, kNan);
            call.row_lse = row_lse.data();
            if (chance(random, 0.3)) out.clear(), call.out = nullptr;
        }
        kernels().pooled(call);
    }

    int64_t lines() const { return (call.row_count + call.row_bin - 1) / call.row_bin; }
    int64_t columns() const { return call.key_start < call.key_stop ? (call.key_stop - call.key_start + call.key_bin - 1) / call.key_bin : 0; }
    int64_t row(int64_t n) const { return listed.empty() ? call.row_start + n : listed[n]; }

    double whole_lse(const Case& c, const Row& row) const {
        const double sink = c.problem.sink ? c.problem.sink[call.head] : -kInfinity;
        const double top = std::max(row.lse, sink);
        return row.keys.empty() ? -kInfinity : top + std::log(std::exp(row.lse - top) + std::exp(sink - top));
    }
};

// `judge.near(what, got, want, size)` and `judge.fault(...)` as in sanitize.cpp.
template <class Judge> void check_pooled_run(const Case& c, const PooledRun& run, Judge& judge) {
    const int64_t plane = run.lines() * run.columns();
    std::vector<double> sums(plane), sizes(plane), largest(plane, -kInfinity), counts(plane);
    for (int64_t n = 0; n < run.call.row_count; n++) {
        const Row row = row_of(c, run.call.item, run.call.head, run.row(n));
        for (size_t m = 0; m < row.keys.size(); m++) {
            const int64_t j = row.keys[m];
            if (j < run.call.key_start || j >= run.call.key_stop) continue;
            const int64_t at = n / run.call.row_bin * run.columns() + (j - run.call.key_start) / run.call.key_bin;
            const double share = c.problem.sink ? std::exp(row.lse) / (std::exp(row.lse) + std::exp(c.problem.sink[run.call.head])) : 1;
            const double value = run.call.logits ? std::log(row.weight[m] / share) + row.lse : row.weight[m];
            sums[at] += value, sizes[at] += std::fabs(value), largest[at] = std::max(largest[at], value), counts[at]++;
        }
    }
    for (size_t n = 0; n < run.row_lse.size(); n++) {
        const double want = run.whole_lse(c, row_of(c, run.call.item, run.call.head, run.row(n))), got = run.row_lse[n];
        if (want == -kInfinity ? got != want : std::isfinite(want) && !(std::fabs(got - want) <= 1e-4)) judge.fault("row lse", got, want, 1e-4);
    }
    const double unit = run.call.logits ? 30 : 0;  // a logit is known as well as its terms are large
    for (int64_t at = 0; at < plane; at++) {
        if (run.out.empty()) break;
        if (!std::isfinite(sums[at])) continue;
        judge.near("sum", run.out[at], sums[at], sizes[at] + unit * counts[at]);
        if (run.out[2 * plane + at] != counts[at]) judge.fault("count", run.out[2 * plane + at], counts[at], 0);
        if (counts[at] != 0) judge.near("largest", run.out[plane + at], largest[at], std::fabs(largest[at]) + unit);
        else if (run.out[plane + at] != -kInfinity) judge.fault("largest of nothing", run.out[plane + at], -kInfinity, 0);
    }
}

}  // namespace saccade::sanitize

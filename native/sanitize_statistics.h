// Statistics of the weights in plain double loops, and the kernel's against them.
//
// Shape legend: B batch, Hq query heads, Lq / Lk lengths.
#pragma once

#include <string>

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// One call of the kernel on a case: what else it is asked, and the memory it writes.
struct StatisticsRun {
    int64_t top, placement;
    bool with_received;
    std::vector<int64_t> placements, first, largest_at, nonfinite, nonfinite_at, top_keys;
    std::vector<uint8_t> members;
    int64_t groups;
    std::vector<float> numbers, mass, top_weights, received;

    StatisticsRun(const Case& c, Random& random, int threads) {
        const Problem& p = c.problem;
        top = chance(random, 0.5) ? draw(random, 1, 32) : 0, placement = draw(random, -9, p.length_k);
        with_received = chance(random, 0.6), groups = draw(random, 0, 3);
        const bool by_item = chance(random, 0.5);
        for (int64_t b = 0; b < p.batch; b++) {
            first.push_back(draw(random, -1, p.length_k - 1));
            if (by_item) placements.push_back(draw(random, -9, p.length_k));
        }
        members.resize(groups * p.batch * p.length_k);
        for (auto& x : members) x = chance(random, 0.2);
        const int64_t rows = p.batch * p.heads * p.length_q;
        numbers.assign(Statistics::numbers_count * rows, float(kNan)), mass.assign(groups * rows, float(kNan));
        for (auto* x : {&largest_at, &nonfinite, &nonfinite_at}) x->assign(rows, -99);
        top_keys.assign(top * rows, -99), top_weights.assign(top * rows, float(kNan));
        if (with_received) received.assign(p.batch * p.heads * p.length_k, float(kNan));
        compute(c, threads);
    }

    float number(Statistics::Number which, int64_t row) const { return numbers[which * largest_at.size() + row]; }
    int64_t placed(int64_t b) const { return placements.empty() ? placement : placements[b]; }

  private:
    void compute(const Case& c, int threads) {
        Statistics call;
        call.problem = c.problem, call.problem.threads = threads;
        call.query = c.query.input(), call.key = c.key.input();
        call.placement = placement, call.placements = placements.empty() ? nullptr : placements.data();
        call.first = first.data();
        call.groups.data = members.data(), call.groups.count = groups, call.groups.mass = mass.data();
        call.groups.group = c.problem.batch * c.problem.length_k, call.groups.batch = c.problem.length_k;
        call.numbers = numbers.data(), call.largest_at = largest_at.data();
        call.nonfinite = nonfinite.data(), call.nonfinite_at = nonfinite_at.data();
        call.top = top, call.top_weights = top_weights.data(), call.top_keys = top_keys.data();
        call.received = with_received ? received.data() : nullptr;
        kernels().statistics(call);
    }
};

// `judge.near(what, got, want, size)` and `judge.fault(...)` as in sanitize.cpp.
template <class Judge> class StatisticsCheck {
  public:
    StatisticsCheck(const Case& c, const StatisticsRun& run, Judge& judge) : c(c), p(c.problem), run(run), judge(judge), received(p.batch * p.heads * p.length_k) {
        for (int64_t b = 0; b < p.batch; b++)
            for (int64_t h = 0; h < p.heads; h++)
                for (int64_t i = 0; i < p.length_q; i++) check(b, h, i);
        if (!run.with_received) return;
        for (size_t n = 0; n < received.size(); n++) judge.near("received", run.received[n], received[n], received[n]);
    }

  private:
    const Case& c;
    const Problem& p;
    const StatisticsRun& run;
    Judge& judge;
    std::vector<double> received;

    void check(int64_t b, int64_t h, int64_t i) {
        const Row row = row_of(c, b, h, i);
        const int64_t place = (b * p.heads + h) * p.length_q + i, own = i + run.placed(b);
        const auto number = [&](Statistics::Number which) { return run.number(which, place); };
        double entropy = 0, distance = 0, largest = 0, share = 0;
        std::vector<double> weight(p.length_k), mass(run.groups);
        for (size_t n = 0; n < row.keys.size(); n++) {
            const int64_t j = row.keys[n];
            const double x = weight[j] = row.weight[n];
            if (x != 0) entropy -= x * std::log(x);
            distance += x * std::fabs(double(own - j)), share += x;
            if (x > largest || std::isnan(x)) largest = x;  // a NaN stays, as in every sum
            received[(b * p.heads + h) * p.length_k + j] += x;
            // A NaN spoils the mass of every group.
            for (int64_t g = 0; g < run.groups; g++) mass[g] += run.members[(g * p.batch + b) * p.length_k + j] ? x : x - x;
        }
        if (row.keys.empty() && number(Statistics::lse) != -kInfinity) judge.fault("lse of nothing", number(Statistics::lse), -kInfinity, 0);
        judge.near("entropy", number(Statistics::entropy), entropy, 1 + entropy);
        judge.near("distance", number(Statistics::distance), distance, distance);
        judge.near("largest", number(Statistics::largest), largest, largest);
        judge.near("sink", number(Statistics::sink), p.sink && !row.keys.empty() ? 1 - share : 0, 1);
        const auto one = [&](const char* what, Statistics::Number which, int64_t j) {
            judge.near(what, number(which), j >= 0 && j < p.length_k ? weight[j] : 0, 1);
        };
        one("own", Statistics::own, own), one("previous", Statistics::previous, own - 1), one("next", Statistics::next, own + 1);
        one("first", Statistics::first_key, run.first[b]);
        for (int64_t g = 0; g < run.groups; g++) judge.near("group", run.mass[g * int64_t(run.largest_at.size()) + place], mass[g], 1);
        if (std::isfinite(entropy)) check_places(row, weight, place);
    }

    // Equal but for rounding: another key may be named whose weight is nearly the same.
    void check_places(const Row& row, std::vector<double>& weight, int64_t place) {
        const int64_t at = run.largest_at[place];
        if (row.keys.empty() ? at != -1 : at < 0 || at >= p.length_k) return judge.fault("largest_at", double(at), -1, 0);
        if (!row.keys.empty()) judge.near("weight of largest_at", run.number(Statistics::largest, place), weight[at], 1);
        std::vector<double> sorted;
        for (const int64_t j : row.keys)
            if (weight[j] > 0) sorted.push_back(weight[j]);  // one of 0 has a logit of -inf, which names no key
        std::sort(sorted.rbegin(), sorted.rend());
        for (int64_t n = 0; n < run.top; n++) {
            const float got = run.top_weights[place * run.top + n];
            const int64_t key = run.top_keys[place * run.top + n];
            const bool there = n < int64_t(sorted.size());
            if (there ? key < 0 || key >= p.length_k : key != -1 || got != 0) return judge.fault("top key", double(key), -1, 0);
            if (!there) continue;
            judge.near("top weight", got, sorted[n], 1);
            if (weight[key] == kInfinity) return judge.fault("top key named twice", double(key), -1, 0);
            judge.near("weight of top key", got, weight[key], 1);
            weight[key] = kInfinity;
        }
    }
};

}  // namespace saccade::sanitize

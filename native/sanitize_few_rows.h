// Products of few rows in plain double loops, and the kernels' against them: both orders of sums, every layout of W.
#pragma once

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// One call of the kernel: W ends where its memory does.
struct FewRowsRun {
    FewRows call;
    std::vector<float> x, weight, bias, out;
    std::vector<uint16_t> halves;

    FewRowsRun(Random& random, int threads) {
        const auto numbers = [&](int64_t count) {
            std::vector<float> found(count);
            for (float& number : found) number = std::normal_distribution<float>()(random);
            return found;
        };
        call.width = draw(random, 1, 300), call.features = draw(random, 1, 200), call.threads = threads;
        call.block = chance(random, 0.6) ? draw(random, 1, 320) : 0;
        call.rows = draw(random, 1, call.block ? kOrderedRows : kFewRows);
        call.turned = call.block && chance(random, 0.5), call.half = !call.block && chance(random, 0.5);
        x = numbers(call.rows * call.width), weight = numbers(call.features * call.width);
        if (chance(random, 0.5)) bias = numbers(call.features), call.bias = bias.data();
        for (float& number : weight) {
            if (!call.half) break;
            uint32_t word;
            std::memcpy(&word, &number, 4);
            halves.push_back(uint16_t(word >> 16)), word &= 0xffff0000;
            std::memcpy(&number, &word, 4);
        }
        out.assign(call.rows * call.features, float(kNan));
        call.x = x.data(), call.weight = call.half ? static_cast<const void*>(halves.data()) : weight.data(), call.out = out.data();
        kernels().few_rows(call);
    }
};

template <class Judge> void check_few_rows_run(const FewRowsRun& run, Judge& judge) {
    const FewRows& call = run.call;
    for (int64_t r = 0; r < call.rows; r++)
        for (int64_t f = 0; f < call.features; f++) {
            double sum = call.bias ? run.bias[f] : 0, size = std::fabs(sum);
            for (int64_t k = 0; k < call.width; k++) {
                const double term = double(run.x[r * call.width + k]) * run.weight[call.turned ? k * call.features + f : f * call.width + k];
                sum += term, size += std::fabs(term);
            }
            judge.near("product", run.out[r * call.features + f], sum, size);
        }
}

}  // namespace saccade::sanitize

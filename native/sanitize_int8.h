// Products with int8 weights in plain loops over whole numbers, and the kernels' against them.
#pragma once

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// W in panels, its scales and perhaps a bias, each ending where its memory does.
struct Int8Matrix {
    int64_t features, width;
    std::vector<int8_t> weight, packed;
    std::vector<float> scales, bias;

    Int8Matrix(Random& random, int64_t features, int64_t width) : features(features), width(width) {
        const int64_t blocks = (width + kInt8Block - 1) / kInt8Block, quarters = (width + 3) / 4;
        const int64_t panels = (features + kInt8Panel - 1) / kInt8Panel;
        weight.resize(features * width), packed.assign(panels * quarters * 4 * kInt8Panel, 0);
        scales.assign(panels * blocks * 2 * kInt8Panel, 0);
        for (int64_t f = 0; f < features; f++)
            for (int64_t k = 0; k < width; k++) {
                const int q = draw(random, -127, 127);
                weight[f * width + k] = q;
                packed[((f / kInt8Panel * quarters + k / 4) * kInt8Panel + f % kInt8Panel) * 4 + k % 4] = q;
                float* const block = &scales[(f / kInt8Panel * blocks + k / kInt8Block) * 2 * kInt8Panel + f % kInt8Panel];
                block[0] = 1 + f % 3, block[kInt8Panel] += q;
            }
        if (chance(random, 0.5))
            for (int64_t f = 0; f < features; f++) bias.push_back(draw(random, -9, 9));
    }
    void give(Int8Product& call) const {
        call.features = features, call.width = width, call.weight = packed.data(), call.scales = scales.data();
        call.bias = bias.empty() ? nullptr : bias.data();
    }
};

// A call of the kernel and one of two products, which reads what the first one gives, also with a norm after all. Rows of x hold whole numbers from 0 to
// 255, both in every block, so that their bytes are the numbers themselves.
struct Int8Run {
    Int8Product call;
    int64_t width;
    std::vector<float> x, added, out, second, both, normed, gain, shift;
    Int8Matrix matrix, next;

    static int64_t size(Random& random, int64_t least, int64_t most) {  // often whole tiles
        return chance(random, 0.5) ? draw(random, least, most) : draw(random, 1, most / 64) * 64;
    }

    Int8Run(Random& random, int threads, int64_t (*product)(const Int8Product&))
        : width(size(random, 2, 400)), matrix(random, size(random, 1, 200), width + (width % kInt8Block == 1)), next(random, draw(random, 1, 200), matrix.features) {
        width = matrix.width;
        call.rows = draw(random, 1, 40) * (chance(random, 0.2) ? 7 : 1), call.threads = threads;
        for (int64_t n = 0; n < call.rows * width; n++) {
            const int64_t within = n % width % kInt8Block;
            x.push_back(within == 0 ? 0 : within == 1 ? 255 : draw(random, 0, 255));
        }
        if (chance(random, 0.5)) call.activation = Activation::relu;
        const bool adds = chance(random, 0.5);
        for (int64_t n = 0; adds && n < call.rows * next.features; n++) added.push_back(draw(random, -9, 9));
        out.assign(call.rows * matrix.features, float(kNan)), second.assign(call.rows * next.features, float(kNan)), both = second;
        matrix.give(call), call.x = x.data(), call.out = out.data();
        product(call);
        Int8Product last = call;
        next.give(last), last.activation = Activation::none, last.x = out.data(), last.out = second.data();
        if (adds) last.added = added.data();
        product(last);
        Int8Product first = call;
        first.out = nullptr, first.next = &last, last.x = nullptr, last.out = both.data();
        product(first);
        for (int64_t f = 0; f < next.features; f++) gain.push_back(draw(random, -9, 9)), shift.push_back(draw(random, -9, 9));
        last.norm = {StepNorm::layer, gain.data(), shift.data(), 1, 0}, normed = both, last.out = normed.data();
        if (chance(random, 0.5)) last.x = out.data(), first = last;
        product(first);
    }
};

template <class Judge> void check_run(const Int8Run& run, Judge& judge) {
    const Int8Product& call = run.call;
    for (int64_t r = 0; r < call.rows; r++)
        for (int64_t f = 0; f < call.features; f++) {
            int64_t sum = 0;
            for (int64_t k = 0; k < run.width; k++) sum += int64_t(run.x[r * run.width + k]) * run.matrix.weight[f * run.width + k];
            double want = double(sum) * (1 + f % 3) + (call.bias ? run.matrix.bias[f] : 0);  // below 2^26, in steps of one block
            if (call.activation == Activation::relu) want = std::max(want, 0.0);
            judge.near("int8 product", run.out[r * call.features + f], want, std::fabs(want) + 1);
        }
    for (int64_t r = 0, F = run.next.features; r < call.rows; r++) {
        const float* const row = &run.second[r * F];
        double mean = 0, square = 0, most = 0;
        for (int64_t f = 0; f < F; f++) mean += row[f] / double(F), most = std::max<double>(most, std::fabs(row[f]));
        for (int64_t f = 0; f < F; f++) square += (row[f] - mean) * (row[f] - mean) / F;
        const double deviation = std::sqrt(square + 1);
        for (int64_t f = 0; f < F; f++) {
            const double gain = run.gain[f], part = (row[f] - mean) / deviation;
            judge.near("norm of an int8 product", run.normed[r * F + f], part * gain + run.shift[f], std::fabs(gain) * (1 + std::fabs(part)) * (1 + most / deviation) + 9);
        }
    }
    for (size_t n = 0; n < run.both.size(); n++) judge.near("two int8 products at once", run.both[n], run.second[n], 0);
}

}  // namespace saccade::sanitize

// Products with int8 weights in plain loops over whole numbers, and the kernels' against them.
#pragma once

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// One call of the kernel: x, W and out end where their memory does. Rows of x hold whole numbers from 0 to 255, both in
// every block, so that their bytes are the numbers themselves.
struct Int8Run {
    Int8Product call;
    std::vector<float> x, scales, bias, out;
    std::vector<int8_t> weight, packed;

    Int8Run(Random& random, int threads, bool quads) {
        call.rows = draw(random, 1, 40), call.width = draw(random, 2, 400), call.features = draw(random, 1, 200), call.threads = threads;
        if (call.width % kInt8Block == 1) call.width++;
        const int64_t blocks = (call.width + kInt8Block - 1) / kInt8Block, quarters = (call.width + 3) / 4;
        const int64_t panels = (call.features + kInt8Panel - 1) / kInt8Panel;
        for (int64_t n = 0; n < call.rows * call.width; n++) {
            const int64_t within = n % call.width % kInt8Block;
            x.push_back(within == 0 ? 0 : within == 1 ? 255 : draw(random, 0, 255));
        }
        weight.resize(call.features * call.width), packed.assign(panels * quarters * 4 * kInt8Panel, 0);
        scales.assign(panels * blocks * 2 * kInt8Panel, 0);
        for (int64_t f = 0; f < call.features; f++)
            for (int64_t k = 0; k < call.width; k++) {
                const int q = draw(random, -127, 127);
                weight[f * call.width + k] = q;
                packed[((f / kInt8Panel * quarters + k / 4) * kInt8Panel + f % kInt8Panel) * 4 + k % 4] = q;
                float* const block = &scales[(f / kInt8Panel * blocks + k / kInt8Block) * 2 * kInt8Panel + f % kInt8Panel];
                block[0] = 1 + f % 3, block[kInt8Panel] += q;
            }
        if (chance(random, 0.5)) {
            for (int64_t f = 0; f < call.features; f++) bias.push_back(draw(random, -9, 9));
            call.bias = bias.data();
        }
        out.assign(call.rows * call.features, float(kNan));
        call.x = x.data(), call.weight = packed.data(), call.scales = scales.data(), call.out = out.data();
        (quads ? kernels().int8_product_quads : kernels().int8_product)(call);
    }
};

template <class Judge> void check_run(const Int8Run& run, Judge& judge) {
    const Int8Product& call = run.call;
    for (int64_t r = 0; r < call.rows; r++)
        for (int64_t f = 0; f < call.features; f++) {
            int64_t sum = 0;
            for (int64_t k = 0; k < call.width; k++) sum += int64_t(run.x[r * call.width + k]) * run.weight[f * call.width + k];
            const double want = double(sum) * (1 + f % 3) + (call.bias ? run.bias[f] : 0);  // below 2^26, in steps of one block
            judge.near("int8 product", run.out[r * call.features + f], want, std::fabs(want) + 1);
        }
}

}  // namespace saccade::sanitize

// Products with int4 weights in plain loops over whole numbers, and the kernels' against them.
#pragma once

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// One call of the kernel: x, W and out end where their memory does. Groups of x hold whole numbers, 127 among them, so that
// their bytes are the numbers themselves.
struct Int4Run {
    Int4Product call;
    std::vector<float> x, bias, out;
    std::vector<uint16_t> scales;  // bf16
    std::vector<uint8_t> weight, packed;

    Int4Run(Random& random, int threads, bool quads) {
        call.rows = draw(random, 1, 40), call.width = draw(random, 1, 300), call.features = draw(random, 1, 200), call.threads = threads;
        const int64_t groups = (call.width + kInt4Group - 1) / kInt4Group, panels = (call.features + kInt8Panel - 1) / kInt8Panel;
        for (int64_t n = 0; n < call.rows * call.width; n++)
            x.push_back(n % call.width % kInt4Group == 0 ? 127 : draw(random, -127, 127));
        weight.resize(call.features * call.width), packed.assign(panels * groups * kInt4Group / 2 * kInt8Panel, 0x88);
        scales.assign(panels * groups * kInt8Panel, 0);
        for (int64_t f = 0; f < call.features; f++)
            for (int64_t k = 0; k < call.width; k++) {
                const int q = draw(random, 0, 15), shift = k % 8 / 4 * 4;
                weight[f * call.width + k] = q;
                uint8_t& both = packed[((f / kInt8Panel * groups * kInt4Group / 8 + k / 8) * kInt8Panel + f % kInt8Panel) * 4 + k % 4];
                both = (both & ~(15 << shift)) | q << shift;
                scales[(f / kInt8Panel * groups + k / kInt4Group) * kInt8Panel + f % kInt8Panel] = f % 2 ? 0x3f80 : 0xc000;  // 1, -2
            }
        if (chance(random, 0.5)) {
            for (int64_t f = 0; f < call.features; f++) bias.push_back(draw(random, -9, 9));
            call.bias = bias.data();
        }
        out.assign(call.rows * call.features, float(kNan));
        call.x = x.data(), call.weight = packed.data(), call.scales = scales.data(), call.out = out.data();
        (quads ? kernels().int4_product_quads : kernels().int4_product)(call);
    }
};

template <class Judge> void check_int4_run(const Int4Run& run, Judge& judge) {
    const Int4Product& call = run.call;
    for (int64_t r = 0; r < call.rows; r++)
        for (int64_t f = 0; f < call.features; f++) {
            int64_t sum = 0;
            for (int64_t k = 0; k < call.width; k++) sum += int64_t(run.x[r * call.width + k]) * (run.weight[f * call.width + k] - 8);
            const double want = double(sum) * (f % 2 ? 1 : -2) + (call.bias ? run.bias[f] : 0);
            judge.near("int4 product", run.out[r * call.features + f], want, std::fabs(want) + 1);
        }
}

}  // namespace saccade::sanitize

// Products with weights in groups in plain loops over whole numbers, and the kernels' against them.
#pragma once

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// One call of the kernel: x, W and out end where their memory does. Groups of x hold whole numbers, 127 among them, so that
// their bytes are the numbers themselves. A fifth of the weights is that of "int4".
struct GroupRun {
    GroupProduct call;
    std::vector<float> x, bias, out;
    std::vector<uint16_t> scales;
    std::vector<uint8_t> packed;
    std::vector<int> weight;  // (F, E)

    GroupRun(Random& random, int threads, int64_t (*product)(const GroupProduct&)) {
        call.rows = draw(random, 1, 40), call.width = draw(random, 1, 300), call.features = draw(random, 1, 200), call.threads = threads;
        const bool int4 = chance(random, 0.2);
        const int bits = int4 || chance(random, 0.5) ? 4 : 8, group = bits == 8 && chance(random, 0.5) ? 16 : 32;
        const int drawn = draw(random, 0, 3) << 10 | draw(random, 0, 128) << 16 | draw(random, 0, 15) << 24;
        const GroupForm form(bits | group << 4 | (int4 ? 2 << 10 | 0b11010 << 24 : drawn));
        call.form = form;
        const int64_t groups = (call.width + group - 1) / group, panels = (call.features + kInt8Panel - 1) / kInt8Panel;
        const int64_t units = form.units(groups), rows = form.rows(groups), padded = (call.width + 31) / 32 * 32;
        for (int64_t n = 0; n < call.rows * call.width; n++) x.push_back(n % call.width % group == 0 ? 127 : draw(random, -127, 127));
        weight.resize(call.features * call.width), packed.assign(panels * padded * bits / 8 * kInt8Panel, 0);
        scales.assign(panels * rows * kInt8Panel, 0);
        const int one = form.half ? 0x3c00 : 0x3f80, minus_two = 0xc000;  // which both types have
        for (int64_t f = 0; f < call.features; f++) {
            uint16_t* const of = scales.data() + f / kInt8Panel * rows * kInt8Panel;
            const int64_t at = f % kInt8Panel, after = units * (1 + form.minima), pairs = (groups + 1) / 2;
            int8_t* const steps = reinterpret_cast<int8_t*>(of + after * kInt8Panel);
            int8_t* const zeros = reinterpret_cast<int8_t*>(of + (after + form.steps * pairs) * kInt8Panel);
            for (int64_t g = 0; g < groups; g++) {
                const int64_t unit = (g >> form.shift) * kInt8Panel + at;
                of[unit] = f % 2 ? one : minus_two;
                if (form.minima) of[units * kInt8Panel + unit] = f % 3 ? one : minus_two;
                if (form.steps) steps[g * kInt8Panel + at] = int4 ? draw(random, 1, 17) : draw(random, -3, 3);
                if (form.zeros) zeros[g * kInt8Panel + at] = int4 ? draw(random, -100, 127) : draw(random, -3, 3);
                const int scale = (f % 2 ? 1 : -2) * (form.steps ? steps[g * kInt8Panel + at] : 1);
                const int minimum = ((form.minima ? f % 3 : f % 2) ? 1 : -2) * (form.zeros ? zeros[g * kInt8Panel + at] : 1);
                const int most = int4 ? std::min((127 + zeros[g * kInt8Panel + at]) / steps[g * kInt8Panel + at], 15) : (1 << bits) - 1;
                for (int64_t k = g * group; k < std::min((g + 1) * group, call.width); k++) {
                    const int q = draw(random, 0, most);
                    weight[f * call.width + k] = scale * (q - form.offset) - (form.minima || form.zeros ? minimum : 0);
                    const int64_t line = f / kInt8Panel * padded * bits / 32 + k * bits / 32;
                    packed[(line * kInt8Panel + at) * 4 + k % 4] |= q << (bits == 4 ? k % 8 / 4 * 4 : 0);
                }
            }
        }
        if (chance(random, 0.5)) {
            for (int64_t f = 0; f < call.features; f++) bias.push_back(draw(random, -9, 9));
            call.bias = bias.data();
        }
        out.assign(call.rows * call.features, float(kNan));
        call.x = x.data(), call.weight = packed.data(), call.scales = scales.data(), call.out = out.data();
        product(call);
    }
};

template <class Judge> void check_run(const GroupRun& run, Judge& judge) {
    const GroupProduct& call = run.call;
    for (int64_t r = 0; r < call.rows; r++)
        for (int64_t f = 0; f < call.features; f++) {
            double sum = call.bias ? run.bias[f] : 0, size = 1;
            for (int64_t k = 0; k < call.width; k++) {
                const double term = double(run.x[r * call.width + k]) * run.weight[f * call.width + k];
                sum += term, size += std::fabs(term);
            }
            judge.near("product of groups", run.out[r * call.features + f], sum, size);
        }
}

}  // namespace saccade::sanitize

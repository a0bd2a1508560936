// One token after a state of linear attention, and ranges per head, against plain double loops.
#pragma once

#include <algorithm>
#include <string>

#include "dispatch.h"
#include "sanitize_problem.h"

namespace saccade::sanitize {

inline Type any_type(Random& random) { return static_cast<Type>(draw(random, 0, 2)); }

inline float normal(Random& random) { return std::normal_distribution<float>()(random); }

// What is wrong with the kernel's answer to a random problem; nothing, if nothing is.
inline std::string fault_of_linear_step(uint64_t seed) {
    Random random(seed);
    LinearStep call;
    call.kv_heads = draw(random, 1, 3), call.heads = call.kv_heads * draw(random, 1, 3), call.batch = draw(random, 1, 3);
    call.width = draw(random, 1, 70), call.value_width = draw(random, 1, 90), call.threads = int(draw(random, 1, 3));
    call.type = any_type(random), call.normalise = chance(random, 0.5), call.least = 1e-19f;
    call.map = chance(random, 0.5) ? Linear::elu_plus_one : Linear::identity;
    const int64_t B = call.batch, H = call.kv_heads, M = call.width, W = call.value_width, group = call.heads / H;
    Tensor query(random, call.type, B, call.heads, 1, M), key(random, call.type, B, H, 1, M), value(random, call.type, B, H, 1, W);
    Tensor out(random, call.type, B, call.heads, 1, W), sums(random, Type::f32, B, H, M, W), weights(random, Type::f32, B, H, M, 1);
    for (Tensor* tensor : {&query, &key, &weights}) tensor->fill([&] { return std::fabs(normal(random)) + 0.1f; });
    for (Tensor* tensor : {&value, &sums}) tensor->fill([&] { return normal(random); });
    const bool began = chance(random, 0.8);
    if (began) {
        call.sums = static_cast<const float*>(sums.input().data), call.weights = static_cast<const float*>(weights.input().data);
        std::copy_n(sums.stride, 3, call.sums_at), std::copy_n(weights.stride, 3, call.weights_at);
    }
    std::vector<float> new_sums(B * H * M * W, float(kNan)), new_weights(B * H * M, float(kNan));
    call.query = query.input(), call.key = key.input(), call.value = value.input(), call.out = out.output();
    call.new_sums = new_sums.data(), call.new_weights = new_weights.data();
    kernels().linear_step(call);
    const auto feature = [&](double x) { return call.map == Linear::identity ? x : x > 0 ? x + 1 : std::exp(x); };
    const double unit[] = {2e-5, 2e-2, 3e-3};
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < call.heads; h++) {
            const int64_t kv = h / group, n = b * H + kv;
            double whole = 0;
            for (int64_t m = 0; m < M; m++) {
                const double z = feature(key.at(b, kv, 0, m)) + (began ? weights.at(b, kv, m, 0) : 0);
                if (!(std::fabs(new_weights[n * M + m] - z) <= 1e-5 * (1 + z))) return "linear step: a weight";
                whole += feature(query.at(b, h, 0, m)) * z;
            }
            for (int64_t w = 0; w < W; w++) {
                double sum = 0, size = 0;
                for (int64_t m = 0; m < M; m++) {
                    const double added = feature(key.at(b, kv, 0, m)) * value.at(b, kv, 0, w), before = began ? sums.at(b, kv, m, w) : 0;
                    if (!(std::fabs(new_sums[(n * M + m) * W + w] - added - before) <= 1e-5 * (1 + std::fabs(added)))) return "linear step: a sum";
                    const double term = feature(query.at(b, h, 0, m)) * (added + before);
                    sum += term, size += std::fabs(term);
                }
                const double by = call.normalise ? whole : 1;
                if (!(std::fabs(out.at(b, h, 0, w) - sum / by) <= unit[int(call.type)] * size / by + 1e-6)) return "linear step: out";
            }
        }
    return out.gaps_are_whole() ? "" : "linear step: what lies between the rows";
}

inline std::string fault_of_head_ranges(uint64_t seed) {
    Random random(seed);
    HeadRanges call;
    const int64_t B = draw(random, 1, 3), H = draw(random, 1, 3), G = draw(random, 1, 3), Lq = draw(random, 1, 20), Lk = draw(random, 1, 20);
    const int64_t D = draw(random, 1, 70), rows = B * H * G * Lq;
    call.type = any_type(random), call.threads = int(draw(random, 1, 3));
    Tensor tensors[] = {Tensor(random, call.type, B, H * G, Lq, D), Tensor(random, call.type, B, H, Lk, D), Tensor(random, call.type, B, H, Lk, D)};
    HeadRanges::Vectors* const vectors[] = {&call.query, &call.key, &call.value};
    std::vector<uint8_t> real(B * H * Lk);
    for (auto& one : real) one = chance(random, 0.8);
    for (int n = 0; n < 3; n++) {
        tensors[n].fill([&] { return normal(random); });
        *vectors[n] = {tensors[n].input(), B, tensors[n].shape[1], tensors[n].shape[2], D, n ? real.data() : nullptr, H * Lk, Lk};
    }
    std::vector<float> numbers[5], of_queries(7 * H * G), of_keys(6 * H);
    for (auto& some : numbers)
        for (int64_t n = 0; n < rows; n++) some.push_back(normal(random));
    for (auto& lse : numbers[0]) lse = chance(random, 0.2) ? float(-kInfinity) : lse;
    std::vector<int64_t> nonfinite(rows, 0);
    const std::unique_ptr<bool[]> sound(new bool[H * G + 2 * H]);
    call.lse = numbers[0].data(), call.smallest = numbers[1].data(), call.largest = numbers[2].data();
    call.lowest = numbers[3].data(), call.highest = numbers[4].data(), call.nonfinite = nonfinite.data();
    call.of_queries = of_queries.data(), call.of_keys = of_keys.data(), call.sound = sound.get();
    kernels().head_ranges(call);
    for (int n = 0; n < 3; n++)
        for (int64_t h = 0; h < tensors[n].shape[1]; h++) {
            double low = kInfinity, high = -kInfinity, norms = 0, count = 0;
            for (int64_t b = 0; b < B; b++)
                for (int64_t i = 0; i < tensors[n].shape[2]; i++) {
                    if (n ? !real[(b * H + h) * Lk + i] : numbers[0][(b * H * G + h) * Lq + i] == -kInfinity) continue;
                    double squares = 0;
                    for (int64_t d = 0; d < D; d++) {
                        const double x = tensors[n].at(b, h, i, d);
                        low = std::min(low, x), high = std::max(high, x), squares += x * x;
                    }
                    norms += std::sqrt(squares), count++;
                }
            if (sound[n == 0 ? h : H * G + (n - 1) * H + h] != (count > 0)) return "head ranges: whether all is finite";
            const float* const found = n == 0 ? &of_queries[h] : &of_keys[3 * (n - 1) * H + h];
            const int64_t heads = tensors[n].shape[1];
            if (count && (found[0] != low || found[heads] != high)) return "head ranges: an end";
            if (count && !(std::fabs(found[2 * heads] - norms / count) <= 1e-5 * norms / count)) return "head ranges: a norm";
        }
    return "";
}

}  // namespace saccade::sanitize

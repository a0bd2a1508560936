// One token after a state of linear attention: S' = S + psi v^T, z' = z + psi, out = phi . S' / phi . z'.
//
// Shape legend: B batch, Hq / Hkv query and key-value heads, M features, W value width. M_ is M rounded up to whole vectors.
// The state is read once and written once, M x W numbers a head, and all arithmetic hides behind that.
#pragma once

#include <algorithm>
#include <cmath>

#include "call.h"
#include "parallel.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

template <class T> class LinearStepPass {
  public:
    explicit LinearStepPass(const LinearStep& call)
        : call(call), M_((call.width + lanes - 1) / lanes * lanes), group(call.heads / call.kv_heads) {}

    void run() const {
        constexpr int64_t some = 1 << 15;  // numbers of the state in a task: less is done before a second thread has begun
        const int64_t all = call.batch * call.kv_heads, each = std::max<int64_t>(some / (call.width * call.value_width), 1);
        parallel(call.threads, (all + each - 1) / each, [&](int64_t task, int) {
            float* features = static_cast<float*>(scratch(0, (1 + group) * M_ * (int64_t)sizeof(float)));
            for (int64_t n = task * each; n < std::min((task + 1) * each, all); n++) head(n / call.kv_heads, n % call.kv_heads, features);
        });
    }

  private:
    const LinearStep& call;
    const int64_t M_, group;

    // psi and then the phi of the group, each M_ numbers.
    void head(int64_t b, int64_t h, float* psi) const {
        const int64_t n = b * call.kv_heads + h, M = call.width, W = call.value_width;
        take(row<const T>(call.key, b, h), psi);
        for (int64_t g = 0; g < group; g++) take(row<const T>(call.query, b, h * group + g), psi + (1 + g) * M_);
        float* const weights = call.new_weights + n * M;
        for (int64_t m = 0; m < M; m++)
            weights[m] = psi[m] + (call.weights ? call.weights[b * call.weights_at[0] + h * call.weights_at[1] + m * call.weights_at[2]] : 0);
        const float* const before = call.sums ? call.sums + b * call.sums_at[0] + h * call.sums_at[1] : nullptr;
        float* const after = call.new_sums + n * M * W;
        int64_t w = 0;
        for (; w + 4 * lanes <= W; w += 4 * lanes) columns<4>(b, h, w, 4 * lanes, psi, before, after);
        for (; w < W; w += lanes) columns<1>(b, h, w, std::min<int64_t>(lanes, W - w), psi, before, after);
    }

    // Columns [w, w + count) of the new state, and of what the group reads of them: N whole vectors, or 1 of `count` numbers.
    template <int N> void columns(int64_t b, int64_t h, int64_t w, int64_t count, const float* psi, const float* before, float* after) const {
        const int64_t M = call.width, W = call.value_width;
        const int64_t left = N > 1 ? lanes : count;
        vf value[N], sum[N] = {};
        for (int i = 0; i < N; i++) value[i] = load_as_float(row<const T>(call.value, b, h) + w + i * lanes, left);
        for (int64_t m = 0; m < M; m++) {
            const vf key = splat(psi[m]), query = splat(psi[M_ + m]);
            for (int i = 0; i < N; i++) {
                vf state = key * value[i];
                if (before) state += load_as_float(before + m * call.sums_at[2] + w + i * lanes, left);
                store_from_float(after + m * W + w + i * lanes, state, left);
                sum[i] += query * state;
            }
        }
        give<N>(b, h * group, w, left, psi + M_, sum);
        for (int64_t g = 1; g < group; g++) {
            for (vf& one : sum) one = vf{};
            for (int64_t m = 0; m < M; m++)
                for (int i = 0; i < N; i++)
                    sum[i] += splat(psi[(1 + g) * M_ + m]) * load_as_float(after + m * W + w + i * lanes, left);
            give<N>(b, h * group + g, w, left, psi + (1 + g) * M_, sum);
        }
    }

    template <int N> void give(int64_t b, int64_t h, int64_t w, int64_t left, const float* phi, const vf (&sum)[N]) const {
        float weight = 1;
        if (call.normalise) {
            const float* const weights = call.new_weights + (b * call.kv_heads + h / group) * call.width;
            vf products{};
            for (int64_t m = 0; m < call.width; m += lanes) products += load(phi + m) * load_as_float(weights + m, call.width - m);
            weight = total(products);
        }
        const bool live = !(std::fabs(weight) < (call.normalise ? call.least : 0));  // NaN stays NaN
        T* const out = row<T>(call.out, b, h) + w;
        for (int i = 0; i < N; i++) store_from_float(out + i * lanes, live ? sum[i] / splat(weight) : vf{}, left);
    }

    void take(const T* from, float* to) const {
        for (int64_t m = 0; m < call.width; m += lanes) {
            vf x = load_as_float(from + m, call.width - m);
            if (call.map == Linear::elu_plus_one) x = x > vf{} ? x + splat(1.0f) : exp2_of<5>(x, splat(log2_e));
            store(to + m, call.width - m >= lanes ? x : select((1u << (call.width - m)) - 1, x, vf{}));
        }
    }

    template <class U, class Memory> static U* row(const Memory& memory, int64_t b, int64_t h) {
        return static_cast<U*>(memory.data) + b * memory.batch + h * memory.head;
    }
};

inline void linear_step(const LinearStep& call) {
    switch (call.type) {
        case Type::f32: return LinearStepPass<float>(call).run();
        case Type::bf16: return LinearStepPass<bf16>(call).run();
        case Type::f16: return LinearStepPass<f16>(call).run();
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

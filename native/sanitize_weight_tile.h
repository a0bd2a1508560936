// Rows of weights of some heads and their product with values, against plain double loops.
#pragma once

#include <cstdlib>

#include "sanitize_oracle.h"

namespace saccade::sanitize {

// A case's rows tile by tile, in memory that has no room to spare; a weight is changed anywhere before the product.
struct WeightTileRun {
    std::vector<int64_t> chosen;
    std::vector<float> all;       // (B, n, Lq, Lk) as the tiles came
    std::vector<float> products;  // (B, n, Lq, width)
    std::vector<float> values;    // (B, n, Lk, line)
    std::vector<int64_t> changed;  // where in `all` 1 was added before the product
    int64_t width, line;  // of a row of values: width and more

    WeightTileRun(const Case& c, Random& random, int threads) {
        const Problem& p = c.problem;
        for (int64_t n = draw(random, 1, p.heads); n > 0; n--) chosen.push_back(draw(random, 0, p.heads - 1));
        const int64_t heads = int64_t(chosen.size()), most = draw(random, 1, 120);
        width = 16 * draw(random, 1, 5), line = width + draw(random, 0, 20);
        all.assign(p.batch * heads * p.length_q * p.length_k, float(kNan));
        products.assign(p.batch * heads * p.length_q * width, float(kNan));
        for (int64_t n = 0; n < p.batch * heads * p.length_k * line; n++) values.push_back(std::uniform_real_distribution<float>(-1, 1)(random));
        const int64_t keys = (p.length_k + 47) / 48 * 48 * p.width * p.kv_heads * p.batch * 4;
        const std::unique_ptr<float, void (*)(void*)> packed(static_cast<float*>(std::aligned_alloc(64, (keys + 63) / 64 * 64)), std::free);
        WeightTile call;
        call.problem = p, call.problem.threads = threads, call.query = c.query.input(), call.key = c.key.input();
        call.chosen = chosen.data(), call.chosen_count = heads, call.keys = packed.get();
        std::vector<float> tile;
        for (int64_t first = 0; first < p.length_q; first += most) {
            call.row_start = first, call.row_count = std::min(most, p.length_q - first);
            const size_t size = p.batch * heads * call.row_count * p.length_k;
            tile.assign(size, float(kNan));
            call.out = tile.data();
            kernels().weight_tile(call);
            call.packed = true;
            copy(tile, all, p, first, call.row_count);
            change(tile, random, p, first, call.row_count);
            multiply(tile, call, p, first, threads);
        }
    }

  private:
    void copy(const std::vector<float>& tile, std::vector<float>& to, const Problem& p, int64_t first, int64_t count) const {
        for (size_t m = 0; m < p.batch * chosen.size(); m++)
            std::copy_n(tile.begin() + m * count * p.length_k, count * p.length_k, to.begin() + (m * p.length_q + first) * p.length_k);
    }

    void change(std::vector<float>& tile, Random& random, const Problem& p, int64_t first, int64_t count) {
        const int64_t at = draw(random, 0, int64_t(tile.size()) - 1), row = at / p.length_k;
        tile[at] += 1;
        changed.push_back((row / count * p.length_q + first + row % count) * p.length_k + at % p.length_k);
    }

    void multiply(const std::vector<float>& tile, const WeightTile& call, const Problem& p, int64_t first, int threads) {
        WeightedValues product;
        product.batch = p.batch, product.heads = call.chosen_count, product.rows = call.row_count, product.length_k = p.length_k;
        product.value_width = width, product.threads = threads, product.weights = tile.data();
        const int64_t heads = call.chosen_count;
        product.value = {values.data(), heads * p.length_k * line, p.length_k * line, line};
        product.out = {products.data() + first * width, heads * p.length_q * width, p.length_q * width, width};
        kernels().weighted_values(product);
    }
};

// `judge` as in sanitize.cpp.
template <class Judge> void check_weight_tile_run(const Case& c, const WeightTileRun& run, Judge& judge) {
    const Problem& p = c.problem;
    const int64_t heads = int64_t(run.chosen.size());
    std::vector<double> weights(p.length_k);
    for (int64_t place = 0; place < p.batch * heads * p.length_q; place++) {
        const int64_t i = place % p.length_q, b = place / p.length_q / heads;
        const Row row = row_of(c, b, run.chosen[place / p.length_q % heads], i);
        std::fill(weights.begin(), weights.end(), 0.0);
        for (size_t m = 0; m < row.keys.size(); m++) weights[row.keys[m]] = row.weight[m];
        bool finite = true;
        for (const double weight : weights) finite &= std::isfinite(weight);
        if (!finite) continue;  // only the sanitizers judge
        for (int64_t j = 0; j < p.length_k; j++) {
            const float got = run.all[place * p.length_k + j];
            if (weights[j] == 0 && got != 0) judge.fault("hidden weight", got, 0, 0);
            judge.near("weight", got, weights[j], weights[j]);
        }
        for (const int64_t at : run.changed)
            if (at / p.length_k == place) weights[at % p.length_k] += 1;
        for (int64_t x = 0; x < run.width; x++) {
            double want = 0, size = 0;
            for (int64_t j = 0; j < p.length_k; j++) {
                const double term = weights[j] * run.values[((place / p.length_q) * p.length_k + j) * run.line + x];
                want += term, size += std::fabs(term);
            }
            judge.near("weighted value", run.products[place * run.width + x], want, size);
        }
    }
}

}  // namespace saccade::sanitize

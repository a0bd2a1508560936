// Every kernel, compiled once for each instruction set: -DSACCADE_SET=<name> and the flags that allow its instructions.
#if !defined(SACCADE_SET)
#define SACCADE_SET baseline
#endif

#include "backward.h"
#include "counts.h"
#include "decode.h"
#include "few_rows.h"
#include "forward.h"
#include "groups.h"
#include "head_ranges.h"
#include "int8.h"
#include "linear.h"
#include "linear_step.h"
#include "peak.h"
#include "pooled.h"
#include "round_rows.h"
#include "statistics.h"
#include "step.h"
#include "weight_tile.h"

namespace saccade {
namespace SACCADE_SET {

void exp2_all(const float* from, float* to, int64_t count) {
    for (int64_t n = 0; n < count; n += lanes)
        store_from_float(to + n, exp2_of(load_as_float(from + n, count - n)), count - n);
}

constexpr Kernels table(const char* name) {
    Kernels kernels{};
    kernels.name = name;
    kernels.forward = forward;
    kernels.decode = decode;
    kernels.round_rows = round_rows;
    kernels.backward = backward;
    kernels.key_counts = key_counts;
    kernels.statistics = statistics;
    kernels.pooled = pooled;
    kernels.weight_tile = weight_tile;
    kernels.weighted_values = weighted_values;
    kernels.linear = linear;
    kernels.linear_step = linear_step;
    kernels.head_ranges = head_ranges;
    kernels.few_rows = few_rows;
    kernels.int8_product = int8_product;
    kernels.group_product = group_product;
#if defined(__AVX512F__)
    kernels.int8_product_quads = int8_product_quads;
    kernels.group_product_quads = group_product_quads;
#endif
#if defined(__AMX_INT8__)
    kernels.int8_product_tiles = int8_product_tiles;
#endif
    kernels.step = step;
    kernels.exp2 = exp2_all;
    kernels.peak_f32 = peak_f32;
    kernels.peak_bf16 = peak_bf16;
    kernels.read_bandwidth = read_bandwidth;
    return kernels;
}

}  // namespace SACCADE_SET

#define SACCADE_TEXT(name) #name
#define SACCADE_NAME(name) SACCADE_TEXT(name)
#define SACCADE_JOIN(a, b) a##b
#define SACCADE_TABLE(name) SACCADE_JOIN(kernels_, name)

extern const Kernels SACCADE_TABLE(SACCADE_SET);
const Kernels SACCADE_TABLE(SACCADE_SET) = SACCADE_SET::table(SACCADE_NAME(SACCADE_SET));

}  // namespace saccade

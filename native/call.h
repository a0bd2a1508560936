// What one attention call is, as plain numbers and pointers: no PyTorch, no Python.
//
// Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads kv head h / (Hq / Hkv)), Lq / Lk lengths,
// D width of query and key, Dv width of value. Strides are in elements; the last axis of every tensor has stride 1.
#pragma once

#include <atomic>
#include <cstdint>

namespace saccade {

class Mask;
class WorkList;
class ScoreProgram;

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2 };

// A (B, H, L, width) tensor that is read.
struct Input {
    const void* data = nullptr;
    int64_t batch = 0, head = 0, row = 0;
};

// A (B, H, L, width) tensor that is written.
struct Output {
    void* data = nullptr;
    int64_t batch = 0, head = 0, row = 0;
};

// What becomes of the logits after scale and softcap: scores added to them, or a program (score_program.h) of them.
//
// tensor: entry (b, h, i, j) stands at data[b * batch + h * head + i * row + j * key]; a broadcast axis has stride 0.
// line:   the score depends on the distance j - i - placement(b) alone: lines[h * line_length + distance - least], float32.
//         ALiBi and bucketed biases take this form; every distance of the call lies within the line.
// program: query row i stands at i + placement(b) + key_origin, key j at j + key_origin.
struct Bias {
    // A tensor that a program reads at computed indices; `bits`: one byte each, not 0 is true.
    struct Table {
        enum Type : int { f32 = 0, i32 = 1, bits = 2 } type;
        const void* data;
        int64_t size;
    };

    enum Form : int { none = 0, tensor = 1, line = 2, program = 3 } form = none;
    const void* data = nullptr;
    Type type = Type::f32;
    int64_t batch = 0, head = 0, row = 0, key = 0;
    const float* lines = nullptr;
    int64_t line_length = 0, least = 0;
    const int64_t* placements = nullptr;  // (B,), or null: `placement` for every item
    int64_t placement = 0;
    const ScoreProgram* code = nullptr;
    const Table* tables = nullptr;
    int64_t key_origin = 0;
    std::atomic<bool>* outside = nullptr;  // set where a visible pair has read outside of a table

    int64_t placed(int64_t b) const { return placements ? placements[b] : placement; }
    bool added() const { return form == tensor || form == line; }
};

// Counter-based dropout: bit-identical to `saccade.Dropout.factor`. A weight stays where its word >= threshold.
struct Dropout {
    bool on = false;
    uint32_t threshold = 0, low = 0, high = 0;  // floor(p * 2^32) and the two halves of the seed
    float factor = 1;                           // 1 / (1 - p)
    int64_t row_origin = 0, key_origin = 0;     // where row 0 and key 0 of a slice stand in the whole problem
    int64_t head_origin = 0;                    // and head 0
};

// Sigmoid attention: a logit s of row i has the weight sigmoid(s - log n) = 1 / (1 + n exp(-s)), whatever the row's others are
// (Ramapuram et al. 2024, section 2), and n is data[b * batch + h * head + i]; 0: the row sees no key. Null: softmax.
struct Sigmoid {
    const float* data = nullptr;
    int64_t batch = 0, head = 0;

    explicit operator bool() const { return data; }
    float at(int64_t b, int64_t h, int64_t i) const { return data[b * batch + h * head + i]; }
};

struct Problem {
    int64_t batch = 0, heads = 0, kv_heads = 0, length_q = 0, length_k = 0, width = 0, value_width = 0;
    Type type = Type::f32;
    float scale = 1;
    float softcap = 0;  // 0: none
    Bias bias;
    Dropout dropout;
    const Mask* mask = nullptr;  // null: everything is seen
    const float* sink = nullptr;  // (Hq,), or null
    Sigmoid sigmoid;              // without a sink; forward, decode and backward know it
    int threads = 1;

    int64_t group() const { return heads / kv_heads; }
};

struct Forward {
    Problem problem;
    Input query, key, value;
    Output out;
    float* lse = nullptr;  // (B, Hq, Lq) contiguous, natural log, WITHOUT the sink: -inf exactly on rows that see nothing; or null
    float* lse_low = nullptr;  // the same shape: what rounding took from the lse, 0 on rows that see nothing; or null
    bool int8_rows = false;  // keys and values are int8, strides in bytes, a row's float32 scale behind its entries: decode alone
    bool quads = false;      // AVX512_VNNI is there
};

// out (B, H, L, W + 4), contiguous: rows of 8 bits as round_rows.h says. On the caller's thread: a step has few rows.
struct RoundRows {
    int64_t batch = 0, heads = 0, rows = 0, width = 0;
    Type type = Type::f32;
    Input x;
    int8_t* out = nullptr;
};

// Gradients. `out` already has the sink's share in it; `lse` is without the sink, as Forward wrote it. Sigmoid attention
// needs neither, nor what is made of them: out, lse, d_lse and delta are null.
struct Backward {
    Problem problem;
    Input query, key, value, out, d_out;
    const float* lse = nullptr;    // (B, Hq, Lq), without the sink
    const float* lse_low = nullptr;  // as Forward wrote it; null: zeros
    const float* d_lse = nullptr;  // (B, Hq, Lq) cotangent of the lse WITH the sink, or null: zeros
    Output d_query, d_key, d_value;  // dtype of the problem; null data: not wanted (d_key and d_value go together)
    float* delta = nullptr;  // (B, Hq, Lq) scratch and result: d_out . out - d_lse, -d_lse on rows that see nothing

    // Gradient of the bias, float32, zeroed by the caller; null: not wanted. Of a program: that of all its tables of floats,
    // one behind the other, `d_bias_size` of them; batch and head are not 0 where items and heads have entries of their own.
    // tensor: laid out as (b?, h?, i?, j?) with these strides, stride 0 where it is summed over.
    //         Along the batch and the heads it is summed only when rows and keys are both kept.
    // line:   (B, Hq, line_length).
    float* d_bias = nullptr;
    int64_t d_bias_batch = 0, d_bias_head = 0, d_bias_row = 0, d_bias_key = 0;
    int64_t d_bias_size = 0;
};

// How many keys mask and bias show to each row: what -inf in a tensor of scores hides does not count.
struct KeyCounts {
    Problem problem;
    int64_t batch = 1, heads = 1;  // of the result: 1 where all items, all heads, see the same
    float* out = nullptr;          // (batch, heads, Lq), exact below 2^24
};

// Statistics of the weights p_ij = exp(s_ij) / (exp sink + sum_j exp s_ij), before dropout. Row i stands at key i + placed(b).
// Results are (B, Hq, Lq) contiguous where nothing else is said; rows that see no key hold 0.
struct Statistics {
    enum Number {
        lse,       // without the sink; -inf on rows that see no key
        sink,      // the sink's share
        entropy,   // -sum p log p over keys, nats
        largest,   // max p and min p over visible keys
        smallest,
        distance,  // sum p |i + placement - j|
        own,       // p of key i + placement, of the one before and the one after it, and of first[b]; 0: not visible
        previous,
        next,
        first_key,
        lowest,    // range of the finite visible logits; +inf and -inf where there is none
        highest,
        numbers_count
    };

    Problem problem;  // value_width and dropout mean nothing here
    Input query, key;
    const int64_t* placements = nullptr;  // (B,), or null: `placement` for every item
    int64_t placement = 0;
    const int64_t* first = nullptr;  // (B,): one key for each item, -1: none; or null

    // Key j of item b is in a group where data[group * groups.group + b * groups.batch + j] is not 0.
    struct {
        const uint8_t* data = nullptr;
        int64_t count = 0, group = 0, batch = 0;
        float* mass = nullptr;  // (count, B, Hq, Lq): sum of p over the group's keys
    } groups;

    float* numbers = nullptr;         // (numbers_count, B, Hq, Lq)
    int64_t* largest_at = nullptr;    // first key with the largest logit, -1 on rows that see no key, nonfinite_at where p is NaN
    int64_t* nonfinite = nullptr;     // visible logits that are NaN or infinite; how many, and the first one's key or -1
    int64_t* nonfinite_at = nullptr;
    int64_t top = 0;                  // keys with the largest weights: (B, Hq, Lq, top), of equal logits the smaller key first
    float* top_weights = nullptr;     // 0, and key -1, after the last visible key
    int64_t* top_keys = nullptr;
    float* received = nullptr;        // (B, Hq, Lk): sum of p over rows; or null

    int64_t placed(int64_t b) const { return placements ? placements[b] : placement; }
};

// Weights (or logits) of one head, without dropout, pooled over bins of rows and keys. Rows are row_start + n, or listed.
struct Pooled {
    Problem problem;  // value_width and dropout mean nothing here
    Input query, key;
    int64_t item = 0, head = 0;
    int64_t row_start = 0, row_count = 0, key_start = 0, key_stop = 0;  // key_start: a multiple of 16 and of key_bin
    int64_t row_bin = 1, key_bin = 1;  // key_bin: a power of two
    bool logits = false;
    const int64_t* rows = nullptr;  // (row_count,), or null
    const double* lse = nullptr;    // (Lq,) of that head, the sink counted; null: computed over all keys
    float* out = nullptr;           // (3, bins of rows, bins of keys): sums, largest (-inf: nothing visible), visible pairs; or null
    double* row_lse = nullptr;      // (row_count,), what `lse` would hold of these rows; or null. Not with `lse` or `logits`
};

// Whole rows of the weights of chosen heads, without dropout, for functions of them. Rows that see no key hold 0.
struct WeightTile {
    Problem problem;  // value_width and dropout mean nothing here
    Input query, key;
    const int64_t* chosen = nullptr;  // (chosen_count,) query heads
    int64_t chosen_count = 0, row_start = 0, row_count = 0;
    // Keys in the kernels' order, kept from tile to tile: memory of (B, Hkv, Lk up to a multiple of 48, D), aligned to 64
    // bytes, and whether an earlier tile of the same call has filled it.
    float* keys = nullptr;
    bool packed = false;
    float* out = nullptr;  // (B, chosen_count, row_count, Lk), contiguous
};

// Weights (B, n, r, Lk), contiguous, times values: runs of keys whose weights are all 0 are left out. All float32.
struct WeightedValues {
    int64_t batch = 0, heads = 0, rows = 0, length_k = 0, value_width = 0;  // value_width: a multiple of 16
    int threads = 1;
    const float* weights = nullptr;
    Input value;  // (B, n, Lk, Dv)
    Output out;   // (B, n, r, Dv)
};

constexpr int64_t kLinearSpan = 2048;  // tokens of a span of causal linear attention, which runs beside the others

// Causal linear attention, queries and keys of one length. Shapes: M features, Dv value width; n = b * kv_heads + head.
struct Linear {
    enum Map : int { identity = 0, elu_plus_one = 1 };

    int64_t batch = 0, heads = 0, kv_heads = 0, length = 0, width = 0, value_width = 0;
    Type type = Type::f32;
    Map map = identity;
    bool normalise = true;
    float least = 0;  // a row whose weights sum to less, in magnitude, is 0 where normalised
    int threads = 1;
    Input query, key, value;
    Output out;                    // forward
    float* denominator = nullptr;  // (B, Hq, L): sums of weights
    // bool (B or 1, L), the batch's stride beside it: tokens whose features are 0, whatever stands there; or null.
    const uint8_t *rows = nullptr, *keys = nullptr;
    int64_t rows_batch = 0, keys_batch = 0;
    // (B, Hkv, 1 + L) or null: entry 0 is the unit of the state before, entry 1 + j that of key j; and the greatest so far.
    const float *log_scale = nullptr, *running = nullptr;
    float* states = nullptr;  // (B, Hkv, spans() + 1, M, Dv + 1) before each span and after the last; the first is given

    // Backward, where d_states is not null: its last one is given, the others are written.
    Input out_read, d_out;
    Output d_query, d_key, d_value;
    float* d_states = nullptr;

    int64_t spans() const { return (length + kLinearSpan - 1) / kLinearSpan; }
};

// One token after a state: B, Hq, Hkv, M features, W value width as in Linear. Rows of the tensors are not looked at.
struct LinearStep {
    int64_t batch = 0, heads = 0, kv_heads = 0, width = 0, value_width = 0;
    Type type = Type::f32;
    Linear::Map map = Linear::identity;
    bool normalise = true;
    float least = 0;  // as in Linear
    int threads = 1;
    Input query, key, value;
    Output out;
    // The state before: (B, Hkv, M, W) and (B, Hkv, M), and strides of the first three axes; null: nothing came before.
    const float *sums = nullptr, *weights = nullptr;
    int64_t sums_at[3] = {}, weights_at[3] = {};
    float *new_sums = nullptr, *new_weights = nullptr;  // contiguous
};

// Per head, over the rows that are real: the least and the greatest entry and the mean norm of queries, keys and values, and
// the least and the greatest logit and weight.
struct HeadRanges {
    Type type = Type::f32;
    int threads = 1;
    struct Vectors {
        Input data;  // data.data null: there are none
        int64_t batch = 0, heads = 0, rows = 0, width = 0;
        const uint8_t* real = nullptr;  // (B or 1, H or 1, rows), or null: all
        int64_t real_batch = 0, real_head = 0;
    } query, key, value;
    // (B, Hq, Lq), contiguous: as in Statistics. Rows whose lse is -inf are not counted, and their queries are not real.
    const float *lse = nullptr, *smallest = nullptr, *largest = nullptr, *lowest = nullptr, *highest = nullptr;
    const int64_t* nonfinite = nullptr;
    // (7, Hq): min, max, norm of queries, min, max of logits, of weights; (6, Hkv): min, max, norm of keys, of values.
    float *of_queries = nullptr, *of_keys = nullptr;
    bool* sound = nullptr;  // (Hq + 2 Hkv,): whether nothing of the head is NaN or infinite, and something of it is real
};

constexpr int kFewRows = 8, kOrderedRows = 2;

// out (R, F) = x (R, E) W^T + b, W (F, E), all dense float32, but for W where it is `half`: bf16. With a `block` the terms
// of a sum are added one by one, in blocks of so many that are added as they end: R is at most kOrderedRows, and W may lie
// `turned`, (E, F).
struct FewRows {
    int64_t rows = 0, width = 0, features = 0;  // R (at most kFewRows), E, F
    int64_t block = 0;
    int threads = 1;
    bool half = false, turned = false;
    const float *x = nullptr, *bias = nullptr;  // bias: or null
    const void* weight = nullptr;
    float* out = nullptr;
};

constexpr int kInt8Panel = 64;   // features of a panel
constexpr int kInt8Block = 128;  // terms with one scale: their sums fit into the whole numbers of a float

enum class Activation : int { none = 0, gelu = 1, gelu_tanh = 2, relu = 3, silu = 4 };

// (x - mean) / sqrt(variance + eps), or x / sqrt(mean(x^2) + eps), times plus + weight, + bias; both of the rows' type or null.
struct StepNorm {
    enum Kind : int { none = 0, rms = 1, layer = 2 } kind = none;
    const void *weight = nullptr, *bias = nullptr;
    float eps = 0, plus = 0;
};

// out (R, F) = norm(f(x (R, E) W^T + b) + y) of int8 weights W in panels (int8.h); x, y and out float32, or all bf16. `scales`
// [F / 64][E / 128][2][64]: of each block of W's rows the scale, and the sum of its integers. A row with NaN or infinities
// gives NaN; how many there are comes back.
struct Int8Product {
    int64_t rows = 0, width = 0, features = 0;  // R, E, F
    int threads = 1;
    bool half = false;
    Activation activation = Activation::none;  // f
    const void* x = nullptr;
    const int8_t* weight = nullptr;
    const float *scales = nullptr, *bias = nullptr;  // bias (F,): or null
    const void* added = nullptr;  // y (R, F): or null
    StepNorm norm;
    void* out = nullptr;
    const Int8Product* next = nullptr;  // a product of as many rows that reads f(x W^T + b), which is then written nowhere
};

// How a weight of few bits is held (groups.h), as `GroupForm.code` in operator/_groups.py puts it into a number.
struct GroupForm {
    int bits, group, shift, offset;  // a number of `scales` is for `1 << shift` groups
    bool half, steps, minima, zeros;
    bool bytes;  // q step - zero is a byte, and x has scales for as many terms as the numbers

    explicit GroupForm(int64_t code)
        : bits(code & 15), group(code >> 4 & 63), shift(code >> 10 & 63), offset(code >> 16 & 255), half(code >> 24 & 1),
          steps(code >> 25 & 1), minima(code >> 26 & 1), zeros(code >> 27 & 1), bytes(code >> 28 & 1) {}
    int64_t units(int64_t groups) const { return ((groups - 1) >> shift) + 1; }
    int64_t rows(int64_t groups) const { return units(groups) * (1 + minima) + (groups + 1) / 2 * (steps + zeros); }
};

// A weight W (F, E) of a step, and its bias (F,) of the step's type, or null. int8 and groups as in their products.
struct StepMatrix {
    enum Kind : int { f32 = 0, bf16 = 1, int8 = 2, groups = 3 } kind = f32;
    int64_t form = 0;  // of groups
    int64_t features = 0;  // F; 0: there is none
    const void *weight = nullptr, *bias = nullptr, *scales = nullptr;
};

// A block of a decoder, its norms first: x + after(attention(norm(x))), and the same of the feed-forward layer. `parallel`:
// both are added to x at once; the feed-forward layer reads its own norm of x, or that of attention where it has none.
struct StepLayer {
    enum Activation : int { gelu = 0, gelu_tanh = 1, relu = 2, silu = 3 };

    StepNorm attention_norm, query_norm, key_norm, after_attention, feed_forward_norm, after_feed_forward;
    StepMatrix query, key, value, output, up, gate, down;  // query: of all three where there is no key; up: gate and up, F each
    int64_t heads = 0, kv_heads = 0, width = 0, value_width = 0, hidden = 0;
    int64_t window = 0;  // keys that a query sees, its own among them; 0: all
    const int64_t* first = nullptr;  // (R,): the first of them, in place of a window; or null
    const float *cos = nullptr, *sin = nullptr;  // (pairs,) of each item, `cos_stride` numbers apart
    int64_t cos_stride = 0, pairs = 0;
    const float* sink = nullptr;         // (Hq,), or null
    Output key_cache, value_cache;       // of the step's type, or rows of 8 bits; the new token's slot, held - 1, is written
    bool int8_cache = false;
    void *query_seen = nullptr, *out_seen = nullptr;  // (R, Hq, D) and (R, Hq, Dv): attention's, written for observers; or null
    void* out = nullptr;  // (R, E): the layer's output, of which the next layer reads what was written; or null
    float scale = 1, softcap = 0;
    Activation activation = gelu;
    bool parallel = false, interleaved = false;

    int64_t projected() const { return heads * width + kv_heads * (width + value_width); }
};

// One token of each item through `layers` and a last norm: x, out (R, E) of `type`, f32 or bf16.
struct Step {
    int64_t items = 0, width = 0, layer_count = 0;  // R, E
    Type type = Type::f32;
    int threads = 1;
    bool quads = false;  // AVX512_VNNI is there
    const StepLayer* layers = nullptr;
    StepNorm norm;
    const int64_t* held = nullptr;  // (R,): tokens of each item, the new one among them
    const void* x = nullptr;
    void* out = nullptr;
};

// out (R, F) = x (R, E) W^T + b of weights W in groups (groups.h). `scales` [F / 64][rows][64]: of a panel the bf16 or f16 numbers
// of scales [units][64] and of minima, then the int8 steps [G][64] of scales and of minima, as far as the form has them; G even.
// x, out, bias and what comes back as in Int8Product.
struct GroupProduct {
    int64_t rows = 0, width = 0, features = 0;  // R, E, F
    int threads = 1;
    bool half = false;
    GroupForm form{0};
    const void* x = nullptr;
    const uint8_t* weight = nullptr;
    const uint16_t* scales = nullptr;
    const float* bias = nullptr;
    void* out = nullptr;
};

// What one instruction set offers. Every kernel gives the same bits for any number of threads and any batch mates.
struct Kernels {
    const char* name = nullptr;  // "baseline"; "avx2", "avx512", "avx512_bf16"; "neon", "neon_bf16"
    void (*forward)(const Forward&);   // packs keys, any lengths
    void (*decode)(const Forward&);    // Lq * (Hq / Hkv) small: streams keys, splits them over threads, packs nothing
    void (*round_rows)(const RoundRows&);
    void (*backward)(const Backward&);
    void (*key_counts)(const KeyCounts&);
    void (*statistics)(const Statistics&);
    void (*pooled)(const Pooled&);
    void (*weight_tile)(const WeightTile&);
    void (*weighted_values)(const WeightedValues&);
    void (*linear)(const Linear&);
    void (*linear_step)(const LinearStep&);
    void (*head_ranges)(const HeadRanges&);
    void (*few_rows)(const FewRows&);
    int64_t (*int8_product)(const Int8Product&);
    int64_t (*int8_product_quads)(const Int8Product&);  // by AVX512_VNNI: null where the set cannot have it
    int64_t (*int8_product_tiles)(const Int8Product&);  // by AMX
    int64_t (*step)(const Step&);  // rows of products of bytes that were not finite: then out is of no use
    int64_t (*group_product)(const GroupProduct&);
    int64_t (*group_product_quads)(const GroupProduct&);
    void (*exp2)(const float* from, float* to, int64_t count);  // the kernels' own exponential, for tests
    // The limits of the machine, for the benchmark: multiplications and additions done (2 per lane and FMA) in about
    // `milliseconds` of nothing else, per thread, summed over threads, as FLOP/s; and bytes/s of reading.
    double (*peak_f32)(int threads, double milliseconds);
    double (*peak_bf16)(int threads, double milliseconds);  // null where the set has no bf16 products
    double (*read_bandwidth)(const void* data, int64_t bytes, int threads);
};

}  // namespace saccade

// The backward pass: every weight is computed again from lse, once (Dao et al. 2022, FlashAttention, algorithm 4).
//
//     p = exp(s - lse)     dp = do v^T     ds = p (dp - delta)     delta_i = do_i . out_i - dlse_i
//     dv = p^T do          dk = scale ds^T q                       dq = scale ds k
//
// Of sigmoid attention p = sigmoid(s - log n) and ds = p (1 - p) dp.
//
// A task is one block of keys of one item and kv head; its packed keys and values and the sums of their gradients stay
// in the second-level cache while it walks the query blocks that see them. dq is shared by the tasks of all key blocks:
// they add to it block by block in the order of the keys, so its bits do not depend on the number of threads.
// Block sizes depend on the widths and the element type alone.
#pragma once

#include "backward_tile.h"
#include "backward_walk.h"
#include "parallel.h"

namespace saccade {
namespace SACCADE_SET {

template <class Math, class T> class BackwardPass {
    typedef typename Math::unit unit;
    static constexpr bool direct = std::is_same<T, float>::value;  // dq is summed where it will stand

    const Backward& f;
    const Problem& p;
    const Scale scale;
    const BiasGradient bias;
    const Slopes slopes;
    const bool wants_query, wants_key;
    const int64_t units, value_units, columns, value_columns;  // units along the widths, and their padded widths
    const int64_t grains, block_grains, block_keys, key_blocks, blocks;
    std::shared_ptr<const WorkList> list;
    float* sums = nullptr;  // dq as float, (B, Hq, Lq, D), unless `direct`
    std::atomic<bool> failed{false};
    Turns query_turns, bias_turns, end_turns, table_turns;
    const int64_t table_size;  // floats of a task's copy of a program's tables' gradients; 0: none

    // The memory of a task. Operands b of a product are rows of `columns` units, `pack` rows together.
    struct Desk {
        unit *keys, *values;      // panels [panel][units][panel keys]
        unit* key_rows;           // [keys / pack][columns]
        float *d_key, *d_value;   // [keys][columns]
        unit *query, *d_out;      // [rows][units]
        unit *query_rows, *d_out_rows;  // [rows / pack][columns]; for single floats the same as above
        float* d_query;           // [rows][columns]
        float* bias_sums;         // [group][local_size]
        BackwardTile<Math> tile;
        BackwardRows rows;
        float row_sums[grain];
        bool poisoned[most_grains];  // a key or value of the grain is not finite
        bool rows_poisoned;
    };

  public:
    explicit BackwardPass(const Backward& f)
        : f(f), p(f.problem), scale(p.scale, Math::pack), bias(f), slopes(f, scale.rest, bias), wants_query(f.d_query.data),
          wants_key(f.d_key.data), units(up_to(p.width, Math::pack) / Math::pack),
          value_units(up_to(p.value_width, Math::pack) / Math::pack), columns(up_to(p.width, lanes)),
          value_columns(up_to(p.value_width, lanes)), grains(up_to(p.length_k, grain) / grain),
          block_grains(std::clamp<int64_t>((1 << 19) / (4 * grain * (3 * columns + 2 * value_columns)) / 2 * 2, 1, most_grains)),
          block_keys(block_grains * grain), key_blocks(up_to(grains, block_grains) / block_grains),
          blocks(up_to(p.length_q, grain) / grain), table_size(bias.of_tables() ? p.bias.code->copied() : 0) {}

    void run() {
        const int64_t rows = p.batch * p.heads * p.length_q, heads = p.batch * p.kv_heads;
        if (p.mask && rows && p.length_k) list = work_list(p.mask, p.length_q, p.length_k, grain, grain);
        const int64_t sums_bytes = direct || !wants_query ? 0 : up_to(rows * p.width * 4, 64);
        const int64_t query_turns_count = wants_query || bias.form == BiasGradient::rows ? p.batch * p.heads * blocks : 0;
        const int64_t bias_turns_count = bias.shared() ? bias.chains() * blocks * key_blocks : 0;
        const int64_t end_turns_count = bias.at_end() && bias.form != BiasGradient::columns ? p.batch * p.heads : 0;
        Workspace workspace(sums_bytes + (query_turns_count + bias_turns_count + end_turns_count + 1) * 4);
        sums = static_cast<float*>(workspace.data());
        auto* turn = reinterpret_cast<std::atomic<int32_t>*>(static_cast<char*>(workspace.data()) + sums_bytes);
        if (query_turns_count) query_turns = Turns(turn, &failed);
        if (bias_turns_count) bias_turns = Turns(turn + query_turns_count, &failed);
        if (end_turns_count) end_turns = Turns(turn + query_turns_count + bias_turns_count, &failed);
        if (table_size) table_turns = Turns(turn + query_turns_count + bias_turns_count + end_turns_count, &failed);
        Turns(turn, &failed).clear(query_turns_count + bias_turns_count + end_turns_count + 1);
        // Neighbours in time belong to different heads and hardly ever wait for each other.
        const auto task = [&](int64_t n) {
            try {
                take(n / heads, n % heads / p.kv_heads, n % heads % p.kv_heads);
                if (table_size) add_tables(n);
            } catch (...) {
                failed.store(true);
                throw;
            }
        };
        if (key_blocks == 1) {  // nothing is shared: a task does all of its heads, and one region of threads is enough
            parallel(p.threads, heads, [&](int64_t n, int) {
                const int64_t b = n / p.kv_heads, first = n % p.kv_heads * p.group(), last = first + p.group();
                for (int64_t h = first; h < last; h++) prepare(b, h, 0, p.length_q);
                task(n);
                for (int64_t h = first; h < last; h++) finish(b, h, 0, p.length_q);
            });
            return;
        }
        constexpr int64_t stretch = 256;
        const int64_t parts = up_to(p.length_q, stretch) / stretch;
        const auto by_rows = [&](auto&& body) {
            parallel(p.threads, p.batch * p.heads * parts, [&](int64_t n, int) {
                const int64_t low = n % parts * stretch;
                body(n / parts / p.heads, n / parts % p.heads, low, std::min(p.length_q, low + stretch));
            });
        };
        by_rows([&](int64_t b, int64_t h, int64_t low, int64_t high) { prepare(b, h, low, high); });
        parallel(p.threads, key_blocks * heads, [&](int64_t n, int) { task(n); });
        if (!direct && wants_query) by_rows([&](int64_t b, int64_t h, int64_t low, int64_t high) { finish(b, h, low, high); });
    }

  private:
    float* sum_at(int64_t b, int64_t h, int64_t i) const {
        if constexpr (direct) return at<float>(f.d_query, b, h, i);
        else return sums + ((b * p.heads + h) * p.length_q + i) * p.width;
    }

    // delta of rows [low, high), and zeros where their dq is summed. Rows that see nothing are not read.
    void prepare(int64_t b, int64_t h, int64_t low, int64_t high) const {
        for (int64_t i = low; i < high; i++) {
            if (wants_query) std::fill_n(sum_at(b, h, i), p.width, 0.0f);
            if (p.sigmoid) continue;
            const int64_t n = (b * p.heads + h) * p.length_q + i;
            vf sum = {};
            if (f.lse[n] != -infinity) {
                const T *out = at<T>(f.out, b, h, i), *d_out = at<T>(f.d_out, b, h, i);
                for (int64_t c = 0; c < p.value_width; c += lanes)
                    sum += load_as_float(out + c, p.value_width - c) * load_as_float(d_out + c, p.value_width - c);
            }
            f.delta[n] = total(sum) - (f.d_lse ? f.d_lse[n] : 0);
        }
    }

    void finish(int64_t b, int64_t h, int64_t low, int64_t high) const {
        if (direct || !wants_query) return;
        for (int64_t i = low; i < high; i++) {
            const float* sum = sum_at(b, h, i);
            T* to = at<T>(f.d_query, b, h, i);
            for (int64_t c = 0; c < p.width; c += lanes)
                store_from_float(to + c, load_as_float(sum + c, p.width - c) * splat(p.scale), p.width - c);
        }
    }

    // --- a task -----------------------------------------------------------------------------------------------------

    void take(int64_t block, int64_t b, int64_t kv_head) {
        thread_local Walk walk;
        thread_local Desk desk;
        walk.start(p, list.get(), b, kv_head, block, block_grains);
        spread_out(desk);
        pack(desk, walk);
        if (table_size) std::fill_n(tables(), table_size, 0.0f);
        const int64_t group = p.group(), size = bias.local_size(block_keys), first = walk.first_grain * grain;
        const int64_t keys = std::min(p.length_k, walk.last_grain * grain) - first;
        const int64_t low = std::min(walk.low * grain, p.length_q), high = std::min(walk.high * grain, p.length_q);
        if (bias.at_end())
            for (int64_t g = 0; g < group; g++) bias.clear(desk.bias_sums + g * size, block_keys, low, high);
        for (int64_t i = bias_turns ? 0 : walk.low; i < (bias_turns ? blocks : walk.high); i++) {
            const int64_t bias_turn = bias_turns ? (bias.chain(b, kv_head) * blocks + i) * key_blocks + block : 0;
            if (bias_turns) bias_turns.wait(bias_turn, bias.place(b, kv_head));
            for (int64_t g = 0; g < group; g++) visit(desk, walk, i, g);
            if (bias_turns) bias_turns.pass(bias_turn, bias.place(b, kv_head) + 1);
        }
        if (wants_key) store_keys(desk, walk, first, keys);
        if (bias.at_end())
            for (int64_t g = 0; g < group; g++) {
                const int64_t h = kv_head * group + g;
                if (end_turns) end_turns.wait(b * p.heads + h, block);
                bias.add(desk.bias_sums + g * size, b, h, first, keys, block_keys, low, high);
                if (end_turns) end_turns.pass(b * p.heads + h, block + 1);
            }
    }

    // What a task sums of the tables' gradient.
    float* tables() const { return static_cast<float*>(scratch(3, table_size * 4)); }

    void add_tables(int64_t task) const {
        const float* const from = tables();
        table_turns.wait(0, task);
        int64_t done = 0;  // of several pulls of one table the first
        for (const ScoreProgram::Pull& pull : p.bias.code->pulls) {
            if (pull.own < done) continue;
            for (int64_t n = 0; n < pull.size; n++) f.d_bias[pull.start + n] += from[pull.own + n];
            done = pull.own + pull.size;
        }
        table_turns.pass(0, task + 1);
    }

    void spread_out(Desk& desk) const {
        char* base = nullptr;
        int64_t bytes = 0;
        const auto place = [&](auto*& pointer, int64_t count) {
            if (base) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + bytes);
            bytes += up_to(count * sizeof(*pointer), 64);
        };
        const auto lay = [&] {
            place(desk.keys, block_keys * units), place(desk.values, block_keys * value_units);
            place(desk.key_rows, block_keys / Math::pack * columns);
            place(desk.d_key, block_keys * columns), place(desk.d_value, block_keys * value_columns);
            place(desk.query, grain * columns), place(desk.d_out, grain * value_columns);
            place(desk.query_rows, grain * columns), place(desk.d_out_rows, grain * value_columns);
            place(desk.d_query, grain * columns);
            place(desk.tile.s, grain * tile_keys), place(desk.tile.dp, grain * tile_keys);
            place(desk.tile.weights, grain * tile_keys), place(desk.tile.slopes, grain * tile_keys);
            place(desk.tile.natural, grain * tile_keys), place(desk.tile.raw, tile_keys);
            place(desk.bias_sums, p.group() * bias.local_size(block_keys));
        };
        lay();
        base = static_cast<char*>(scratch(0, bytes)), bytes = 0;
        lay();
        if constexpr (Math::pack == 1) {
            desk.query_rows = desk.query, desk.d_out_rows = desk.d_out;
            desk.tile.weights = desk.tile.s, desk.tile.slopes = desk.tile.natural = desk.tile.dp;
        }
    }

    // Keys that no query may see are not read; zeros stand for them.
    void pack(Desk& desk, const Walk& walk) const {
        if (walk.nothing()) return;
        const Span seen = walk.seen();
        const int64_t b = walk.b, h = walk.kv_head;
        for (int64_t g = walk.first_grain; g < walk.last_grain; g++) {
            const int64_t start = g * grain, offset = start - walk.first_grain * grain;
            const int64_t count = std::min<int64_t>(grain, p.length_k - start);
            const int64_t low = std::max<int64_t>(seen.start - start, 0), high = std::min(seen.stop - start, count);
            bool finite = true;
            for (int64_t j = 0; j < count; j += panel) {
                const int64_t some = std::min<int64_t>(panel, count - j);
                const T *key = at<T>(f.key, b, h, start + j), *value = at<T>(f.value, b, h, start + j);
                unit *keys = desk.keys + (offset + j) * units, *values = desk.values + (offset + j) * value_units;
                finite &= pack_panel<Math, T>(key, f.key.row, low - j, high - j, some, p.width, keys);
                if (p.sigmoid && !finite) spoil(keys, panel * units);
                finite &= pack_panel<Math, T>(value, f.value.row, low - j, high - j, some, p.value_width, values);
            }
            if (wants_query)
                pack_rows<Math, T>(at<T>(f.key, b, h, start), f.key.row, low, high, count, p.width,
                                   desk.key_rows + offset / Math::pack * columns, columns);
            desk.poisoned[g - walk.first_grain] = !finite;
        }
        if (!wants_key) return;
        const int64_t keys = std::min(p.length_k, walk.last_grain * grain) - walk.first_grain * grain;
        std::fill_n(desk.d_key, keys * columns, 0.0f), std::fill_n(desk.d_value, keys * value_columns, 0.0f);
    }

    void store_keys(const Desk& desk, const Walk& walk, int64_t first, int64_t keys) const {
        const bool nothing = walk.nothing();
        for (int64_t j = 0; j < keys; j++) {
            T* d_key = at<T>(f.d_key, walk.b, walk.kv_head, first + j);
            T* d_value = at<T>(f.d_value, walk.b, walk.kv_head, first + j);
            for (int64_t c = 0; c < p.width; c += lanes)
                store_from_float(d_key + c, nothing ? vf{} : load(desk.d_key + j * columns + c) * splat(scale.rest), p.width - c);
            for (int64_t c = 0; c < p.value_width; c += lanes)
                store_from_float(d_value + c, nothing ? vf{} : load(desk.d_value + j * value_columns + c), p.value_width - c);
        }
    }

    // --- one query block of one head --------------------------------------------------------------------------------

    void visit(Desk& desk, Walk& walk, int64_t i, int64_t g) const {
        Walk::State state[most_grains];
        const int64_t h = walk.kv_head * p.group() + g, count = walk.count();
        if (!walk.look(i, g, state)) return;
        if (i + 1 < walk.high) fetch_rows(walk.b, h, (i + 1) * grain, std::min((i + 2) * grain, p.length_q));
        load_rows(desk, walk.b, h, i * grain, std::min<int64_t>(grain, p.length_q - i * grain));
        if (wants_query) std::fill_n(desk.d_query, desk.rows.count * columns, 0.0f);
        std::fill_n(desk.row_sums, grain, 0.0f);
        for (int64_t n = 0; n < count;) {
            if (state[n] == Walk::absent) {
                n++;
                continue;
            }
            const int64_t size = n + 1 < count && state[n + 1] != Walk::absent ? 2 : 1;
            add_tile(desk, walk, n, size, state, table_size ? tables() : desk.bias_sums + g * bias.local_size(block_keys));
            n += size;
        }
        if (!query_turns) return;
        const int64_t turn = (walk.b * p.heads + h) * blocks + i;
        query_turns.wait(turn, walk.block_before(h, i) + 1);
        if (wants_query) add_query(desk);
        if (bias.form == BiasGradient::rows) bias.add_rows(desk.row_sums, walk.b, h, desk.rows.first, desk.rows.count);
        query_turns.pass(turn, walk.block + 1);
    }

    // Rows that the next visit will load come from far away: they are on their way while this one computes.
    void fetch_rows(int64_t b, int64_t h, int64_t low, int64_t high) const {
        const auto fetch = [](const auto* row, int64_t count) {
            for (int64_t n = 0; n < count; n += 64 / (int64_t)sizeof(*row)) __builtin_prefetch(row + n, 0, 2);
        };
        for (int64_t i = low; i < high; i++) {
            fetch(at<T>(f.query, b, h, i), p.width), fetch(at<T>(f.d_out, b, h, i), p.value_width);
            if (wants_query) fetch(sum_at(b, h, i), p.width);
        }
    }

    // Queries, upstream gradients and what is known of their rows. Rows that see nothing are zero and not read.
    void load_rows(Desk& desk, int64_t b, int64_t h, int64_t first, int64_t count) const {
        BackwardRows& rows = desk.rows;
        rows.b = b, rows.h = h, rows.first = first, rows.count = count, rows.blind = false;
        const int64_t query_width = Math::pack == 1 ? columns : units, value_width = Math::pack == 1 ? value_columns : value_units;
        for (int64_t i = 0; i < count; i++) {
            const int64_t n = (b * p.heads + h) * p.length_q + first + i;
            unit *query = desk.query + i * query_width, *d_out = desk.d_out + i * value_width;
            if (p.sigmoid ? p.sigmoid.at(b, h, first + i) == 0 : f.lse[n] == -infinity) {
                rows.lse[i] = infinity, rows.low[i] = rows.delta[i] = 0, rows.blind = true;
                std::fill_n(query, query_width, unit()), std::fill_n(d_out, value_width, unit());
                continue;
            }
            if (p.sigmoid) rows.lse[i] = p.sigmoid.at(b, h, first + i);
            else rows.lse[i] = f.lse[n], rows.low[i] = f.lse_low ? f.lse_low[n] : 0, rows.delta[i] = f.delta[n];
            if (p.sink) add_sink(rows.lse[i], rows.low[i], p.sink[h]);
            pack_query<Math, T>(at<T>(f.query, b, h, first + i), f.query.row, 1, p.width, scale.power, query, query_width);
            pack_query<Math, T>(at<T>(f.d_out, b, h, first + i), f.d_out.row, 1, p.value_width, 1, d_out, value_width);
        }
        if (p.sigmoid) spoil(desk.query, count * query_width);
        if constexpr (Math::pack == 2) {
            const auto* query = reinterpret_cast<const bf16*>(desk.query);
            const auto* d_out = reinterpret_cast<const bf16*>(desk.d_out);
            bool finite = pack_rows<Math, bf16>(query, 2 * units, 0, count, count, p.width, desk.query_rows, columns);
            finite &= pack_rows<Math, bf16>(d_out, 2 * value_units, 0, count, count, p.value_width, desk.d_out_rows, value_columns);
            desk.rows_poisoned = !finite;
        } else {
            Finite finite;
            for (int64_t n = 0; n < count * columns; n += lanes) finite.see(load(desk.query + n));
            for (int64_t n = 0; n < count * value_columns; n += lanes) finite.see(load(desk.d_out + n));
            desk.rows_poisoned = !finite.all();
        }
    }

    // lse + low becomes log(exp(lse + low) + exp(sink)); a sink of -inf is none, NaN and +inf stay.
    static void add_sink(float& lse, float& low, float sink) {
        if (sink == -infinity) return;
        const double one = (double)lse + low, other = sink;
        const bool finite = std::isfinite(one) && std::isfinite(other);
        const double all = finite ? std::max(one, other) + std::log1p(std::exp(-std::fabs(one - other))) : one + other;
        lse = (float)all;
        low = finite ? (float)(all - lse) : 0;
    }

    void add_query(const Desk& desk) const {
        const vf factor = splat(direct ? p.scale : 1.0f);
        for (int64_t i = 0; i < desk.rows.count; i++) {
            float* to = sum_at(desk.rows.b, desk.rows.h, desk.rows.first + i);
            const float* sum = desk.d_query + i * columns;
            for (int64_t c = 0; c < p.width; c += lanes)
                store_from_float(to + c, load_as_float(to + c, p.width - c) + load(sum + c) * factor, p.width - c);
        }
    }

    // --- one tile: the five products ----------------------------------------------------------------------------------

    void add_tile(Desk& desk, const Walk& walk, int64_t slot, int64_t size, const Walk::State* state, float* bias_local) const {
        BackwardTile<Math>& tile = desk.tile;
        BackwardRows& rows = desk.rows;
        tile.offset = slot * grain, tile.first = (walk.first_grain + slot) * grain;
        tile.keys = std::min(size * grain, p.length_k - tile.first), tile.width = up_to(tile.keys, lanes);
        bool masked = tile.width != tile.keys, some = p.bias.form != Bias::none || rows.blind, poisoned = desk.rows_poisoned;
        for (int64_t n = 0; n < size; n++) {
            read_bits(tile, rows, n, state[slot + n]);
            some |= state[slot + n] == Walk::partial, poisoned |= desk.poisoned[slot + n];
        }
        masked |= some;
        const int64_t query_lead = Math::pack == 1 ? columns : units, value_lead = Math::pack == 1 ? value_columns : value_units;
        for (int64_t j = 0; j < tile.width; j += panel) {
            const int64_t wide = std::min<int64_t>(panel, tile.width - j), at_ = tile.offset + j;
            multiply<Math, natural, false>(rows.count, wide, units, desk.query, query_lead, desk.keys + at_ * units, panel,
                                           tile.s + j, tile_keys);
            multiply<Math, natural, false>(rows.count, wide, value_units, desk.d_out, value_lead, desk.values + at_ * value_units,
                                           panel, tile.dp + j, tile_keys);
        }
        // A row of half precision with all its keys in this tile.
        if (!direct && !p.sigmoid && key_blocks == 1 && p.length_k <= tile_keys) slopes.sum_delta(tile, rows, f.d_lse, f.delta);
        slopes.form(tile, rows, masked, bias_local, desk.row_sums);
        if (some && poisoned) return add_seen(desk);
        const int64_t pairs = up_to(rows.count, Math::pack) / Math::pack;
        if (wants_key) {
            multiply<Math, turned, true>(tile.keys, value_columns, pairs, tile.weights, tile_keys, desk.d_out_rows, value_columns,
                                         desk.d_value + tile.offset * value_columns, value_columns);
            multiply<Math, turned, true>(tile.keys, columns, pairs, tile.slopes, tile_keys, desk.query_rows, columns,
                                         desk.d_key + tile.offset * columns, columns);
        }
        if (wants_query)
            multiply<Math, natural, true>(rows.count, columns, up_to(tile.keys, Math::pack) / Math::pack, tile.natural,
                                          tile_keys / Math::pack, desk.key_rows + tile.offset / Math::pack * columns, columns,
                                          desk.d_query, columns);
    }

    void read_bits(BackwardTile<Math>& tile, const BackwardRows& rows, int64_t n, Walk::State state) const {
        const int64_t start = tile.first + n * grain;
        const int count = (int)std::min<int64_t>(grain, p.length_k - start);
        if (state == Walk::partial)
            p.mask->block_bits(rows.b, rows.h, {rows.first, rows.first + rows.count}, start, count, &tile.bits[0][n], tile_grains);
        else
            for (int64_t i = 0; i < rows.count; i++) tile.bits[i][n] = (uint64_t(1) << count) - 1;
        if (rows.blind)  // without a mask, too: logits may all be -inf
            for (int64_t i = 0; i < rows.count; i++)
                if (rows.lse[i] == infinity) tile.bits[i][n] = 0;
    }

    // The last three products pair by pair, for a tile with something not finite that not everybody sees: 0 * NaN is NaN.
    void add_seen(Desk& desk) const {
        const BackwardTile<Math>& tile = desk.tile;
        for (int64_t i = 0; i < desk.rows.count; i++)
            for (int64_t j = 0; j < tile.keys; j++) {
                if (!tile.sees(i, j)) continue;
                const int64_t row = i / Math::pack, key = tile.offset + j, at_ = row * tile_keys + j;
                const float weight = Math::entry(tile.weights[at_], i), slope = Math::entry(tile.slopes[at_], i);
                if (wants_key) {
                    for (int64_t c = 0; c < p.value_width; c++)
                        desk.d_value[key * value_columns + c] += weight * Math::entry(desk.d_out_rows[row * value_columns + c], i);
                    for (int64_t c = 0; c < p.width; c++)
                        desk.d_key[key * columns + c] += slope * Math::entry(desk.query_rows[row * columns + c], i);
                }
                if (wants_query)
                    for (int64_t c = 0; c < p.width; c++)
                        desk.d_query[i * columns + c] += slope * Math::entry(desk.key_rows[key / Math::pack * columns + c], key);
            }
    }
};

inline void backward(const Backward& f) { run_pass<BackwardPass>(f); }

}  // namespace SACCADE_SET
}  // namespace saccade

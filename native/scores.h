// Scores of a block of query rows with a chunk of keys, in a block that stays in the cache: forward and statistics share it.
//
// Rows and keys come in grains of the work list. A chunk is the next eight grains that the rows visit, adjacent or not.
// Sizes depend on the instruction set alone, so a row's bits depend on nothing but its own item and head.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "mask.h"
#include "pack.h"
#include "parallel.h"
#include "program_run.h"
#include "weights.h"

namespace saccade {
namespace SACCADE_SET {

template <class Math, class T> class Scores {
  public:
    typedef typename Math::unit unit;
    static constexpr int rows = grain;          // query rows in a block
    static constexpr int chunk = 8;             // grains of keys taken at once
    static constexpr int wide = chunk * grain;  // scores in a row of the block
    static constexpr int team = 12;             // rows that skip the same columns of a partial chunk: whole register tiles

    // `grain_of` are the grains of the chunk, `partial` which of them have mask bits.
    struct Block {
        int64_t b, h, first, count;       // rows first ... first + count - 1
        const int64_t* listed = nullptr;  // or these rows, one by one
        unit* query;
        float* scores;
        int64_t grain_of[chunk];
        bool partial[chunk];
        int filled;
        int64_t width;               // scores in a row of the chunk
        uint64_t bits[rows][chunk];  // one word for each grain
        Span seen[rows / team];      // columns of the chunk that a team of rows sees something in

        int64_t row(int64_t i) const { return listed ? listed[i] : first + i; }
    };

    const Problem& p;
    const Input &query, &key;
    const Scale scale;
    const Logits logits;
    const float exponent;  // from a difference of scores to an exponent of 2
    const int64_t units, grains, blocks;
    std::shared_ptr<const WorkList> list;

    Scores(const Problem& problem, const Input& query, const Input& key)
        : p(problem), query(query), key(key), scale(p.scale, Math::pack), logits(p, scale.rest),
          exponent(logits.natural() * log2_e), units(up_to(p.width, Math::pack) / Math::pack),
          grains(up_to(p.length_k, grain) / grain), blocks(up_to(p.length_q, rows) / rows) {}

    void read_list() { list = work_list(p.mask, p.length_q, p.length_k, rows, grain); }

    // --- keys: [grain][panel][units][panel keys] ---

    int64_t keys_bytes() const { return up_to(grains * grain * units * 4, 64); }

    // Scores that a grain takes: the last one may end early, at whole vectors.
    int64_t width_of(int64_t g) const { return std::min<int64_t>(grain, up_to(p.length_k - g * grain, lanes)); }

    // The keys of grain g, counted from its first one, that lie within `seen`.
    Span part_of(int64_t g, Span seen) const {
        const int64_t start = g * grain;
        return {std::max<int64_t>(seen.start - start, 0), std::min<int64_t>(std::min(seen.stop, p.length_k) - start, grain)};
    }

    // Only the keys of `part` are read; zeros stand for the others.
    void pack_keys(unit* keys, int64_t b, int64_t kv_head, int64_t g, Span part) const {
        const int64_t start = g * grain, width = width_of(g);
        for (int64_t j = 0; j < width; j += panel) {
            unit* const to = keys + (start + j) * units;
            const bool finite = pack_panel<Math, T>(at<T>(key, b, kv_head, start + j), key.row, part.start - j, part.stop - j,
                                                    std::min<int64_t>(width - j, panel), p.width, to);
            if (p.sigmoid && !finite) spoil(to, panel * units);
        }
    }

    // --- a block ---

    void place(Block& block, int64_t b, int64_t h, int64_t number) const {
        block.b = b, block.h = h, block.filled = 0;
        block.first = number * rows, block.count = std::min<int64_t>(rows, p.length_q - block.first);
    }

    int64_t query_size() const { return up_to(rows * units, 16); }

    // Rows at the ends that see nothing (padding) are not read; zeros stand for them.
    void take_query(Block& block) const {
        if (block.listed) {
            for (int64_t i = 0; i < block.count; i++)
                pack_query<Math, T>(at<T>(query, block.b, block.h, block.row(i)), query.row, 1, p.width, scale.power,
                                    block.query + i * units, units);
            return;
        }
        Span seeing{block.first, block.first + block.count};
        if (p.mask) {
            const Span all = p.mask->rows_of(block.b, block.h, {0, p.length_k});
            seeing = {std::max(seeing.start, all.start), std::max(seeing.start, std::min(seeing.stop, all.stop))};
        }
        const int64_t low = std::min(seeing.start - block.first, block.count), high = std::max(low, seeing.stop - block.first);
        std::fill_n(block.query, low * units, unit{});
        std::fill_n(block.query + high * units, (block.count - high) * units, unit{});
        pack_query<Math, T>(at<T>(query, block.b, block.h, block.first + low), query.row, high - low, p.width, scale.power,
                            block.query + low * units, units);
        if (p.sigmoid) spoil(block.query, block.count * units);
    }

    // Calls take() for each chunk of the pieces.
    template <class Take> SACCADE_INLINE void walk(Block& block, const std::vector<Piece>& pieces, Take&& take) const {
        for (const Piece& piece : pieces)
            for (int64_t g = piece.first; g < piece.last; g++) {
                block.partial[block.filled] = !piece.full;
                block.grain_of[block.filled++] = g;
                if (block.filled == chunk) take(), block.filled = 0;
            }
        if (block.filled) take(), block.filled = 0;
    }

    // Products with all keys of the chunk. What lies outside of `seen` is not written.
    void fill(Block& block, const unit* keys) const {
        block.width = (block.filled - 1) * grain + width_of(block.grain_of[block.filled - 1]);
        look(block);
        for (int n = 0; n < block.filled; n++) score(block, keys, n);
        if (p.bias.form == Bias::program && !block.listed)
            ProgramRun(p, wide, block.b, block.h).columns(block.filled, block.first, [&](int64_t n) { return block.grain_of[n] * grain; });
    }

    // The products of row i become logits over `logits.natural()`; -inf where it does not see.
    SACCADE_INLINE void form(Block& block, int64_t i) const {
        float* s = block.scores + i * wide;
        const int64_t row = block.row(i);
        if (!logits.plain())
            for (int n = 0; n < block.filled; n++)
                logits.turn(s + n * grain, width_of(block.grain_of[n]), block.b, block.h, row, block.grain_of[n] * grain, p.length_k - block.grain_of[n] * grain);
        if (p.bias.form == Bias::program) return form_by_program(block, i);
        hide_unseen(block, i);
    }

  private:
    SACCADE_INLINE void hide_unseen(Block& block, int64_t i) const {
        float* s = block.scores + i * wide;
        for (int n = 0; n < block.filled; n++) {
            const int64_t start = block.grain_of[n] * grain;
            if (block.partial[n]) {
                hide(s + n * grain, width_of(block.grain_of[n]), &block.bits[i][n]);
            } else if (start + grain > p.length_k && p.length_k % lanes) {
                const uint64_t bits = (uint64_t(1) << (p.length_k - start)) - 1;
                hide(s + n * grain, width_of(block.grain_of[n]), &bits);
            }
        }
    }

    void form_by_program(Block& block, int64_t i) const {
        ProgramRun run(p, wide, block.b, block.h);
        float* s = block.scores + i * wide;
        if (block.listed) run.columns(block.filled, block.row(i), [&](int64_t n) { return block.grain_of[n] * grain; });
        run.row(block.row(i), block.listed ? 0 : i, s, block.width);
        hide_unseen(block, i);
        if (run.strayed(s, block.width)) p.bias.outside->store(true, std::memory_order_relaxed);
    }

    // Mask bits of the partial grains, and which columns each team of rows has any use for.
    void look(Block& block) const {
        for (Span& seen : block.seen) seen = {0, block.width};
        bool any = false;
        for (int n = 0; n < block.filled; n++) {
            if (!block.partial[n]) continue;
            const int64_t start = block.grain_of[n] * grain;
            const int width = (int)std::min<int64_t>(grain, p.length_k - start);
            if (block.listed)
                for (int64_t i = 0; i < block.count; i++) p.mask->row_bits(block.b, block.h, block.row(i), start, width, &block.bits[i][n]);
            else
                p.mask->block_bits(block.b, block.h, {block.first, block.first + block.count}, start, width, &block.bits[0][n], chunk);
            any = true;
        }
        if (!any) return;
        for (int64_t first = 0; first < block.count; first += team) {
            int64_t low = block.width, high = 0;
            for (int n = 0; n < block.filled; n++) {
                const uint64_t word = block.partial[n] ? bits_of(block, n, first, team) : ~uint64_t{0} >> (64 - width_of(block.grain_of[n]));
                if (!word) continue;
                low = std::min<int64_t>(low, n * grain + __builtin_ctzll(word));
                high = std::max<int64_t>(high, n * grain + 64 - __builtin_clzll(word));
            }
            block.seen[first / team] = {low - low % (2 * lanes), up_to(high, lanes)};
        }
    }

    // Keys of grain n that any of these rows sees.
    static uint64_t bits_of(const Block& block, int n, int64_t first, int64_t count) {
        uint64_t word = 0;
        for (int64_t i = first; i < std::min(first + count, block.count); i++) word |= block.bits[i][n];
        return word;
    }

    // Products with the keys of grain n; in a partial one each register tile takes the vectors it sees something in.
    void score(Block& block, const unit* keys, int n) const {
        const int64_t width = width_of(block.grain_of[n]);
        const int step = block.partial[n] ? tile_rows(3) : rows;
        for (int64_t i = 0; i < block.count; i += step) {
            const int64_t count = std::min<int64_t>(step, block.count - i);
            Span seen{0, width};
            if (block.partial[n]) {
                const uint64_t word = bits_of(block, n, i, count);
                if (!word) continue;
                seen = {__builtin_ctzll(word) / lanes * lanes, up_to(64 - __builtin_clzll(word), lanes)};
            }
            for (int64_t j = 0; j < width; j += panel) {
                const int64_t low = std::max<int64_t>(seen.start - j, 0), high = std::min<int64_t>(seen.stop - j, panel);
                if (low >= high) continue;
                multiply<Math, natural, false>(count, high - low, units, block.query + i * units, units,
                                               keys + (block.grain_of[n] * grain + j) * units + low, panel,
                                               block.scores + i * wide + n * grain + j + low, wide);
            }
        }
    }
};

// Packs heads and works on what is packed. One that is packed is memory of `bytes`; `pack(memory, n, from, to)` takes
// grains [from, to) of kv head n = b * Hkv + head. Stage by stage, each query head has stages[stage] tasks:
// `work(stage, memory, n, h, number)`. All tasks of a stage are done before those of the next.
template <class Pack, class Work>
void by_heads(const Problem& p, int64_t bytes, int64_t grains, std::initializer_list<int64_t> stages, Pack&& pack, Work&& work) {
    constexpr int64_t kept_bytes = 1 << 26;
    const int64_t heads = p.batch * p.kv_heads;
    // Small heads are packed by the thread that uses them, into memory that is still in its cache. Larger ones, too, where a
    // mask leaves less to multiply and many heads keep the threads busy to the end: threads that pack for each other write
    // to lines that another core holds, which took a window of 256 keys from 4.0 to 5.2 ms in one process of six.
    constexpr int64_t small = 1 << 19;
    const bool many = heads % p.threads == 0 || heads >= 8 * p.threads;
    const bool own = bytes <= small ? many : many && p.mask && heads >= 4 * p.threads && bytes <= second_level_cache();
    if (own) {
        parallel(p.threads, heads, [&](int64_t n, int) {
            char* const memory = static_cast<char*>(scratch(1, bytes));
            pack(memory, n, 0, grains);
            for (int stage = 0; stage < (int)stages.size(); stage++)
                for (int64_t g = 0; g < p.group(); g++)
                    for (int64_t number = 0; number < stages.begin()[stage]; number++)
                        work(stage, memory, n, n % p.kv_heads * p.group() + g, number);
        });
        return;
    }
    // Otherwise by all threads, as many heads at a time as fit into a buffer that is kept from call to call.
    const int64_t most = std::max<int64_t>(1, std::min(heads, kept_bytes / std::max<int64_t>(bytes, 1))), parts = (grains + 7) / 8;
    Workspace workspace(most * bytes);
    for (int64_t first = 0; first < heads; first += most) {
        const int64_t some = std::min(most, heads - first);
        const auto packed = [&](int64_t n) { return static_cast<char*>(workspace.data()) + n * bytes; };
        parallel(p.threads, some * parts, [&](int64_t n, int) {
            pack(packed(n / parts), first + n / parts, n % parts * 8, std::min(grains, n % parts * 8 + 8));
        });
        for (int stage = 0; stage < (int)stages.size(); stage++) {
            const int64_t count = stages.begin()[stage], group = p.group() * count;
            parallel(p.threads, some * group, [&](int64_t n, int) {
                const int64_t head = first + n / group;
                work(stage, packed(n / group), head, head % p.kv_heads * p.group() + n % group / count, n % count);
            });
        }
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

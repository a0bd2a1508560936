// The walk of a task: which query blocks see its block of keys, and what of it, according to mask, work list and clips.
#pragma once

#include <algorithm>
#include <vector>

#include "call.h"
#include "mask.h"
#include "pack.h"

namespace saccade {
namespace SACCADE_SET {

constexpr int most_grains = 8;  // grains of keys in a task's block, at most

class Walk {
  public:
    enum State : uint8_t { absent, partial, full };

    int64_t b, kv_head, block;        // which task
    int64_t first_grain, last_grain;  // its keys
    int64_t low, high;                // query blocks that any head visits lie in [low, high); equal: none

    void start(const Problem& problem, const WorkList* work, int64_t item, int64_t head, int64_t number, int64_t block_grains_) {
        p = &problem, list = work, b = item, kv_head = head, block = number, block_grains = block_grains_;
        first_grain = block * block_grains;
        last_grain = std::min(up_to(p->length_k, grain) / grain, first_grain + block_grains);
        low = 0, high = up_to(p->length_q, grain) / grain;
        if (p->mask && high) read_list();
    }

    bool nothing() const { return low == high; }
    int64_t count() const { return last_grain - first_grain; }

    // The keys that some query of the group may see lie within this range.
    Span seen() const {
        if (!p->mask) return {0, p->length_k};
        Span all = key_clip[0];
        for (const Span& clip : key_clip)
            if (!clip.empty()) all = all.empty() ? clip : Span{std::min(all.start, clip.start), std::max(all.stop, clip.stop)};
        return all;
    }

    // What block i of the group's head g sees of each grain; false: nothing. For each g, i never falls.
    bool look(int64_t i, int64_t g, State* state) {
        if (!p->mask) {
            std::fill_n(state, count(), full);
            return true;
        }
        const int64_t which = by_head ? g : 0, first = i * grain, last = std::min(first + grain, p->length_q);
        const Span rows = row_clip[which], keys = key_clip[which];
        if (rows.start >= last || rows.stop <= first) return false;
        const bool cut_rows = rows.start > first || rows.stop < last;
        bool any = false;
        for (int64_t n = 0; n < count(); n++) {
            Run& run = runs[which * count() + n];
            while (run.next < run.stop && pieces[run.next].last <= i) run.next++;
            state[n] = absent;
            if (run.next == run.stop || pieces[run.next].first > i) continue;
            const int64_t start = (first_grain + n) * grain, end = std::min(start + grain, p->length_k);
            state[n] = pieces[run.next].full && !cut_rows && keys.start <= start && keys.stop >= end ? full : partial;
            any = true;
        }
        return any;
    }

    // The last block of keys before this one that block i of head h visits; -1: none.
    int64_t block_before(int64_t h, int64_t i) {
        if (!p->mask) return block - 1;
        list->keys_of(b, h, {i * grain, std::min((i + 1) * grain, p->length_q)}, some);
        int64_t last = -1;
        for (const Piece& piece : some) {
            const int64_t stop = std::min<int64_t>(piece.last, first_grain);
            if (piece.first < stop) last = stop - 1;
        }
        const Span clip = key_clip[by_head ? h % p->group() : 0];
        return last < clip.start / grain ? -1 : last / block_grains;
    }

  private:
    struct Run {
        size_t next, stop;  // into pieces
    };

    const Problem* p;
    const WorkList* list;
    int64_t block_grains;
    bool by_head;
    std::vector<Span> key_clip, row_clip;  // of each head of the group, or the one that all share
    std::vector<Piece> pieces, some;       // the query blocks that see a grain, one run for each grain of each such head
    std::vector<Run> runs;

    void read_list() {
        by_head = p->mask->heads > 1;
        key_clip.clear(), row_clip.clear(), pieces.clear(), runs.clear();
        low = high, high = 0;
        for (int64_t g = 0; g < (by_head ? p->group() : 1); g++) {
            const int64_t h = kv_head * p->group() + g;
            const Span keys = p->mask->keys_of(b, h, {0, p->length_q}), rows = p->mask->rows_of(b, h, {0, p->length_k});
            key_clip.push_back(keys), row_clip.push_back(rows);
            for (int64_t n = first_grain; n < last_grain; n++) {
                const Span span{n * grain, std::min((n + 1) * grain, p->length_k)};
                some.clear();
                if (!rows.empty() && keys.start < span.stop && keys.stop > span.start) list->rows_of(b, h, span, some);
                runs.push_back({pieces.size(), pieces.size() + some.size()});
                pieces.insert(pieces.end(), some.begin(), some.end());
                if (some.empty()) continue;
                low = std::min<int64_t>(low, std::max<int64_t>(some.front().first, rows.start / grain));
                high = std::max<int64_t>(high, std::min<int64_t>(some.back().last, up_to(rows.stop, grain) / grain));
            }
        }
        if (low >= high) low = high = 0;
    }
};

}  // namespace SACCADE_SET
}  // namespace saccade

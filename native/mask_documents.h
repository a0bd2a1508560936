// Documents packed into one sequence: the runs of keys of each are found once.
#pragma once

#include "mask_node.h"

namespace saccade::masks {

// ids[p] == ids[j], or with ids of their own on both sides, query_ids[row] == key_ids[j].
class Documents final : public Node {
  public:
    Documents(const Table& rows, const Table& keys, bool by_position, int64_t reach)
        : rows_(rows), keys_(keys), by_position_(by_position) {
        const int64_t batch = keys.axes == 2 ? keys.shape[0] : 1;
        length_ = std::min(reach, size(keys));
        interval = true;
        items_.resize(batch);
        for (int64_t b = 0; b < batch; ++b) prepare(b);
    }

    void seen(const Place& place, Span rows, Span* keys) const override {
        const Item& item = of(place.item);
        for_rows(place, rows, [&](int64_t id, bool again) {
            keys[0] = again ? keys[-1] : id < 0 ? Span{0, 0} : item.runs[item.first[id]];
            ++keys;
        });
    }

    void bits(const Place& place, const Bits& out) const override {
        uint64_t* words = out.words;
        for_rows(place, out.rows, [&](int64_t id, bool again) {
            if (again)
                std::copy(words - out.stride, words - out.stride + out.words_of_row(), words);
            else
                keys_with(of(place.item), id, out.start, out.count, words);
            words += out.stride;
        });
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Item& item = of(place.item);
        std::vector<int64_t> ids;
        for_rows(place, rows, [&](int64_t id, bool again) {
            if (!again) ids.push_back(id);
        });
        std::sort(ids.begin(), ids.end());
        ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
        const Kind kind = ids.size() == 1 ? Kind::full : Kind::partial;
        if (ids.front() < 0) ids.erase(ids.begin());
        for (const Span& run : runs_of(item, ids, out.keys())) out.only(run, kind);
        out.rest(Kind::empty);
    }

    void signature(int64_t item, int64_t, std::vector<int64_t>& out) const override {
        if (items_.size() > 1 || (rows_.axes == 2 && rows_.shape[0] > 1)) out.push_back(item);
    }

  private:
    struct Item {
        std::vector<int64_t> ids;      // the different ids, ascending
        std::vector<int64_t> first;    // id n has runs[first[n]], ..., runs[first[n + 1] - 1]
        std::vector<Span> runs;        // of keys, ascending for each id
        std::vector<int32_t> numbers;  // which id each key has, where runs are too short to be worth it
    };

    // Calls one(which of the keys' ids the row has or -1, whether it is that of the row before) for each row.
    template <class Do> void for_rows(const Place& place, Span rows, Do&& one) const {
        const Item& item = of(place.item);
        const int64_t move = by_position_ ? place.offset : 0;
        int64_t last = 0, number = -2;
        bool had = false;
        for (int64_t at = rows.start + move; at < rows.stop + move; ++at) {
            const bool there = at >= 0 && at < size(rows_);
            const int64_t id = there ? look(rows_, place.item, at) : 0;
            const bool again = number != -2 && (there ? had && id == last : !had);
            if (!again) number = there ? find(item, id) : -1;
            last = id, had = there;
            one(number, again);
        }
    }

    void keys_with(const Item& item, int64_t id, int64_t start, int count, uint64_t* words) const {
        clear(words, count);
        if (id < 0) return;
        const Span* at = item.runs.data() + item.first[id];
        const Span* const end = item.runs.data() + item.first[id + 1];
        if (!item.numbers.empty() && end - at > 1) return compare(item, id, start, count, words);
        if (end - at > 8)
            at = std::upper_bound(at, end, start, [](int64_t key, const Span& run) { return key < run.stop; });
        for (; at != end && at->start < start + count; ++at) fill(*at, start, count, words);
    }

    static int64_t size(const Table& table) { return table.shape[table.axes - 1]; }
    static int64_t look(const Table& table, int64_t item, int64_t index) {
        if (table.axes == 1) return table.one(index);
        return table.at(table.step(0, item) + index * table.stride[1]);
    }
    const Item& of(int64_t item) const { return items_[items_.size() > 1 ? item : 0]; }

    // The keys of these ids within a range, ascending.
    static std::vector<Span> runs_of(const Item& item, const std::vector<int64_t>& ids, Span keys) {
        std::vector<Span> found;
        if (!item.numbers.empty() && ids.size() > 1) {
            std::vector<bool> wanted(item.ids.size());
            for (int64_t id : ids) wanted[id] = true;
            for (int64_t key = keys.start; key < keys.stop; ++key)
                if (wanted[item.numbers[key]]) {
                    if (found.empty() || found.back().stop != key) found.push_back({key, key});
                    ++found.back().stop;
                }
            return found;
        }
        for (int64_t id : ids)
            found.insert(found.end(), item.runs.begin() + item.first[id], item.runs.begin() + item.first[id + 1]);
        if (ids.size() > 1) std::sort(found.begin(), found.end(), [](Span a, Span b) { return a.start < b.start; });
        return found;
    }

    static int64_t find(const Item& item, int64_t id) {
        const auto found = std::lower_bound(item.ids.begin(), item.ids.end(), id);
        return found != item.ids.end() && *found == id ? found - item.ids.begin() : -1;
    }

    void prepare(int64_t b) {
        struct Run {
            int64_t id;
            Span keys;
        };
        std::vector<Run> runs;
        for (int64_t key = 0; key < length_; ++key) {
            const int64_t id = look(keys_, b, key);
            if (runs.empty() || runs.back().id != id) runs.push_back({id, {key, key}});
            runs.back().keys.stop = key + 1;
        }
        const auto before = [](const Run& x, const Run& y) { return x.id < y.id; };
        if (!std::is_sorted(runs.begin(), runs.end(), before)) std::stable_sort(runs.begin(), runs.end(), before);
        Item& item = items_[b];
        for (const Run& run : runs) {
            if (item.ids.empty() || item.ids.back() != run.id) {
                item.ids.push_back(run.id);
                item.first.push_back(static_cast<int64_t>(item.runs.size()));
            }
            item.runs.push_back(run.keys);
        }
        item.first.push_back(static_cast<int64_t>(item.runs.size()));
        interval &= item.runs.size() == item.ids.size();
        if (static_cast<int64_t>(item.runs.size()) * 16 < length_ || item.runs.size() == item.ids.size()) return;
        item.numbers.resize(length_);
        for (size_t n = 0; n < item.ids.size(); ++n)
            for (int64_t run = item.first[n]; run < item.first[n + 1]; ++run)
                std::fill(item.numbers.begin() + item.runs[run].start, item.numbers.begin() + item.runs[run].stop,
                          static_cast<int32_t>(n));
    }

    void compare(const Item& item, int64_t id, int64_t start, int count, uint64_t* words) const {
        uint8_t same[kChunk];
        const int64_t there = std::clamp<int64_t>(length_ - start, 0, count);
        for (int64_t n = 0; n < there; ++n) same[n] = item.numbers[start + n] == static_cast<int32_t>(id);
        if (there) pack(same, there, words);
    }

    Table rows_, keys_;
    bool by_position_;
    int64_t length_;
    std::vector<Item> items_;
};

}  // namespace saccade::masks

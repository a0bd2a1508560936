// Masks that look things up: global tokens, blocks, edges, tensors, tiles worked out beforehand.
#pragma once

#include <functional>

#include "mask_node.h"

namespace saccade::masks {

// Calls one(block of the row's position, where its words go) for each row.
template <class One> void for_blocks(const Place& place, int64_t size, const Bits& out, One&& one) {
    for (int64_t row = out.rows.start; row < out.rows.stop; ++row)
        one(floor_div(row + place.offset, size), out.row(row));
}

// The profile of some rows along `keys` from their bits.
inline void look_at_rows(const Node& node, const Place& place, Span rows, Span keys, Profile& out) {
    uint64_t words[kRows * kWords], some[kWords], every[kWords];
    for (int64_t at = keys.start; at < keys.stop; at += kChunk) {
        const int count = static_cast<int>(std::min<int64_t>(kChunk, keys.stop - at));
        std::fill(some, some + kWords, 0);
        std::fill(every, every + kWords, ~uint64_t{0});
        for (int64_t row = rows.start; row < rows.stop; row += kRows) {
            const Bits bits{{row, std::min(row + kRows, rows.stop)}, at, count, words, kWords};
            node.bits(place, bits);
            for (int64_t n = bits.rows.start; n < bits.rows.stop; ++n)
                for (int word = 0; word < bits.words_of_row(); ++word) {
                    some[word] |= bits.row(n)[word];
                    every[word] &= bits.row(n)[word];
                }
        }
        out.add_words(at, some, every, count);
    }
}

// p in tokens or j in tokens.
class Global final : public Node {
  public:
    explicit Global(Subset tokens) : tokens_(std::move(tokens)) {}

    void bits(const Place& place, const Bits& out) const override {
        uint64_t tokens[kWords];
        tokens_.bits(place.item, out.start, out.count, tokens);
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row) {
            if (tokens_.contains(place.item, row + place.offset))
                assign(kEverywhere, out.start, out.count, out.row(row));
            else
                std::copy(tokens, tokens + out.words_of_row(), out.row(row));
        }
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Kind kind = tokens_.kind(place.item, moved(rows, place.offset));
        if (kind == Kind::full) return out.rest(Kind::full);
        tokens_.profile(place.item, kind, out);
    }

    void signature(int64_t item, int64_t, std::vector<int64_t>& out) const override { tokens_.sign(item, out); }

  private:
    Subset tokens_;
};

// layout[p / size, j / size], by head where the layout has three axes. A position before 0 is in no block.
class Blocks final : public Node {
  public:
    Blocks(const Table& layout, int64_t size) : layout_(layout), size_(size), heads_(layout.axes == 3) {}

    void bits(const Place& place, const Bits& out) const override {
        for_blocks(place, size_, out, [&](int64_t block, uint64_t* words) {
            clear(words, out.count);
            if (within(block)) keys_of(place, block, out.start, out.count, words);
        });
    }

    void keys_of(const Place& place, int64_t block, int64_t start, int count, uint64_t* words) const {
        const uint8_t* layout = line(place.head, block);
        const int64_t last = std::min(ceil_div(start + count, size_), columns());
        for (int64_t n = start / size_; n < last; ++n)
            if (layout[n * step()]) fill({n * size_, (n + 1) * size_}, start, count, words);
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Span stand = moved(rows, place.offset);
        const int64_t top = floor_div(stand.start, size_), bottom = floor_div(stand.stop - 1, size_);
        const int64_t left = out.keys().start / size_, right = std::min(ceil_div(out.keys().stop, size_), columns());
        const int64_t count = std::max<int64_t>(right - left, 0);
        std::vector<uint8_t> some(count, 0), every(count, 1);
        for (int64_t block = top; block <= bottom; ++block) {
            const uint8_t* layout = within(block) ? line(place.head, block) + left * step() : nullptr;
            for (int64_t n = 0; n < count; ++n) {
                const uint8_t kept = layout && layout[n * step()];
                some[n] |= kept;
                every[n] &= kept;
            }
        }
        for (int64_t n = 0; n < count; ++n)
            out.add((left + n + 1) * size_, every[n] ? Kind::full : some[n] ? Kind::partial : Kind::empty);
        out.rest(Kind::empty);
    }

    void signature(int64_t, int64_t head, std::vector<int64_t>& out) const override {
        if (heads_ && layout_.shape[0] > 1) out.push_back(head);
    }

  private:
    bool within(int64_t block) const { return block >= 0 && block < layout_.shape[heads_]; }
    int64_t columns() const { return layout_.shape[heads_ + 1]; }
    int64_t step() const { return layout_.stride[heads_ + 1]; }
    const uint8_t* line(int64_t head, int64_t block) const {
        return layout_.bytes((heads_ ? layout_.step(0, head) : 0) + block * layout_.stride[heads_]);
    }

    Table layout_;
    int64_t size_;
    int heads_;  // how many axes come before that of the query blocks
};

// Row blocks with a list of key blocks each: columns[starts[n]], ..., columns[starts[n + 1] - 1], ascending, where n is
// the list of block p / size.
class Sparse : public Node {
  public:
    void bits(const Place& place, const Bits& out) const override {
        for_blocks(place, size_, out, [&](int64_t block, uint64_t* words) {
            clear(words, out.count);
            const int64_t list = list_of(block);
            if (list >= 0) keys_of(list, out.start, out.count, words);
        });
    }

    void keys_of(int64_t list, int64_t start, int count, uint64_t* words) const {
        const int64_t* end = columns_ + starts_[list + 1];
        const int64_t* at = std::lower_bound(columns_ + starts_[list], end, start / size_);
        for (; at != end && *at * size_ < start + count; ++at)
            fill({*at * size_, (*at + 1) * size_}, start, count, words);
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Span stand = moved(rows, place.offset);
        const int64_t top = floor_div(stand.start, size_), bottom = floor_div(stand.stop - 1, size_);
        std::vector<int64_t> found;
        for (int64_t block = top; block <= bottom; ++block) {
            const int64_t list = list_of(block);
            if (list >= 0) found.insert(found.end(), columns_ + starts_[list], columns_ + starts_[list + 1]);
        }
        std::sort(found.begin(), found.end());
        for (size_t n = 0, next; n < found.size(); n = next) {
            for (next = n; next < found.size() && found[next] == found[n];) ++next;
            const bool all = static_cast<int64_t>(next - n) == bottom - top + 1;
            out.only({found[n] * size_, (found[n] + 1) * size_}, all ? Kind::full : Kind::partial);
        }
        out.rest(Kind::empty);
    }

  protected:
    // Blocks that follow each other and have a list each, the first one number `list`.
    struct Run {
        Span blocks;
        int64_t list;
    };

    Sparse(int64_t size) : size_(size) {}

    // -1: none.
    int64_t list_of(int64_t block) const {
        const auto before = [](int64_t block, const Run& run) { return block < run.blocks.start; };
        auto run = std::upper_bound(runs_.begin(), runs_.end(), block, before);
        if (run == runs_.begin() || block >= (--run)->blocks.stop) return -1;
        return run->list + block - run->blocks.start;
    }

    int64_t size_;
    std::vector<Run> runs_;  // ascending, apart from each other
    const int64_t *starts_ = nullptr, *columns_ = nullptr;
};

inline std::vector<int64_t> numbers_of(const Table& table) {
    std::vector<int64_t> numbers(table.shape[0]);
    for (size_t n = 0; n < numbers.size(); ++n) numbers[n] = table.one(static_cast<int64_t>(n));
    return numbers;
}

// Pairs (p, j): sorted by p, then by j.
class Edges final : public Sparse {
  public:
    Edges(const Table& starts, const Table& keys) : Sparse(1) {
        starts_ = read(starts, own_starts_);
        columns_ = read(keys, own_keys_);
        runs_ = {{{0, starts.shape[0] - 1}, 0}};
    }

  private:
    static const int64_t* read(const Table& table, std::vector<int64_t>& own) {
        if (table.code == Table::int64 && table.stride[0] == 1) return static_cast<const int64_t*>(table.data);
        own = numbers_of(table);
        return own.data();
    }

    std::vector<int64_t> own_starts_, own_keys_;
};

// Query block r draws one block from each of `count` equal parts of the blocks before it: saccade/operator/_masks/_blocks.py.
// Time and memory are those of the rows and keys there are, however far apart they stand.
class RandomBlocks final : public Sparse {
  public:
    // Rows stand at these positions. A row sees what its block draws, and if symmetric, what draws its block.
    RandomBlocks(int64_t start, int64_t size, int64_t count, bool symmetric, const std::vector<Span>& positions,
                 int64_t keys, const std::function<void()>& pause)
        : Sparse(size), start_(start), count_(count), pause_(pause) {
        int64_t lists = 0;
        for (const Span& span : positions) {
            Span blocks{std::max<int64_t>(floor_div(span.start, size), 0), ceil_div(span.stop, size)};
            if (!runs_.empty()) blocks.start = std::max(blocks.start, runs_.back().blocks.stop);
            if (blocks.empty()) continue;
            runs_.push_back({blocks, lists});
            lists += blocks.stop - blocks.start;
        }
        const int64_t key_blocks = ceil_div(keys, size);
        std::vector<std::vector<int64_t>> seen(lists);
        for (const Run& run : runs_)
            for (int64_t block = run.blocks.start; block < run.blocks.stop; ++block) {
                auto& drawn = seen[run.list + block - run.blocks.start];
                for_drawn(block, key_blocks, [&](int64_t other) { drawn.push_back(other); });
            }
        const int64_t last = symmetric && !runs_.empty() ? runs_.back().blocks.stop : 0;
        for (int64_t drawer = 0; symmetric && drawer < key_blocks; ++drawer)
            for_drawn(drawer, last, [&](int64_t other) {
                const int64_t list = list_of(other);
                if (list >= 0) seen[list].push_back(drawer);
            });
        own_starts_.push_back(0);
        for (auto& blocks : seen) {
            std::sort(blocks.begin(), blocks.end());
            own_columns_.insert(own_columns_.end(), blocks.begin(), blocks.end());
            own_starts_.push_back(static_cast<int64_t>(own_columns_.size()));
        }
        starts_ = own_starts_.data();
        columns_ = own_columns_.data();
    }

  private:
    // Calls one(block) for what `drawer` draws below `stop`.
    template <class Do> void for_drawn(int64_t drawer, int64_t stop, Do&& one) {
        const int64_t count = std::min(count_, drawer);  // of more parts, those beyond are empty
        for (int64_t part = 0, low = 0; part < count && low < stop; ++part) {
            if (++draws_ % 65536 == 0) pause_();
            const int64_t high = part_start(part + 1, drawer, count);
            const int64_t other = low + draw(start_, drawer, part) % (high - low);
            if (other < stop) one(other);
            low = high;
        }
    }

    static int64_t part_start(int64_t part, int64_t blocks, int64_t count) {
        return static_cast<int64_t>(static_cast<Wide>(part) * blocks / count);
    }

    static uint32_t mixed(uint32_t x) {
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        return x ^ (x >> 16);
    }
    static int64_t draw(int64_t start, int64_t drawer, int64_t part) {
        const uint32_t seed = mixed(static_cast<uint32_t>(start) + static_cast<uint32_t>(drawer) * 0x9E3779B1u);
        return mixed(seed ^ (static_cast<uint32_t>(part) * 0x85EBCA77u));
    }

    __extension__ using Wide = __int128;  // products of two positions

    int64_t start_, count_, draws_ = 0;
    const std::function<void()>& pause_;  // while it is made
    std::vector<int64_t> own_starts_, own_columns_;
};

// tensor[b, h, row, j], axes of size 1 broadcast.
class FromTensor final : public Node {
  public:
    explicit FromTensor(const Table& table) : table_(table) {}

    void bits(const Place& place, const Bits& out) const override {
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row) {
            const uint8_t* from = line(place) + table_.step(2, row);
            if (table_.shape[3] > 1)
                pack_strided(from + out.start * table_.stride[3], table_.stride[3], out.count, out.row(row));
            else
                assign(*from ? kEverywhere : Span{0, 0}, out.start, out.count, out.row(row));
        }
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        if (table_.shape[2] == 1) rows.stop = rows.start + 1;
        if (table_.shape[3] == 1 || table_.stride[3] != 1) return look_at_rows(*this, place, rows, out.keys(), out);
        const uint8_t* const first = line(place) + table_.step(2, rows.start);
        for (int64_t at = out.keys().start; at < out.keys().stop; at += kChunk) {
            const int count = static_cast<int>(std::min<int64_t>(kChunk, out.keys().stop - at));
            reduce(first + at, rows.stop - rows.start, at, count, out);
        }
    }

    void signature(int64_t item, int64_t head, std::vector<int64_t>& out) const override {
        if (table_.shape[0] > 1) out.push_back(item);
        if (table_.shape[1] > 1) out.push_back(head);
    }

  private:
    // As bytes, which is twice as fast as packing each row: little more than the time to read them.
    void reduce(const uint8_t* from, int64_t rows, int64_t at, int count, Profile& out) const {
        uint8_t some[kChunk] = {}, every[kChunk];
        std::fill(every, every + kChunk, uint8_t{255});
        for (int64_t row = 0; row < rows; ++row, from += table_.stride[2])
            for (int n = 0; n < count; ++n) {
                some[n] |= from[n];
                every[n] &= from[n];
            }
        uint64_t some_bits[kWords], every_bits[kWords];
        pack(some, count, some_bits);
        pack(every, count, every_bits);
        out.add_words(at, some_bits, every_bits, count);
    }

    const uint8_t* line(const Place& place) const {
        return table_.bytes(table_.step(0, place.item) + table_.step(1, place.head));
    }

    Table table_;
};

// Bits worked out beforehand: tiles of 64 x 64, equal ones stored once.
// which (B or 1, H or 1, rows / 64, keys / 64): the number of a tile, -1 an empty one, -2 a full one.
class Tiles final : public Node {
  public:
    static constexpr int64_t kSide = 64;

    Tiles(const Table& which, const Table& tiles, Span rows, Span keys)
        : which_(which), tiles_(tiles), rows_(rows), keys_(keys) {}

    void bits(const Place& place, const Bits& out) const override {
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row)
            row_of(place, row, out.start, out.count, out.row(row));
    }

    void row_of(const Place& place, int64_t row, int64_t start, int count, uint64_t* words) const {
        clear(words, count);
        const Span keys = meet(keys_, {start, start + count});
        if (keys.empty() || row < rows_.start || row >= rows_.stop) return;
        const int64_t first = (keys.start - keys_.start) / kSide, last = ceil_div(keys.stop - keys_.start, kSide);
        uint64_t line[kWords + 2];
        for (int64_t n = first; n < last; ++n) line[n - first] = word(place, row - rows_.start, n);
        copy_bits(line, keys.stop - keys_.start - first * kSide, start - keys_.start - first * kSide, count, words);
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Span held = meet(keys_, out.keys());
        out.add(held.start, Kind::empty);
        look_at_rows(*this, place, rows, held, out);
        out.rest(Kind::empty);
    }

    void signature(int64_t item, int64_t head, std::vector<int64_t>& out) const override {
        if (which_.shape[0] > 1) out.push_back(item);
        if (which_.shape[1] > 1) out.push_back(head);
    }

  private:
    uint64_t word(const Place& place, int64_t row, int64_t column) const {
        const int64_t tile = which_.at(which_.step(0, place.item) + which_.step(1, place.head) +
                                       row / kSide * which_.stride[2] + column * which_.stride[3]);
        if (tile < 0) return tile == -2 ? ~uint64_t{0} : 0;
        return static_cast<uint64_t>(tiles_.at(tile * tiles_.stride[0] + row % kSide * tiles_.stride[1]));
    }

    Table which_, tiles_;
    Span rows_, keys_;
};

}  // namespace saccade::masks

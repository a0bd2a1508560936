// Runs of keys as bits in words, and as profiles: what a block of rows does along the keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "mask.h"
#include "simd.h"

namespace saccade::masks {

constexpr int64_t kFar = int64_t{1} << 60;  // an open end; sums of two still fit
constexpr Span kEverywhere{-kFar, kFar};
constexpr int kChunk = 1024;  // keys looked at in one go, so that their bits fit on the stack
constexpr int kWords = kChunk / 64;
constexpr int kRows = 64;  // rows looked at in one go

inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
inline int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
inline int words_for(int64_t count) { return static_cast<int>((count + 63) / 64); }
inline Span meet(Span a, Span b) { return {std::max(a.start, b.start), std::min(a.stop, b.stop)}; }
inline Span moved(Span span, int64_t by) { return {span.start + by, span.stop + by}; }

inline Span hull(Span a, Span b) {
    if (a.empty()) return b;
    if (b.empty()) return a;
    return {std::min(a.start, b.start), std::max(a.stop, b.stop)};
}

inline void clear(uint64_t* words, int count) { std::fill(words, words + words_for(count), 0); }

// The lowest `count` bits of a word, 0 <= count <= 64.
inline uint64_t lowest(int64_t count) { return ~(~uint64_t{0} << (count & 63)) | -static_cast<uint64_t>(count >> 6); }

// The words of the keys in a span, the first bit that of key `start`.
class SpanWords {
  public:
    SpanWords(Span span, int64_t start, int count) {
        const int first = static_cast<int>(std::clamp<int64_t>(span.start - start, 0, count));
        const int last = static_cast<int>(std::clamp<int64_t>(span.stop - start, first, count));
        first_ = first / 64, last_ = last / 64;
        head_ = ~uint64_t{0} << (first % 64), tail_ = ~(~uint64_t{0} << (last % 64));
    }

    uint64_t operator[](int n) const {
        const uint64_t from = n < first_ ? 0 : n == first_ ? head_ : ~uint64_t{0};
        return from & (n > last_ ? 0 : n == last_ ? tail_ : ~uint64_t{0});
    }

  private:
    int first_, last_;
    uint64_t head_, tail_;
};

// Bit n of the words: whether key start + n lies in `span`.
inline void assign(Span span, int64_t start, int count, uint64_t* words) {
    const SpanWords kept(span, start, count);
    for (int n = 0; n < words_for(count); ++n) words[n] = kept[n];
}

// Clears the bits of the keys outside of `span`.
inline void keep(Span span, int64_t start, int count, uint64_t* words) {
    const SpanWords kept(span, start, count);
    for (int n = 0; n < words_for(count); ++n) words[n] &= kept[n];
}

// Sets the bits of the keys in `span`.
inline void fill(Span span, int64_t start, int64_t count, uint64_t* words) {
    const int64_t first = std::max<int64_t>(span.start - start, 0);
    const int64_t last = std::min(span.stop - start, count) - 1;
    if (first > last) return;
    const uint64_t head = ~uint64_t{0} << (first % 64), tail = lowest(last % 64 + 1);
    uint64_t* word = words + first / 64;
    uint64_t* const final = words + last / 64;
    if (word == final) {
        *word |= head & tail;
        return;
    }
    *word++ |= head;
    while (word < final) *word++ = ~uint64_t{0};
    *final |= tail;
}

inline void invert(int count, uint64_t* words) {
    for (int n = 0; n < count; n += 64) words[n / 64] = ~words[n / 64] & lowest(std::min(64, count - n));
}

// Bits [start, start + count) of a row of bits; what lies outside of the row is 0.
inline void copy_bits(const uint64_t* row, int64_t size, int64_t start, int count, uint64_t* words) {
    const int64_t held = words_for(size);
    for (int n = 0; n < count; n += 64) {
        const int64_t at = (start + n) >> 6, shift = (start + n) & 63;
        const uint64_t low = at >= 0 && at < held ? row[at] : 0, high = at >= -1 && at + 1 < held ? row[at + 1] : 0;
        words[n / 64] = (shift ? low >> shift | high << (64 - shift) : low) & lowest(std::min(64, count - n));
    }
}

inline void pack(const uint8_t* bytes, int64_t count, uint64_t* words) {
    int64_t at = 0;
    for (; at + 64 <= count; at += 64) words[at / 64] = pack64(bytes + at);
    if (at == count) return;
    uint8_t rest[64] = {};
    std::memcpy(rest, bytes + at, count - at);
    words[at / 64] = pack64(rest);
}

// Where the bits of some rows (at most kRows) and of `count` keys (at most kChunk) from `start` on are written.
struct Bits {
    Span rows;
    int64_t start;
    int count;
    uint64_t* words;
    int64_t stride;  // words from one row to the next

    uint64_t* row(int64_t row) const { return words + (row - rows.start) * stride; }
    int words_of_row() const { return words_for(count); }
};

struct Segment {
    int64_t stop;
    Kind kind;
};

// What a block of rows does along a range of keys: segments from left to right, no two neighbours of one kind.
class Profile {
  public:
    explicit Profile(Span keys) : keys_(keys), end_(keys.start) {}

    // From where the last segment ended up to `stop`; nothing where that lies behind.
    void add(int64_t stop, Kind kind) {
        stop = std::min(stop, keys_.stop);
        if (stop <= end_) return;
        end_ = stop;
        if (!segments_.empty() && segments_.back().kind == kind)
            segments_.back().stop = stop;
        else
            segments_.push_back({stop, kind});
    }

    void rest(Kind kind) { add(keys_.stop, kind); }
    void only(Span span, Kind kind) {
        add(span.start, Kind::empty);
        add(span.stop, kind);
    }

    // Keys from `at` on: those in `every` are full, those in `some` at least partial.
    void add_words(int64_t at, const uint64_t* some, const uint64_t* every, int count) {
        for (int n = 0; n < count; n += 64) add_word(at + n, some[n / 64], every[n / 64], std::min(64, count - n));
    }

    Span keys() const { return keys_; }
    const std::vector<Segment>& segments() const { return segments_; }
    std::vector<Segment>& segments() { return segments_; }

    Kind kind() const {
        if (segments_.empty()) return Kind::empty;
        return segments_.size() == 1 ? segments_[0].kind : Kind::partial;
    }

    // The range outside of which every segment is of this kind.
    Span beyond(Kind kind) const {
        Span found{keys_.start, keys_.start};
        int64_t start = keys_.start;
        for (const Segment& segment : segments_) {
            if (segment.kind != kind) found = hull(found, {start, segment.stop});
            start = segment.stop;
        }
        return found;
    }

  private:
    void add_word(int64_t at, uint64_t some, uint64_t every, int count) {
        while (count > 0) {
            const Kind kind = every & 1 ? Kind::full : some & 1 ? Kind::partial : Kind::empty;
            const uint64_t other = kind == Kind::full ? ~every : kind == Kind::partial ? (~some | every) : some;
            const int run = other ? std::min(__builtin_ctzll(other), count) : count;
            add(at + run, kind);
            if (run >= count) return;
            at += run, count -= run, some >>= run, every >>= run;
        }
    }

    Span keys_;
    int64_t end_;
    std::vector<Segment> segments_;
};

// Replaces `profile` within the keys of `other`: the lesser kind of the two (an intersection) or the greater (a union).
inline void combine(Profile& profile, const Profile& other, bool lesser) {
    Profile result(profile.keys());
    auto theirs = other.segments().begin();
    for (const Segment& mine : profile.segments()) {
        if (other.segments().empty() || mine.stop <= other.keys().start) {
            result.add(mine.stop, mine.kind);
            continue;
        }
        result.add(other.keys().start, mine.kind);
        for (; theirs != other.segments().end(); ++theirs) {
            const Kind kind = lesser ? std::min(mine.kind, theirs->kind) : std::max(mine.kind, theirs->kind);
            result.add(std::min(mine.stop, theirs->stop), kind);
            if (theirs->stop > mine.stop) break;
        }
        result.add(mine.stop, mine.kind);
    }
    profile = std::move(result);
}

}  // namespace saccade::masks

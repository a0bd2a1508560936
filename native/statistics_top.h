// The largest scores of a row and their keys, of equal scores the smaller key: candidates are collected, and now and then
// all but the best are dropped. Their order is counted, not sorted: without branches that nobody can foresee.
#pragma once

#include <algorithm>
#include <cmath>

#include "mask.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// place[n]: how many of the values come before the n-th in descending order; of equal ones the first comes first. Whole
// vectors are read and written, what lies beyond `count` means nothing.
inline void order(const float* values, int64_t count, int32_t* place) {
    vi lane;
    for (int n = 0; n < lanes; n++) lane[n] = n;
    for (int64_t first = 0; first < count; first += lanes) {
        const vf x = load(values + first);
        const int64_t last = std::min(first + lanes, count);
        vi before = {};
        for (int64_t n = 0; n < first; n++) before -= (vi)(splat(values[n]) >= x);
        for (int64_t n = first; n < last; n++) {
            const vi at = (vi)splat_u((uint32_t)(n - first));
            before -= (vi)(splat(values[n]) > x) | ((vi)(splat(values[n]) == x) & (vi)(lane > at));
        }
        for (int64_t n = last; n < count; n++) before -= (vi)(splat(values[n]) > x);
        store(reinterpret_cast<uint32_t*>(place) + first, (vu)before);
    }
}

// Of `rows` rows, in memory that the caller gives: up to `room` candidates a row, of which the best `top` are wanted.
template <int rows> struct Best {
    static constexpr int64_t most_top = 32, most_room = 2 * most_top + lanes;

    int64_t top = 0, room = 0;
    float* scores = nullptr;  // [rows][room], as the keys; those of equal scores ascend
    int32_t* keys = nullptr;
    int32_t count[rows];
    float bar[rows];  // scores up to here are none of the best

    static int64_t room_for(int64_t top) { return (2 * top + 2 * lanes - 1) / lanes * lanes; }
    static int64_t bytes_for(int64_t top) { return top ? rows * room_for(top) * 8 : 0; }

    void start(int64_t top_, void* memory) {
        top = top_, room = room_for(top_);
        scores = static_cast<float*>(memory), keys = reinterpret_cast<int32_t*>(scores + rows * room);
        std::fill_n(count, rows, 0);
        std::fill_n(bar, rows, -infinity);
    }

    // Scores of columns `seen`; highest: the largest of each lane. key(column): the key of a vector's first column.
    template <class Key> void take(int64_t i, const float* s, Span seen, const vf (&highest)[2], Key&& key) {
        if (!(greatest(maximum(highest[0], highest[1])) > bar[i])) return;
        // Where nearly all come near, as with scores that rise from key to key, most would be dropped again.
        int64_t many = 0;
        for (int64_t j = seen.start; j < seen.stop; j += lanes) many += __builtin_popcount(above(load(s + j), bar[i]));
        if (many > 2 * top) bar[i] = std::max(bar[i], bar_of(highest));
        for (int64_t j = seen.start; j < seen.stop; j += lanes) {
            uint32_t bits = above(load(s + j), bar[i]);
            if (!bits) continue;
            if (count[i] + __builtin_popcount(bits) > room) {
                settle(i);
                bits = above(load(s + j), bar[i]);
            }
            add(i, s + j, (int32_t)key(j), bits);
        }
    }

    // Leaves the best of a row in descending order.
    void settle(int64_t i) {
        float* const s = scores + i * room;
        int32_t* const k = keys + i * room;
        float sorted[most_room];
        int32_t sorted_keys[most_room], place[most_room];
        order(s, count[i], place);
        for (int64_t n = 0; n < count[i]; n++) sorted[place[n]] = s[n], sorted_keys[place[n]] = k[n];
        count[i] = (int32_t)std::min<int64_t>(count[i], top);
        std::copy_n(sorted, count[i], s);
        std::copy_n(sorted_keys, count[i], k);
        if (count[i] == top) bar[i] = std::max(bar[i], s[top - 1]);
    }

  private:
    SACCADE_INLINE void add(int64_t i, const float* from, int32_t key, uint32_t bits) {
        float* const s = scores + i * room + count[i];
        int32_t* const k = keys + i * room + count[i];
        count[i] += __builtin_popcount(bits);
        compress(bits, from, key, s, k);
    }

    // Just below a score that at least `top` others reach: the largest of each lane are so many different ones.
    float bar_of(const vf (&highest)[2]) const {
        if (top > 2 * lanes) return -infinity;
        float each[2 * lanes];
        int32_t place[2 * lanes];
        store(each, highest[0]), store(each + lanes, highest[1]);
        order(each, 2 * lanes, place);
        int n = 0;
        while (place[n] != top - 1) n++;
        return std::nextafter(each[n], -infinity);
    }
};

}  // namespace SACCADE_SET
}  // namespace saccade

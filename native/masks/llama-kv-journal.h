#pragma once

#include <cstdint>
#include <vector>

// Which cells came, went or were changed, in that order, as far back as CAPACITY of them. Nothing is noted before somebody reads.
class llama_kv_journal {
public:
    // A step of 32 streams notes about a hundred: each cell is tried, taken back and taken.
    static constexpr uint64_t CAPACITY = 4096;

    void note(uint32_t cell) {
        if (!noted.empty()) {
            noted[count++ % CAPACITY] = cell;
        }
    }

    // all cells have changed
    void note_all() {
        count += CAPACITY + 1;
    }

    // what is noted from now on is behind this place
    uint64_t place() const {
        if (noted.empty()) {
            noted.resize(CAPACITY);
        }
        return count;
    }

    // whether all that was noted behind the place is still there
    bool reaches(uint64_t place) const {
        return !noted.empty() && place <= count && count - place <= CAPACITY;
    }

    uint32_t at(uint64_t place) const { return noted[place % CAPACITY]; }

private:
    mutable std::vector<uint32_t> noted;

    uint64_t count = 0;
};

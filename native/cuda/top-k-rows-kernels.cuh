// The k largest numbers of rows, exactly, in two kernels: what a chunk of a row may have of them, then those of the row.

#pragma once

#include "common.cuh"

#include <cstdint>

constexpr int TOP_K_THREADS = 512;                             // of a CUDA block
constexpr int TOP_K_WARPS   = TOP_K_THREADS/WARP_SIZE;
constexpr int TOP_K_WORDS   = 8;                               // words of four numbers that a thread has of a chunk
constexpr int TOP_K_CHUNK   = TOP_K_WORDS*TOP_K_THREADS;       // words
constexpr int TOP_K_MOST    = 1024;                            // k
constexpr int TOP_K_SPARE   = 512;                             // candidates beyond k that a chunk may have
constexpr int TOP_K_LIST    = 2048;                            // candidates of a row in shared memory; a power of two
constexpr int TOP_K_COUNTED = 256;                             // up to this k candidates are counted, not sorted
constexpr int TOP_K_NEAR    = 64;                              // candidates beyond k that are counted along
constexpr int TOP_K_BITS    = 12;
constexpr int TOP_K_BINS    = 1 << TOP_K_BITS;
constexpr int TOP_K_PLACES  = 64;                              // rows of different operations in one launch

static_assert(TOP_K_MOST + TOP_K_SPARE <= TOP_K_LIST, "a chunk's candidates are not more than a row's");
static_assert(TOP_K_COUNTED + TOP_K_NEAR <= TOP_K_THREADS, "a thread for each candidate that is counted");

struct top_k_place {
    const float * row;
    int *         ids;
    float *       values; // nullptr: not wanted
};

struct top_k_places {
    top_k_place of[TOP_K_PLACES];
    int64_t     columns;
    uint32_t    rows_each; // rows behind one another in each place
    int         k;
    int         words;     // of a chunk
};

struct top_k_shared {
    int bins[TOP_K_BINS]; // the largest keys' first
    int of_warp[TOP_K_WARPS];
    int bin, above, equal;
    int n;
};

// Larger numbers have larger ones. -0 is 0, a NaN is above infinity, and none is 0.
static __device__ __forceinline__ uint32_t top_k_ordered(const float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return 0xFFFFFFFFu;
    }
    const uint32_t ordered = bits ^ ((uint32_t) ((int32_t) bits >> 31) | 0x80000000u);
    return ordered == 0x7FFFFFFFu ? 0x80000000u : ordered;
}

// Of equal numbers the first is the largest: no two keys of a row are the same.
static __device__ __forceinline__ uint64_t top_k_key(const float x, const uint32_t column) {
    return (uint64_t) top_k_ordered(x) << 32 | (uint32_t) ~column;
}

static __device__ __forceinline__ top_k_place top_k_place_of(const top_k_places & places, const uint32_t row) {
    const uint32_t place = row/places.rows_each;
    const int64_t  in_it = row - place*places.rows_each;
    top_k_place result = places.of[place];
    result.row += in_it*places.columns;
    result.ids += in_it*places.k;
    return result;
}

static __device__ __forceinline__ void top_k_clear(top_k_shared & s) {
#pragma unroll
    for (int i = 0; i < TOP_K_BINS/TOP_K_THREADS; ++i) {
        s.bins[i*TOP_K_THREADS + threadIdx.x] = 0;
    }
}

// Sum of `value` over the lanes up to this one.
static __device__ __forceinline__ int top_k_up_to_lane(int value) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, value, offset);
        value += lane >= offset ? other : 0;
    }
    return value;
}

// Room for `n` in what the block appends to; s.n is all of it behind the next barrier.
static __device__ __forceinline__ int top_k_room(top_k_shared & s, const int n) {
    const int up_to = top_k_up_to_lane(n);
    int first = 0;
    if (threadIdx.x % WARP_SIZE == WARP_SIZE - 1 && up_to > 0) {
        first = atomicAdd(&s.n, up_to);
    }
    return __shfl_sync(0xFFFFFFFF, first, WARP_SIZE - 1) + up_to - n;
}

// The bin in which the `need`-th largest key is, what lies above and in it. The bins have as many; barriers on both sides.
static __device__ __forceinline__ void top_k_find(top_k_shared & s, const int need) {
    constexpr int n_own = TOP_K_BINS/TOP_K_THREADS;
    const int warp = threadIdx.x/WARP_SIZE;

    int own[n_own];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < n_own; ++i) {
        own[i] = s.bins[threadIdx.x*n_own + i];
        sum += own[i];
    }
    const int up_to = top_k_up_to_lane(sum);
    if (threadIdx.x % WARP_SIZE == WARP_SIZE - 1) {
        s.of_warp[warp] = up_to;
    }
    __syncthreads();
    int above = up_to - sum;
#pragma unroll
    for (int i = 0; i < TOP_K_WARPS; ++i) {
        above += i < warp ? s.of_warp[i] : 0;
    }
    if (above < need && above + sum >= need) {
        int  bin = threadIdx.x*n_own, equal = 0;
        bool is_found = false;
#pragma unroll
        for (int i = 0; i < n_own; ++i) {
            if (!is_found) {
                equal    = own[i];
                is_found = above + equal >= need;
                above += is_found ? 0 : equal;
                bin   += is_found ? 0 : 1;
            }
        }
        s.bin   = bin;
        s.above = above;
        s.equal = equal;
    }
    __syncthreads();
}

// `count` keys are not below `lowest`, `above` of them because of its first `bits` bits alone.
struct top_k_bound {
    uint64_t lowest;
    int      bits;
    int      above;
    int      count;
};

// Raises the bound until no more than `limit` keys (k or more) are left, by one digit each time. Six digits are a whole key.
// `each` hands out this thread's keys, of which all together have k or more.
template <typename each_t>
static __device__ __forceinline__ void top_k_raise(
        top_k_shared & s, top_k_bound & bound, const int k, const int limit, const each_t & each) {
    while (bound.count > limit && bound.bits < 64) {
        top_k_clear(s);
        __syncthreads();
        each([&](const uint64_t key) {
            if (bound.bits == 0 || (key ^ bound.lowest) >> (64 - bound.bits) == 0) {
                atomicAdd(&s.bins[TOP_K_BINS - 1 - (int) (key << bound.bits >> (64 - TOP_K_BITS))], 1);
            }
        });
        __syncthreads();
        top_k_find(s, k - bound.above);
        const uint64_t digit = TOP_K_BINS - 1 - s.bin;
        bound.lowest |= digit << (64 - TOP_K_BITS) >> bound.bits;
        bound.bits   += TOP_K_BITS;
        bound.above  += s.above;
        bound.count   = bound.above + s.equal;
    }
}

// How many candidates a chunk may have.
static __host__ __device__ constexpr int top_k_room_of_chunk(const int k) { return k + TOP_K_SPARE; }

// Candidates of `n` columns out of the keys themselves; they are read again for each digit. Returns how many there are.
static __device__ __noinline__ int top_k_exact_chunk(
        top_k_shared & s, const float * row, const uint32_t columns, const uint32_t column0, const int n, const float bound,
        const int k, uint64_t * out) {
    const auto each = [&](const auto & take) {
#pragma unroll 4
        for (int i = threadIdx.x; i < n; i += TOP_K_THREADS) {
            const uint32_t column = column0 + i;
            if (column < columns && !(row[column] < bound)) {
                take(top_k_key(row[column], column));
            }
        }
    };
    top_k_bound exact = {0, 0, 0, INT_MAX};
    top_k_raise(s, exact, k, top_k_room_of_chunk(k), each);
    if (threadIdx.x == 0) {
        s.n = 0;
    }
    __syncthreads();
    int n_own = 0;
    each([&](const uint64_t key) { n_own += key >= exact.lowest; });
    out += top_k_room(s, n_own);
    each([&](const uint64_t key) {
        if (key >= exact.lowest) {
            *out++ = key;
        }
    });
    return exact.count;
}

// Candidates of each chunk: all of its k largest, and up to TOP_K_SPARE more, in any order. grid: chunks, rows.
//
// The k-th largest of the threads' largest numbers (or of the words') is not above the chunk's k-th largest. So one vote of each
// thread gives a bound, and a chunk of random numbers has few more than k that reach it. Where too many do, digits of all of
// their keys follow.
static __global__ void __launch_bounds__(TOP_K_THREADS, 2) top_k_chunks(
        const top_k_places places, int * counts, uint64_t * candidates) {
    __shared__ top_k_shared s;

    ggml_cuda_pdl_lc();
    const int      k       = places.k;
    const int      room    = top_k_room_of_chunk(k);
    const size_t   chunk   = (size_t) blockIdx.y*gridDim.x + blockIdx.x;
    const float *  row     = top_k_place_of(places, blockIdx.y).row;
    const int      skip    = (int) ((uintptr_t) row % sizeof(float4)/sizeof(float)); // a row's first word may begin before it
    const uint32_t columns = places.columns;
    const uint32_t n_words = (columns + skip + 3)/4;
    const uint32_t first   = blockIdx.x*places.words;
    const int      n_own   = first < n_words ? min((uint32_t) places.words, n_words - first) : 0;
    const uint32_t column0 = 4*first - skip; // in the first word a column may be before 0, which is none below `columns` either
    const float4 * words   = (const float4 *) (row - skip) + first;

    float x[TOP_K_WORDS][4];
    ggml_cuda_pdl_sync();
#pragma unroll
    for (int w = 0; w < TOP_K_WORDS; ++w) {
        const int word = w*TOP_K_THREADS + threadIdx.x;
        const float4 all = word < n_own ? words[word] : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        x[w][0] = all.x;
        x[w][1] = all.y;
        x[w][2] = all.z;
        x[w][3] = all.w;
    }
    top_k_clear(s);
    if (threadIdx.x == 0) {
        s.n = 0;
    }
#pragma unroll
    for (int w = 0; w < TOP_K_WORDS; ++w) {
        const uint32_t word = first + w*TOP_K_THREADS + threadIdx.x;
        if (word == 0 || word == n_words - 1) { // what is not of this row
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[w][i] = 4*word - skip + i < columns ? x[w][i] : -INFINITY;
            }
        }
    }
    __syncthreads();

    float bound = -INFINITY;
    const bool by_threads = 2*k <= min(n_own, TOP_K_THREADS);
    if (by_threads || 2*k <= n_own) {
        const auto vote = [&](const float largest) {
            atomicAdd(&s.bins[TOP_K_BINS - 1 - (int) (top_k_ordered(largest) >> (32 - TOP_K_BITS))], 1);
        };
        float largest = -INFINITY;
#pragma unroll
        for (int w = 0; w < TOP_K_WORDS; ++w) {
            const float of_word = fmaxf(fmaxf(x[w][0], x[w][1]), fmaxf(x[w][2], x[w][3]));
            largest = fmaxf(largest, of_word);
            if (!by_threads && w*TOP_K_THREADS + threadIdx.x < n_own) {
                vote(of_word);
            }
        }
        if (by_threads && threadIdx.x < n_own) {
            vote(largest);
        }
        __syncthreads();
        top_k_find(s, k);
        // the least number of the bin
        const uint32_t least = max((uint32_t) (TOP_K_BINS - 1 - s.bin) << (32 - TOP_K_BITS), top_k_ordered(-INFINITY));
        bound = __uint_as_float(least & 0x80000000u ? least ^ 0x80000000u : ~least);
    }

    // Numbers that are not below the bound; a NaN is not.
    const auto each = [&](const auto & take) {
#pragma unroll
        for (int w = 0; w < TOP_K_WORDS; ++w) {
            const int word = w*TOP_K_THREADS + threadIdx.x;
            if (word < n_own) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t column = column0 + 4*word + i;
                    if (!(x[w][i] < bound) && column < columns) {
                        take(x[w][i], column);
                    }
                }
            }
        }
    };
    int n = 0;
    each([&](float, uint32_t) { ++n; });
    const int offset = top_k_room(s, n);
    __syncthreads();

    uint64_t * out = candidates + chunk*room;
    int count = s.n;
    if (count <= room) {
        out += offset;
        each([&](const float number, const uint32_t column) { *out++ = top_k_key(number, column); });
    } else {
        count = top_k_exact_chunk(s, row, columns, column0, 4*n_own, bound, k, out);
    }
    if (threadIdx.x == 0) {
        counts[chunk] = count;
    }
}

// Sorts the first `n` of the list, the largest first; what lies behind them up to a power of two is lost.
static __device__ __forceinline__ void top_k_sort(uint64_t * list, const int n) {
    int size = 1;
    while (size < n) {
        size *= 2;
    }
    for (int i = n + threadIdx.x; i < size; i += TOP_K_THREADS) {
        list[i] = 0;
    }
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int apart = run/2; apart > 0; apart /= 2) {
            for (int i = threadIdx.x; i < size/2; i += TOP_K_THREADS) {
                const int a = 2*i - (i & (apart - 1)), b = a + apart;
                const uint64_t of_a = list[a], of_b = list[b];
                if ((of_a < of_b) == ((a & run) == 0)) {
                    list[a] = of_b;
                    list[b] = of_a;
                }
            }
            __syncthreads();
        }
    }
}

// The k largest candidates of each row, the largest first. grid: rows.
static __global__ void __launch_bounds__(TOP_K_THREADS, 2) top_k_ends(
        const top_k_places places, const int chunks, const int * counts, const uint64_t * candidates) {
    __shared__ top_k_shared s;
    __shared__ uint64_t     list[TOP_K_LIST];
    __shared__ int          ranks[TOP_K_COUNTED + TOP_K_NEAR];

    ggml_cuda_pdl_lc();
    const int k    = places.k;
    const int room = top_k_room_of_chunk(k);
    const int warp = threadIdx.x/WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;
    const top_k_place place = top_k_place_of(places, blockIdx.x);

    counts     += (size_t) blockIdx.x*chunks;
    candidates += (size_t) blockIdx.x*chunks*room;

    if (threadIdx.x == 0) {
        s.n = 0;
    }
    ggml_cuda_pdl_sync();
    const auto each = [&](const auto & take) {
        constexpr int ahead = 8; // words under way
        for (int chunk = warp; chunk < chunks; chunk += TOP_K_WARPS) {
            const int n = counts[chunk];
            const uint64_t * keys = candidates + (size_t) chunk*room;
            for (int i = lane; i < n; i += ahead*WARP_SIZE) {
                uint64_t key[ahead];
#pragma unroll
                for (int j = 0; j < ahead; ++j) {
                    key[j] = i + j*WARP_SIZE < n ? keys[i + j*WARP_SIZE] : 0;
                }
#pragma unroll
                for (int j = 0; j < ahead; ++j) {
                    if (key[j] != 0) {
                        take(key[j]);
                    }
                }
            }
        }
    };
    top_k_bound bound = {0, 0, 0, INT_MAX};
    top_k_raise(s, bound, k, room, each);

    int n = 0;
    each([&](const uint64_t key) { n += key >= bound.lowest; });
    uint64_t * out = list + top_k_room(s, n);
    each([&](const uint64_t key) {
        if (key >= bound.lowest) {
            *out++ = key;
        }
    });
    __syncthreads();

    if (k > TOP_K_COUNTED) {
        top_k_sort(list, bound.count);
        for (int i = threadIdx.x; i < k; i += TOP_K_THREADS) {
            const uint32_t id = ~(uint32_t) list[i];
            place.ids[i] = (int) id;
            if (place.values != nullptr) {
                place.values[i] = place.row[id];
            }
        }
        return;
    }

    if (bound.count > k + TOP_K_NEAR) {
        uint64_t own[TOP_K_LIST/TOP_K_THREADS];
#pragma unroll
        for (int i = 0; i < TOP_K_LIST/TOP_K_THREADS; ++i) {
            const int at = i*TOP_K_THREADS + threadIdx.x;
            own[i] = at < bound.count ? list[at] : 0;
        }
        if (threadIdx.x == 0) {
            s.n = 0;
        }
        const auto each_own = [&](const auto & take) {
#pragma unroll
            for (int i = 0; i < TOP_K_LIST/TOP_K_THREADS; ++i) {
                if (own[i] != 0) {
                    take(own[i]);
                }
            }
        };
        top_k_raise(s, bound, k, k + TOP_K_NEAR, each_own);
        n = 0;
        each_own([&](const uint64_t key) { n += key >= bound.lowest; });
        out = list + top_k_room(s, n);
        each_own([&](const uint64_t key) {
            if (key >= bound.lowest) {
                *out++ = key;
            }
        });
    }

    // A candidate's place is how many are larger, which several threads count together.
    const int padded = (bound.count + WARP_SIZE - 1)/WARP_SIZE*WARP_SIZE;
    const int parts  = TOP_K_THREADS/padded;
    const int part   = threadIdx.x/padded;
    const int mine   = threadIdx.x - part*padded;
    const bool counts_along = part < parts && mine < bound.count;
    if (threadIdx.x < bound.count) {
        ranks[threadIdx.x] = 0;
    }
    __syncthreads();
    const uint64_t key = counts_along ? list[mine] : 0;
    const uint32_t id  = ~(uint32_t) key;
    const float value  = counts_along && part == 0 && place.values != nullptr ? place.row[id] : 0.0f; // under way meanwhile
    if (counts_along) {
        const int end = (part + 1)*bound.count/parts;
        int larger = 0;
#pragma unroll 4
        for (int i = part*bound.count/parts; i < end; ++i) {
            larger += list[i] > key;
        }
        atomicAdd(&ranks[mine], larger);
    }
    __syncthreads();
    if (counts_along && part == 0 && ranks[mine] < k) {
        place.ids[ranks[mine]] = (int) id;
        if (place.values != nullptr) {
            place.values[ranks[mine]] = value;
        }
    }
}

// Copies of numbers that do not lie side by side on emulated threads, out of a build's cpy.cu (tests/native/test_scattered_copies.py
// prepares it): what is copied, and the places of numbers as far as 2^31.

#include "common.cuh"

#include <limits>

struct uint2 { unsigned x, y; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
static unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t) a*b >> 32; }

#include "fastdiv.cuh"

#define CUDA_CPY_BLOCK_SIZE 64
template <typename from, typename to> void cpy_1_scalar(const char * x, char * y) {
    from value;
    memcpy(&value, x, sizeof(value));
    const to as = (to) (float) value;
    memcpy(y, &as, sizeof(as));
}

#include "cpy.cuh"
#include "fibers.h"

struct layout {
    int64_t ne[4], nb[4];
    int64_t place(int64_t i) const {
        return i % ne[0]*nb[0] + i/ne[0] % ne[1]*nb[1] + i/ne[0]/ne[1] % ne[2]*nb[2] + i/ne[0]/ne[1]/ne[2]*nb[3];
    }
    int64_t count() const { return ne[0]*ne[1]*ne[2]*ne[3]; }
    int64_t bytes() const { return (ne[0] - 1)*nb[0] + (ne[1] - 1)*nb[1] + (ne[2] - 1)*nb[2] + (ne[3] - 1)*nb[3] + 4; }
};

template <typename from, typename to> static bool is_right(const layout & a, const layout & b) {
    std::vector<char> x(a.bytes()), y(b.bytes(), 0x5A), expected;
    for (int64_t i = 0; i < a.count(); ++i) {
        const from value = (from) (float) (i % 2000 - 1000);
        memcpy(&x[a.place(i)], &value, sizeof(value));
    }
    expected = y;
    for (int64_t i = 0; i < a.count(); ++i) { cpy_1_scalar<from, to>(&x[a.place(i)], &expected[b.place(i)]); }
    ggml_cpy_scalar_cuda<from, to>(
        x.data(), y.data(), a.count(), a.ne[0], a.ne[1], a.ne[2], a.nb[0], a.nb[1], a.nb[2], a.nb[3],
        b.ne[0], b.ne[1], b.ne[2], b.nb[0], b.nb[1], b.nb[2], b.nb[3], 0);
    return y == expected && blockDim.x == (ggml_cuda_cpy_scattered_is_on() ? 256 : CUDA_CPY_BLOCK_SIZE);
}

static bool is_place_right(const layout & a) {
    const auto div = [](int64_t n) { return init_fastdiv_values((uint64_t) n); };
    const cpy_layout of = {div(a.ne[0]), div(a.ne[1]), div(a.ne[2]), a.nb[0], a.nb[1], a.nb[2], a.nb[3]};
    for (int64_t part = 0; part <= 1000; ++part) {
        const int64_t middle = (a.count() - 1)/1000*part;
        for (int64_t i = std::max<int64_t>(middle - 3, 0); i <= std::min(middle + 3, a.count() - 1); ++i) {
            if (cpy_offset((uint32_t) i, of) != a.place(i)) { return false; }
        }
    }
    return cpy_offset((uint32_t) (a.count() - 1), of) == a.place(a.count() - 1);
}

int main() {
    bool right = true;
    const auto expect = [&](const char * what, bool ok) {
        printf("%s %s\n", ok ? "ok " : "BAD", what);
        right = right && ok;
    };
    const layout states = {{3, 70, 5, 1}, {4, 16, 16*70, 16*70*5}}, rows = {{210, 5, 1, 1}, {4, 4*300, 4*1500, 4*1500}};
    expect("a convolution's states", is_right<float, float>(states, rows));
    expect("back", is_right<float, float>(rows, states));
    const layout turned = {{5, 4, 3, 7}, {4*84, 4*7, 4*28, 4}}, plain = {{3, 4, 7, 5}, {4, 12, 48, 340}};
    expect("four dimensions", is_right<float, float>(turned, plain));
    const layout halves = {{5, 4, 3, 7}, {2*84, 2*7, 2*28, 2}};
    expect("halves to floats", is_right<half, float>(halves, plain));
    expect("floats to halves", is_right<float, half>(plain, halves));
    const layout one = {{1, 1, 1, 1}, {4, 4, 4, 4}};
    expect("one number", is_right<float, float>(one, one));

    expect("places in cubes", is_place_right({{1291, 1277, 1301, 1}, {4, 1292*4, 1300*1300*4, 0}}));
    expect("places in rows", is_place_right({{3, 8192, 32, 2730}, {4, 16, 16*8192, 16*8192*32}}));
    expect("places side by side", is_place_right({{INT_MAX, 1, 1, 1}, {4, 0, 0, 0}}));
    expect("places apart", is_place_right({{1, 1, 1, INT_MAX}, {4, 4, 4, 36}}));
    return right ? 0 : 1;
}

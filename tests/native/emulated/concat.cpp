// Putting rows together on emulated threads, out of a build's concat.cu (tests/native/test_short_rows.py prepares it): both kinds of
// kernel, all dimensions, rows of 1 to 600 numbers, a second operand that is transposed as a delta net's is.

#include "device.cuh"
#include "fibers.h"

static bool ggml_is_contiguous(const ggml_tensor * tensor) {
    size_t bytes = 4;
    for (int i = 0; i < 4; ++i) {
        if (tensor->ne[i] != 1 && tensor->nb[i] != bytes) { return false; }
        bytes *= tensor->ne[i];
    }
    return true;
}
static bool ggml_is_contiguous_to_3(const ggml_tensor * tensor) {
    ggml_tensor first = *tensor;
    first.ne[3] = 1;
    return ggml_is_contiguous(&first);
}
static size_t ggml_row_size(int, int64_t n) { return 4*n; }
static size_t ggml_nbytes(const ggml_tensor * tensor) { return 4*tensor->ne[0]*tensor->ne[1]*tensor->ne[2]*tensor->ne[3]; }
static bool ggml_is_quantized(int) { return false; }
constexpr int cudaMemcpyDeviceToDevice = 0;
static int cudaMemcpyAsync(void * to, const void * from, size_t bytes, int, int) { memcpy(to, from, bytes); return 0; }

#include "concat.cu"

struct numbers {
    ggml_tensor tensor{};
    std::vector<uint32_t> values;
    numbers(std::vector<int64_t> ne, bool transposed, uint32_t first) : values(ne[0]*ne[1]*ne[2]*ne[3]) {
        for (auto & value : values) { value = first++; }
        for (int i = 0; i < 4; ++i) { tensor.ne[i] = ne[i]; }
        const size_t row = 4*(transposed ? ne[1] : ne[0]), plane = 4*ne[0]*ne[1];
        const size_t nb[] = {transposed ? row : 4, transposed ? 4 : row, plane, plane*ne[2]};
        std::copy(nb, nb + 4, tensor.nb);
        tensor.data = values.data();
    }
    uint32_t at(const int64_t * i) const {
        uint32_t value;
        memcpy(&value, (const char *) tensor.data + i[0]*tensor.nb[0] + i[1]*tensor.nb[1] + i[2]*tensor.nb[2] + i[3]*tensor.nb[3], 4);
        return value;
    }
};

static bool is_right(int dim, std::vector<int64_t> ne, int64_t more, bool transposed) {
    auto other = ne, both = ne;
    other[dim] = more;
    both[dim] += more;
    const numbers a(ne, false, 1), b(other, transposed, 1u << 20);
    numbers out(both, false, 0);
    concat_cuda<uint32_t>(&a.tensor, &b.tensor, &out.tensor, dim, 0);
    for (int64_t i3 = 0; i3 < both[3]; ++i3) {
        for (int64_t i2 = 0; i2 < both[2]; ++i2) {
            for (int64_t i1 = 0; i1 < both[1]; ++i1) {
                for (int64_t i0 = 0; i0 < both[0]; ++i0) {
                    const int64_t at[] = {i0, i1, i2, i3};
                    int64_t from[] = {i0, i1, i2, i3};
                    const bool is_first = at[dim] < ne[dim];
                    from[dim] -= is_first ? 0 : ne[dim];
                    if (out.at(at) != (is_first ? a : b).at(from)) { return false; }
                }
            }
        }
    }
    return true;
}

int main() {
    bool right = true;
    const auto expect = [&](int dim, std::vector<int64_t> ne, int64_t more, bool transposed) {
        const bool ok = is_right(dim, ne, more, transposed);
        printf("%s dim %d, %d + %d\n", ok ? "ok " : "BAD", dim, int(ne[dim]), int(more));
        right = right && ok;
    };
    for (const int64_t tokens : {1, 2, 5, 29, 126, 130, 597}) { expect(0, {3, 70, 3, 1}, tokens, true); }
    expect(0, {1, 257, 2, 2}, 1, true);
    expect(1, {5, 6, 3, 2}, 4, true);
    expect(2, {3, 9, 4, 2}, 2, true);
    expect(3, {7, 5, 2, 2}, 3, true);
    expect(0, {3, 70, 3, 2}, 4, false);
    return right ? 0 : 1;
}

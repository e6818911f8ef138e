// The scheduler's copies of an input that is kept: a graph runs again and again while pieces of the input change, on a device
// whose memory is not the host's. Built and run by test_followed_masks.py; the device is the processor behind a buffer type that
// says so, counts what is copied, and has a graph whose earlier and later tensors want the memory of the copy.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

static constexpr int64_t CELLS = 40960, ROWS = 3;

static size_t copied_bytes, copies;

static struct ggml_backend_buffer_i host_buffer;

static void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    copied_bytes += size;
    copies       += 1;
    host_buffer.set_tensor(buffer, tensor, data, offset, size);
}

static void set_tensor_2d(
        ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size, size_t n_copies,
        size_t stride_tensor, size_t stride_data) {
    copies += 1;
    for (size_t i = 0; i < n_copies; ++i) {
        copied_bytes += size;
        host_buffer.set_tensor(buffer, tensor, (const char *) data + i*stride_data, offset + i*stride_tensor, size);
    }
}

static bool is_host(ggml_backend_buffer_type_t) { return false; }

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_type()->iface.alloc_buffer(ggml_backend_cpu_buffer_type(), size);

    host_buffer = buffer->iface;

    buffer->buft                = buft;
    buffer->iface.set_tensor    = set_tensor;
    buffer->iface.set_tensor_2d = set_tensor_2d;
    return buffer;
}

static ggml_backend_buffer_type device_buft;

static ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t) { return &device_buft; }
static bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) { return buft == &device_buft; }
static enum ggml_backend_dev_type get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

int main() {
    setenv("GGML_SCHED_PIECES", "1", 1);

    ggml_backend_t host   = ggml_backend_cpu_init();
    ggml_backend_t device = ggml_backend_cpu_init();

    ggml_backend_device device_dev = *device->device;
    device_dev.iface.get_buffer_type = get_buffer_type;
    device_dev.iface.supports_buft   = supports_buft;
    device_dev.iface.get_type        = get_type;
    device->device = &device_dev;

    device_buft = *ggml_backend_cpu_buffer_type();
    device_buft.device             = &device_dev;
    device_buft.iface.is_host      = is_host;
    device_buft.iface.alloc_buffer = alloc_buffer;

    ggml_backend_t             backends[] = { device, host };
    ggml_backend_buffer_type_t bufts[]    = { &device_buft, ggml_backend_cpu_buffer_type() };
    ggml_backend_sched_t sched = ggml_backend_sched_new(backends, bufts, 2, 256, false, false);

    ggml_context * ctx = ggml_init({ ggml_tensor_overhead()*256 + ggml_graph_overhead(), nullptr, true });

    ggml_tensor * mask  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, CELLS, ROWS);
    ggml_tensor * other = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, CELLS, ROWS);
    ggml_set_input(mask);
    ggml_set_output(mask);
    ggml_set_input(other);

    // device, host, device (which is the first to read the mask), host, device, host
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_tensor * cur   = other;
    for (int split = 0; split < 6; ++split) {
        for (int k = 0; k < 4; ++k) {
            cur = ggml_scale(ctx, cur, 0.5f);
            ggml_backend_sched_set_tensor_backend(sched, cur, backends[split % 2]);
            if (k % 2 == 0) {
                cur = ggml_cont(ctx, ggml_transpose(ctx, cur));
                ggml_backend_sched_set_tensor_backend(sched, cur->src[0], backends[split % 2]);
                ggml_backend_sched_set_tensor_backend(sched, cur, backends[split % 2]);
                cur = ggml_reshape_2d(ctx, cur, CELLS, ROWS);
            }
        }
        if (split == 2 || split == 4) {
            cur = ggml_add(ctx, cur, mask);
            ggml_backend_sched_set_tensor_backend(sched, cur, device);
        }
    }
    ggml_tensor * sum = ggml_scale(ctx, cur, 1.0f);
    ggml_set_output(sum);
    ggml_build_forward_expand(graph, sum);

    if (!ggml_backend_sched_alloc_graph(sched, graph)) {
        return 2;
    }

    std::mt19937 rng(7);
    std::vector<float> values(CELLS*ROWS), others(CELLS*ROWS), seen(CELLS*ROWS), whole(CELLS*ROWS);

    size_t least = SIZE_MAX;
    for (int round = 0; round < 200; ++round) {
        // its memory is not kept
        for (auto & value : others) {
            value = round;
        }
        ggml_backend_tensor_set(other, others.data(), 0, ggml_nbytes(other));

        const int n = round == 0 ? -1 : (int) (rng() % 4) - (rng() % 20 == 0 ? 4 : 0);
        mask->op_params[2] = n < 0 ? 0 : 1 + n;
        for (int k = 0; k < n; ++k) {
            const int32_t first = k*CELLS/3 + rng() % 1000;
            const int32_t count = 1 + rng() % 50;
            mask->op_params[3 + 2*k] = first;
            mask->op_params[4 + 2*k] = count;
            for (int64_t r = 0; r < ROWS; ++r) {
                for (int32_t j = first; j < first + count; ++j) {
                    values[r*CELLS + j] = rng() % 100;
                }
            }
        }
        if (n < 0) {
            for (auto & value : values) {
                value = rng() % 100;
            }
        }
        memcpy(mask->data, values.data(), ggml_nbytes(mask));

        copied_bytes = 0;
        copies       = 0;
        if (ggml_backend_sched_graph_compute(sched, graph) != GGML_STATUS_SUCCESS) {
            return 3;
        }
        least = std::min(least, copied_bytes);
        ggml_backend_tensor_get(sum, seen.data(), 0, ggml_nbytes(sum));

        // a graph without pieces tells what is right
        mask->op_params[2] = 0;
        ggml_backend_tensor_set(other, others.data(), 0, ggml_nbytes(other));
        if (ggml_backend_sched_graph_compute(sched, graph) != GGML_STATUS_SUCCESS) {
            return 3;
        }
        ggml_backend_tensor_get(sum, whole.data(), 0, ggml_nbytes(sum));
        if (seen != whole) {
            printf("round %d: %d pieces, %zu copies, %zu bytes, and another result\n", round, n, copies, copied_bytes);
            return 1;
        }
    }

    // what goes to the device besides the mask: `other` and the host's two results
    printf("at least %zu bytes of %zu\n", least, 4*ggml_nbytes(mask));
    return least < 4*ggml_nbytes(mask) && least >= 3*ggml_nbytes(mask) ? 0 : 4;
}

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

struct ggml_backend_cuda_context;

// The activations that were quantized last in this run of a graph, for further products with the same tensor.
struct ggml_cuda_kept_rows {
    static constexpr size_t MAX_BYTES = 4*1024*1024; // what is larger is not kept
    static constexpr size_t PAD_BYTES =   64*1024;   // behind it: MMQ's tiles read on, each type's as far as it is wide

    // forms other than MMQ's layouts
    static constexpr int ROWS = -1;

    char * buffer = nullptr; // of MAX_BYTES + PAD_BYTES; without it nothing is kept

    // Forgets what an earlier run has kept; is_on: whether this one keeps anything.
    void begin(bool is_on) {
        on   = is_on && buffer != nullptr;
        root = nullptr;
    }

    // What was kept of this tensor in this form; null: nothing.
    char * find(const ggml_tensor * tensor, int form_wanted) const {
        if (!on || root == nullptr || root != root_of(tensor) || form != form_wanted || data != tensor->data ||
            !ggml_is_contiguous(tensor) || ne0 != tensor->ne[0] || n_rows != ggml_nrows(tensor)) {
            return nullptr;
        }
        // in MMQ's layouts rows of one matrix stand side by side
        return form_wanted == ROWS || ne1 == tensor->ne[1] ? buffer : nullptr;
    }

    // Where so many bytes of this tensor go, from now on the ones that are kept; null: nowhere.
    char * make_room(const ggml_tensor * tensor, int form_new, size_t nbytes) {
        if (!on || nbytes > MAX_BYTES || !ggml_is_contiguous(tensor)) {
            return nullptr;
        }
        root   = root_of(tensor);
        data   = tensor->data;
        form   = form_new;
        ne0    = tensor->ne[0];
        ne1    = tensor->ne[1];
        n_rows = ggml_nrows(tensor);
        return buffer;
    }

private:
    static const ggml_tensor * root_of(const ggml_tensor * tensor) {
        return tensor->view_src ? tensor->view_src : tensor;
    }

    bool on = false;

    const ggml_tensor * root = nullptr;
    const void *        data = nullptr;

    int     form   = ROWS;
    int64_t ne0    = 0;
    int64_t ne1    = 0;
    int64_t n_rows = 0;
};

ggml_cuda_kept_rows & ggml_cuda_kept_rows_of(ggml_backend_cuda_context & ctx);

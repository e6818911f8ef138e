"""What a chain on the device hands out stays where it was written until it is read.

A graph has the chains of all sequences, also of those that have no row in the step, so that its shape stays; but only what the
others hand out was marked as an output, which later nodes may not overwrite. The next graph of as many nodes runs in the same
places of memory. If another sequence has a row in it, what its chain hands out lies where it is not kept, and that sequence
draws from a neighbour's candidates. On a hybrid with four streams that come and go: 18 of 1,527 rows, with drafts 96 of 2,232.
"""

from __future__ import annotations

from native.source_change import Change

_GRAPH = "src/llama-graph.cpp"

KEPT_CANDIDATES = (
    Change(
        _GRAPH,
        "            sampler->iface->backend_apply(sampler, ctx0, gf, &data);\n\n",
        "            sampler->iface->backend_apply(sampler, ctx0, gf, &data);\n\n"
        "            // graphs of equally many nodes run in the same places: outputs of one are outputs of all\n"
        "            for (ggml_tensor * made : { data.sampled, data.probs, data.logits, data.candidates }) {\n"
        "                for (; made != nullptr; made = made->view_src) {\n"
        "                    ggml_set_output(made);\n"
        "                }\n"
        "            }\n\n",
    ),
    Change(
        _GRAPH,
        "int32_t llama_relative_position_bucket(",
        'extern "C" LLAMA_API bool llama_sampling_keeps_candidates(void);\n\n'
        "// whether candidates of all sequences stay until they are read\n"
        "bool llama_sampling_keeps_candidates(void) {\n    return true;\n}\n\n"
        "int32_t llama_relative_position_bucket(",
    ),
)

"""A source tree of llama.cpp's shape that compiles in a second."""

from __future__ import annotations

from pathlib import Path

LISTS = """cmake_minimum_required(VERSION 3.21)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(llama SHARED src/llama.cpp)
add_library(mtmd SHARED tools/mtmd/mtmd.cpp)
"""
FILES = {
    "CMakeLists.txt": LISTS,
    "include/llama.h": "",
    "src/llama.cpp": 'extern "C" int llama_answer() { return 42; }\n',
    "tools/mtmd/mtmd.cpp": 'extern "C" int mtmd_answer() { return 43; }\n',
    "docs/build.md": "words",
    "ggml/src/ggml-vulkan/vulkan.cpp": "another backend",
}


def write_source(tree: Path) -> Path:
    """Writes the tree and returns its path."""
    for name, text in FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    return tree

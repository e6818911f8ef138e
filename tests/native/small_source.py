"""A source tree of llama.cpp's shape that compiles in a second."""

from __future__ import annotations

from pathlib import Path

from engines.native_library import FOLDER
from native import changes

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


def write_pinned_source(home: Path) -> Path:
    """The tree as the source of the pinned bindings, where an earlier build left it, with what we change in it."""
    folder = home / FOLDER / f"source-0.3.36-{changes.digest()}"
    tree = write_source(folder / "source" / "x" / "vendor" / "llama.cpp")
    for change in changes.CHANGES:
        (tree / change.path).parent.mkdir(parents=True, exist_ok=True)
        if change.old:  # else it is a file of ours
            with (tree / change.path).open("a") as file:
                file.write(f"/*\n{change.old}\n*/\n")
    return tree

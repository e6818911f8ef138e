"""Tests of native: toolkits, builds, what is inside them. Nothing here compiles llama.cpp."""

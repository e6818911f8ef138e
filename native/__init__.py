"""What is compiled: llama.cpp for each card, out of the source that the pinned bindings carry. Standard library only."""

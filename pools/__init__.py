"""Hardware that can run processes, and the models that could run on it.

Words: a Host is a machine, a Gpu one of its devices (a CPU counts as one), a Model a name that users ask for, a Variant one
GGUF file of it. This package knows nothing of running engines or of conversations.
"""

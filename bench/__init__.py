"""Measurements of Hydra against llama-server built from the same source.

Words: a cell is one point of the grid (streams, context, sampling); a form is one set of llama-server's flags; a life is one
start of one server, in which cells run one after another. Nothing here is imported by the rest of Hydra, and this package
knows an engine only as a process with a configuration file and HTTP.
"""

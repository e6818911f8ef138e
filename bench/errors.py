"""
BenchError
└── (one class: a measurement that could not be made; the message says why)
"""

from __future__ import annotations


class BenchError(Exception):
    """A measurement could not be made. The message is one line for people."""

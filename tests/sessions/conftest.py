"""The table of what was killed, at the end of a run."""

from tests.fault_table import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

"""Tests of the engine process and its parts."""

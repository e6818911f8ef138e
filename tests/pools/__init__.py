"""Tests of pools: models, their files, and where they come from."""

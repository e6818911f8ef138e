"""Tests of the supervisor: real servers, real processes, real signals."""

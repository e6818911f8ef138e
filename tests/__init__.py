"""Tests on real parts. This file keeps `tests/sessions` from shadowing the app `sessions`."""

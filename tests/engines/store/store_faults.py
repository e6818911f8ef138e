"""The table of what the store's fault suites counted."""

from __future__ import annotations

from tests.fault_table import FaultTable

TABLE = FaultTable(
    "the store under faults", "trials", "faults", "reads checked", "refused", "wrong bytes", "published lost"
)

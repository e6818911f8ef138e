"""What suites of faults counted, as one table each at the end of a run.

A suite makes its table once, adds to its rows, and says in its package's conftest: `from tests.fault_table import
pytest_terminal_summary`.
"""

from __future__ import annotations

from collections import Counter

from _pytest.terminal import TerminalReporter

_TABLES: dict[str, FaultTable] = {}


class FaultTable:
    """`columns` are what is counted; a row is a kind of fault."""

    def __init__(self, title: str, *columns: str) -> None:
        self._columns = columns
        self._rows: dict[str, Counter[str]] = {}
        self._title = title
        _TABLES[title] = self

    def add(self, fault: str, **counts: int) -> None:
        """Names are the columns', with '_' for a space."""
        row = self._rows.setdefault(fault, Counter())
        for name, count in counts.items():
            column = name.replace("_", " ")
            assert column in self._columns, column
            row[column] += count

    def lines(self) -> list[str]:
        rows = [("fault", *self._columns)]
        rows += [(fault, *(str(row[column]) for column in self._columns)) for fault, row in self._rows.items()]
        total = [str(sum(row[column] for row in self._rows.values())) for column in self._columns]
        rows.append(("all", *total))
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        return [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]

    def print_once(self, terminal: TerminalReporter) -> None:
        if self._rows:
            terminal.section(self._title)
            for line in self.lines():
                terminal.write_line(line)
            self._rows.clear()


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    for table in _TABLES.values():
        table.print_once(terminalreporter)

"""Tables for people, on stdout."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 200  # a table must not be cut because nobody's terminal is attached


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=False)
    for row in rows:
        table.add_row(*row)
    console = Console(width=WIDTH, highlight=False)
    console.print(title)
    console.print(table)

"""Output that is as wide as the terminal, or wide enough for tables where there is none."""

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_WIDTH_WITHOUT_TERMINAL = 150


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Padding:
    """A table of names and values below a title, with an empty line after it."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True, min_width=16)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return Padding(table, (0, 0, 1, 0))

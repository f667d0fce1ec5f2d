"""What commands print: results on stdout, as wide as the terminal or as a JSON object, and errors on stderr.

Exit codes of all commands: 0, done, and the answer is yes; 1, something failed, or the answer is no; 2, the
arguments are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

FAILED, WRONG_ARGUMENTS = 1, 2
_WIDTH_WITHOUT_TERMINAL = 150

Rows = Iterable[tuple[str, str]]


def make_console(stderr: bool = False) -> Console:
    """A console on stdout or stderr; of a fixed width where that is no terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_WIDTH_WITHOUT_TERMINAL)


def end(reason: str, code: int = FAILED) -> NoReturn:
    """End the command with a reason on stderr."""
    make_console(stderr=True).print(
        reason, style="red", markup=False, highlight=False, soft_wrap=True, overflow="ignore"
    )
    raise typer.Exit(code)


def facts(title: str, rows: Rows) -> Padding:
    """A table of names and values below a title, with an empty line after it."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True, min_width=16)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return Padding(table, (0, 0, 1, 0))


class Report:
    """Sections of facts and a verdict: printed as they are found, or as one JSON object at the end.

    The object has `answer` (true or false), `verdict` (one line) and `sections`: by title, a list of pairs
    [name, value]. A name may be empty or occur twice.
    """

    def __init__(self, as_json: bool):
        self._console = make_console()
        self._sections: dict[str, list[list[str]]] | None = {} if as_json else None

    def section(self, title: str, rows: Rows) -> None:
        """Report facts under a title, which may have facts already."""
        if self._sections is None:
            self._console.print(facts(title, rows))
        else:
            self._sections.setdefault(title, []).extend([name, value] for name, value in rows)

    def verdict(self, answer: bool, text: str, color: str) -> None:
        """End the report."""
        if self._sections is None:
            self._console.print(text, style=f"bold {color}", highlight=False, markup=False)
        else:
            print_json({"answer": answer, "verdict": text, "sections": self._sections})


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout, for scripts."""
    typer.echo(json.dumps(value, indent=2))

"""Output that is as wide as the terminal, or wide enough for tables where there is none."""

from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 150


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)

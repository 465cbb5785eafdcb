"""Control characters of data never reach a terminal; the colours of commands do."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recd_plugins.cli import main
from recd_plugins.report import output
from recd_plugins.report.output import output_console, show_controls, visible
from recd_plugins.report.progress import progress_bars
from recd_plugins.runtime.text import read_bytes

HOSTILE = "a\x1b]0;title\x07b\x1b[8mc\rd\x7fe\x9b2Jf\u202eg\u2066h"
SHOWN = r"a\x1b]0;title\x07b\x1b[8mc\x0dd\u007fe\u009b2Jf\u202eg\u2066h"


class Terminal(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show_controls(stream)
    return stream


def test_controls_become_escapes() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("end\r\nof\rline") == "end\r\nof\\x0dline"
    assert visible("tab\tline\nümlaut \udcff 日本") == "tab\tline\nümlaut \udcff 日本"


def test_only_colours_of_whole_messages_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    print(HOSTILE)
    click.echo(HOSTILE)
    click.secho(HOSTILE, fg="red")
    click.secho(f"\x1b[0m{HOSTILE}", fg="red")
    red = [f"\x1b[31m{SHOWN}\x1b[0m", f"\x1b[31m\\x1b[0m{SHOWN}\x1b[0m"]
    assert terminal.text.split("\n") == [SHOWN, SHOWN, *red, ""]


def test_consoles_keep_their_own_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    table = Table("name", title=f"[red]{HOSTILE}[/]")
    table.add_row(Text(HOSTILE, style="bold"))
    output_console().print(table)
    output_console().print(HOSTILE, highlight=False)
    Console().print("[red]a plugin's own[/]")
    assert "\x1b[31ma plugin's own\x1b[0m" in terminal.text
    assert "\x1b[1m" in terminal.text
    for control in ("\x1b]", "\x1b[8m", "\x07", "\r", "\x7f", "\x9b", "\u202e"):
        assert control not in terminal.text
    assert SHOWN in terminal.text


@pytest.mark.parametrize(
    "arguments",
    [["run", f"{HOSTILE}.yaml"], ["init", f"{HOSTILE}.csv", "a.yaml"], [HOSTILE], [f"--{HOSTILE}"]],
)
def test_commands_show_them_as_escapes(arguments: list[str], cwd: Path) -> None:
    output = CliRunner().invoke(main, arguments).output
    assert r"\x1b]0;title\x07b" in output
    assert output.replace("\n", "").isprintable()


def test_ranks_show_them_as_escapes() -> None:
    reads, writes = os.pipe()
    with open(writes, "w", encoding="utf-8") as stream, open(reads, encoding="utf-8") as shown:
        print(HOSTILE, file=output._persistent(stream, stream), flush=True)
        assert shown.readline() == f"{SHOWN}\n"


WORDS = "a line of words that no terminal is wide enough for " * 10


def test_lines_are_as_wide_as_columns_or_not_cut_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output_console().print(WORDS)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40
    monkeypatch.delenv("COLUMNS")
    table = Table(*(f"column {number}" for number in range(40)))
    table.add_row(*(f"{number}.123456" for number in range(40)))
    output_console().print(table)
    output_console().print(WORDS)
    shown = capsys.readouterr().out
    assert all(f"{number}.123456" in shown for number in range(40))
    assert WORDS.strip() in shown


@pytest.mark.parametrize(("expected", "fails"), [(1000, False), (None, False), (1000, True)])
def test_progress_bars_end_full_unless_the_work_broke_off(
    capsys: pytest.CaptureFixture[str], expected: int | None, fails: bool
) -> None:
    with suppress(KeyError), progress_bars() as add_bar:
        add_bar("reading", expected)(100)
        if fails:
            raise KeyError
    assert ("100/1000" if fails else "100/100\n") in capsys.readouterr().err.replace(" ", "")


def test_bytes_are_numbers_with_units() -> None:
    sizes: dict[str | int, int] = {"256MB": 256_000_000, "2GiB": 2**31, "1.5 kib": 1536, "10b": 10}
    sizes[4096] = 4096
    assert {words: read_bytes(words) for words in sizes} == sizes
    for words in ("", "MB", "12 parsecs", "-3MB", "0", "0.1b", "1e9", "9" * 400):
        with pytest.raises(ValueError, match="256MB"):
            read_bytes(words)

from rich.table import Table

from recd_plugins.report.output import output_console

WORDS = "a line of words that no terminal is wide enough for " * 10


def test_into_a_pipe_nothing_is_cut_or_wrapped(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(*(f"column {number}" for number in range(40)))
    table.add_row(*(f"{number}.123456" for number in range(40)))
    output_console().print(table)
    output_console().print(WORDS)
    shown = capsys.readouterr().out
    assert all(f"{number}.123456" in shown for number in range(40))
    assert WORDS.strip() in shown


def test_columns_say_how_wide(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    output_console().print(WORDS)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40

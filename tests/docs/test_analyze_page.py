"""The example of docs/commands/analyze.md runs."""

import json
import re
import shlex
from pathlib import Path

from click.testing import CliRunner

from recd_plugins.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "commands" / "analyze.md"


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (console,) = re.findall(r"```console\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    for line in console.strip().splitlines():
        result = CliRunner().invoke(main, shlex.split(line.removeprefix("$ recd ")))
        assert result.exit_code == 0, result.output
    assert (tmp_path / "impressions.html").is_file()
    report = json.loads((tmp_path / "impressions.json").read_text())
    (described,) = re.findall(r"^With `--json`: (.*?)\n\n", PAGE.read_text(), re.DOTALL | re.M)
    inside = report.keys() | report["sessions"].keys() | report["sample"].keys()
    assert set(re.findall(r"`(\w+)`", described)) <= inside

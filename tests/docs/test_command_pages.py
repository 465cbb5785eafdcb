"""The examples of docs/commands run, and print what the page says where it says something."""

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from recd_plugins.cli import main
from recd_plugins.runtime.versions import SETS

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = ("plugins", "validate", "schema", "doctor")


def examples() -> list[tuple[str, str]]:
    """Each command line that starts with ``$``, and the output that stands below it."""
    found = []
    for name in COMMANDS:
        text = (DOCS / "commands" / f"{name}.md").read_text()
        for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
            for example in block.split("$ ")[1:]:
                command, _, output = example.partition("\n")
                found.append((command, output))
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the pages take for granted: a registry file and a folder with a plugin."""
    registry = (DOCS / "registry.md").read_text()
    (tmp_path / "registry.yaml").write_text(re.findall(r"```yaml\n(.*?)```", registry, re.S)[0])
    page = (DOCS / "plugins" / "pooling.md").read_text()
    (tmp_path / "my_plugins").mkdir()
    (tmp_path / "my_plugins" / "acme_last.py").write_text(
        re.findall(r"```python\n(.*?)```", page, re.S)[0]
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "output"), examples(), ids=lambda value: value.strip())
def test_the_example_runs(folder, command, output):
    recd, *arguments = shlex.split(command)
    assert recd == "recd"
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert not output or result.stdout == output


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_the_page_names_every_option(name):
    places = [DOCS / "commands", *DOCS.parent.glob("plugins/*/docs")]
    (text,) = (path.read_text() for place in places if (path := place / f"{name}.md").exists())
    usage = re.search(rf"^    recd {name}(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert usage
    command = main.get_command(click.Context(main), name)
    assert command
    parameters = command.get_params(click.Context(command))
    options = [option for parameter in parameters for option in parameter.opts]
    options.remove("--help")
    assert all(option in usage[1] for option in options if option.startswith("--"))


def test_doctor_lists_the_sets_it_knows():
    text = (DOCS / "commands" / "doctor.md").read_text()
    rows = re.findall(r"^\| (\d\.\d+) \| (\d\.\d+) \| (\d\.\d+) \|$", text, re.MULTILINE)
    assert {torch: fbgemm for torch, fbgemm, torchrec in rows if fbgemm == torchrec} == SETS

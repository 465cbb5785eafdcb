import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.plugin_files import write_plugins

from recd_plugins.cli import COMMANDS, main

PLUGIN = '''
import click

class Clicks(Dataset):
    """Clicks on [bold]things[/bold]."""
    name = "acme.clicks"
    class Options(PluginOptions):
        path: str = Field(description="Where the clicks are.")
        limit: int | None = None
    def prepare(self): ...
    def schema(self): ...
    def reader(self, **arguments): ...

class Plain(Converter):
    """Nothing to convert."""
    name = "acme.plain"
    def convert(self, rows, schema): ...

class Stock(Sharding):
    """Leave tables to the planner."""
    name = "acme.stock"

@click.command()
@click.option("--fail", is_flag=True)
@click.pass_obj
def tally(plugins_dir, fail):
    """Count clicks."""
    if fail:
        raise DataError("clicks.csv:3: no click; write 0 or 1")
    click.echo(f"none in {plugins_dir}")

@hookimpl
def register_commands(cli): cli.add_command(tally)
'''

REGISTRY = """\
version: 1
dataset: {use: acme.clicks, options: {path: clicks}}
converter: {use: acme.plain}
sharding:
  - {use: acme.stock, tables: ["*"]}
  - {use: acme.stock, tables: [t_off], enabled: false}
"""


@pytest.fixture
def folder(cwd):
    write_plugins(cwd, PLUGIN, "Clicks", "Plain", "Stock")
    (cwd / "registry.yaml").write_text(REGISTRY)
    return cwd


def recd(*arguments: str, expect: int = 0) -> click.testing.Result:
    result = CliRunner().invoke(main, ["--plugins-dir", "plugins", *arguments])
    assert result.exit_code == expect, result.output
    return result


#: Commands that need no torch, and what each shows.
LIGHT = {
    "--help": [*COMMANDS, "tally", "Count clicks."],
    "plan --help": ["--tiers", "--topology"],
    "validate": ["registry.yaml: 3 entries, ok"],
    "run typo.yaml": ["Did you mean 'acme.clicks'?"],
    "run registry.yaml --json typo.yaml/r": ["cannot be written"],
}
# Commands of plugins share options with ours, and all end alike by a signal.
IN_TURN = """
import sys
from recd_plugins.cli import main
shared = ["recd_plugins.cli.options", "recd_plugins.cli.exits"]
for line in sys.argv[1:]:
    try:
        main(["--plugins-dir", "plugins", *line.split()])
    except SystemExit:
        pass
    absent = ("torch", "fbgemm_gpu", "matplotlib") + ("recd_plugins.cli.",) * (line == "--help")
    found = [m for m in sys.modules if m.startswith(absent) and m not in shared]
    print("imported", found, flush=True)
"""


def test_what_needs_no_torch_imports_none(folder):
    text = REGISTRY + "training: {topology: ndv4}\n"
    (folder / "registry.yaml").write_text(text)
    (folder / "typo.yaml").write_text(text.replace("use: acme.clicks", "use: acme.clickss"))
    command = [sys.executable, "-c", IN_TURN, *LIGHT]
    said = subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)
    *parts, rest = re.split(r"^imported (.*)\n", said, flags=re.M)
    assert rest == ""
    for text, found, line in zip(parts[::2], parts[1::2], LIGHT, strict=True):
        assert found == "[]", line
        assert all(words in text for words in LIGHT[line]), text


def test_an_error_is_its_message_and_exit_code_1(folder):
    result = recd("tally", "--fail", expect=1)
    assert result.stderr == "clicks.csv:3: no click; write 0 or 1\n"
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)


def test_help_and_doctor_outlive_a_broken_plugin(folder):
    (folder / "plugins" / "broken.py").write_text("import no_such_module")
    result = recd("--help")
    assert "doctor" in result.stdout
    assert "broken.py failed to import" in result.stderr
    checks = json.loads(recd("doctor", "--json", expect=1).stdout)
    (failed,) = [check for check in checks if check["status"] == "failed"]
    assert failed["name"] == "plugins"
    assert "broken.py" in failed["detail"]


def test_plugins_lists_kind_name_origin_and_summary(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    found = json.loads(recd("plugins", "--kind", "dataset", "--json").stdout)
    assert {
        "kind": "dataset",
        "name": "acme.clicks",
        "wrapper": False,
        "from": str(Path("plugins") / "acme.py"),
        "summary": "Clicks on [bold]things[/bold].",
    } in found
    assert {plugin["kind"] for plugin in found} == {"dataset"}
    table = " ".join(recd("plugins").stdout.split())
    assert "acme.plain" in table
    assert "[bold]things[/bold]" in table, "a summary is text, not markup"


def test_validate_counts_enabled_entries(folder):
    for arguments in (["registry.yaml"], []):
        assert recd("validate", *arguments).stdout == "registry.yaml: 3 entries, ok\n"
    answer = json.loads(recd("validate", "--json").stdout)
    assert answer == {"ok": True, "entries": 3, "problems": []}


def test_validate_tells_every_problem(folder):
    text = REGISTRY.replace("path: clicks", "pth: clicks").replace("version: 1", "version: 2")
    (folder / "registry.yaml").write_text(text)
    lines = recd("validate", expect=1).stderr.splitlines()
    assert lines == [
        "registry.yaml:1 version: input should be 1, got 2",
        "registry.yaml:2 dataset.options.path: this required option of 'acme.clicks' is missing",
        "registry.yaml:2 dataset.options.pth: unknown option of 'acme.clicks'. Did you mean "
        "'path'?",
    ]
    answer = json.loads(recd("validate", "--json", expect=1).stdout)
    assert answer["ok"] is False
    assert answer["problems"][2] == {
        "path": "registry.yaml",
        "line": 2,
        "field": "dataset.options.pth",
        "message": "unknown option of 'acme.clicks'. Did you mean 'path'?",
    }


def test_validate_reads_the_file_of_the_topology(folder):
    text = REGISTRY + "training: {topology: cluster.yaml}\n"
    assert "training:" not in REGISTRY
    (folder / "registry.yaml").write_text(text)
    assert "cluster.yaml" in recd("validate", expect=1).stderr
    (folder / "cluster.yaml").write_text("flops: -1\n")
    said = "cluster.yaml:1 flops: input should be greater than 0"
    assert said in recd("validate", expect=1).stderr
    problems = json.loads(recd("validate", "--json", expect=1).stdout)["problems"]
    assert {"cluster.yaml"} == {problem["path"] for problem in problems}
    (folder / "registry.yaml").write_text(text.replace("cluster.yaml", "dgx-h10"))
    line = len(text.splitlines())
    said = f"yaml:{line} training.topology: no topology is named 'dgx-h10'. Did you mean 'dgx"
    assert said in recd("validate", expect=1).stderr
    (problem,) = json.loads(recd("validate", "--json", expect=1).stdout)["problems"]
    assert (problem["line"], problem["field"]) == (line, "training.topology")


def test_schema_describes_every_plugin(folder):
    schema = json.loads(recd("schema").stdout)
    assert schema == json.loads(recd("schema", "--json").stdout)
    entry = schema["$defs"]["dataset_entry"]
    assert "acme.clicks" in entry["properties"]["use"]["enum"]
    (rule,) = [
        rule for rule in entry["allOf"] if rule["if"]["properties"]["use"]["const"] == "acme.clicks"
    ]
    assert rule["then"]["required"] == ["options"], "path has no default"
    name = rule["then"]["properties"]["options"]["$ref"].removeprefix("#/$defs/")
    options = schema["$defs"][name]
    assert options["properties"]["path"]["description"] == "Where the clicks are."
    assert options["additionalProperties"] is False
    assert options["required"] == ["path"]
    # Of what the framework itself has, an entry may leave out its tables.
    entry = schema["$defs"]["sharding_entry"]
    assert entry["required"] == ["use"]
    assert entry["allOf"][-1]["else"] == {"required": ["tables"]}

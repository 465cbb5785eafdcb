"""The code of the documentation runs and prints what the pages show.

Every page has a folder of its own. Blocks of code, by their info string:

- ``LANG title="PATH"``: the file PATH of that folder.
- ``console``: runs every line that starts with ``$ ``, in the order of the page. Lines below
  it are its output; ``...`` stands for any text.
- ``python``: all of them together are one program, run last.
- ``yaml``: sections of a registry file, checked in place of those of the page's ``registry.yaml``,
  or of the example in docs/configuration.md.
- ``sh``: not run; commands and options of ``recd`` have to exist.
- ``py``, ``text`` and others: not run.

At the end pytest runs the files ``test_*.py``, with the folder ``plugins`` on the path.
"""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from ruamel.yaml import YAML
from tests import forked

from docs import generate
from recd_plugins.cli import main

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_RUN = ("console", "python", "yaml")


class Block(NamedTuple):
    language: str
    path: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in _FENCE.findall(page.read_text(encoding="utf-8"))]


PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
)
_NAMES = {path: path.relative_to(ROOT).as_posix() for path in PAGES}


@pytest.mark.parametrize(
    "page",
    [path for path in PAGES if any(block.path or block.language in _RUN for block in blocks(path))],
    ids=_NAMES.get,
)
def test_the_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONPATH", "plugins")
    program = []
    for language, path, text in blocks(page):
        if path:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        elif language == "console":
            _run_console(text, tmp_path)
        elif language == "yaml":
            _validate(text, tmp_path)
        elif language == "python":
            program.append(text)
    if program:
        (tmp_path / "program.py").write_text("\n".join(program), encoding="utf-8")
        _run([sys.executable, "program.py"], tmp_path)
    if any(tmp_path.glob("test_*.py")):
        _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."], tmp_path)


def _run_console(text: str, folder: Path) -> None:
    for example in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = example.partition("\n")
        program, *arguments = shlex.split(line)
        if program == "recd":
            command: list[str] = [forked.RECD, *arguments]
        else:
            assert program == "python", f"{line}: use recd or python, or a block of sh"
            command = [sys.executable, *arguments]
        printed = _run(command, folder)
        if shown.strip():
            parts = [re.escape(part) for part in _trimmed(shown).split("...")]
            assert re.fullmatch(".*".join(parts), _trimmed(printed), re.DOTALL), (
                f"$ {line}\nprints\n{printed}\nand the page shows\n{shown}"
            )


def _run(command: list[str], folder: Path) -> str:
    if command[1:3] == ["-m", "torch.distributed.run"]:
        *_, ranks, script = command
        done = forked.torchrun([sys.executable, script], ranks=int(ranks), cwd=folder)
    else:
        done = forked.run(command, cwd=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def _validate(text: str, folder: Path) -> None:
    yaml, sections = YAML(typ="safe"), YAML(typ="safe").load(text)
    base = folder / "registry.yaml"
    if base.exists():
        sections = {**yaml.load(base.read_text(encoding="utf-8")), **sections}
    elif "dataset" not in sections:
        page = ROOT / "docs/configuration.md"
        example = next(block.text for block in blocks(page) if block.path == "registry.yaml")
        sections = {**yaml.load(example), **sections}
    with (folder / "sections.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump(sections, stream)
    plugins = ["--plugins-dir", "plugins"] if (folder / "plugins").is_dir() else []
    _run([forked.RECD, *plugins, "validate", "sections.yaml"], folder)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=_NAMES.get
)
def test_commands_and_options_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fenced = [block.text for block in blocks(page) if block.language in ("sh", "console")]
    inline = re.findall(r"`(recd [^`\n]+)`", _FENCE.sub("", text))
    lines = "\n".join(fenced).replace("\\\n", " ").splitlines()
    for line in [*inline, *lines]:
        if match := re.search(r"\brecd ((?:--[\w-]+ \S+ )*[a-z][\w-]*.*)", line.partition("#")[0]):
            _check(match[1].split())


def _check(words: list[str]) -> None:
    command = main.get_command(click.Context(main), next(w for w in words if w[0] != "-"))
    assert command is not None, f"recd {' '.join(words)}: no such command"
    known = _options(main) | _options(command)
    for word in words:
        option = word.strip("[]().,;:'\"").partition("=")[0]
        assert not option.startswith("--") or option in known, f"{option} of recd {words[0]}"


@cache
def _options(command: click.Command) -> set[str]:
    """Return the options of a command and of its subcommands."""
    context = click.Context(command)
    names = {name for each in command.get_params(context) for name in each.opts}
    inner = isinstance(command, click.Group) and command is not main
    for name in command.list_commands(context) if inner else ():
        names |= _options(command.get_command(context, name))
    return names


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "<!-- end -->" in page.read_text("utf-8")], ids=_NAMES.get
)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.filled(text) == text, "run python docs/generate.py"

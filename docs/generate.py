"""Fill the generated parts of the documentation: ``python docs/generate.py``.

Between ``<!-- options: NAME -->`` and ``<!-- end -->`` stands a table of the keys of a section of
``registry.yaml`` (``training``, ``model``) or of a plugin's options (``scars.cache``). Below
``<!-- commands -->`` stand all commands, the most used ones with their options.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from pydantic import BaseModel

from recd_plugins.cli import main
from recd_plugins.config import ModelSpec, TrainingSpec
from recd_plugins.config.manager import PluginManager

ROOT = Path(__file__).parents[1]
_SECTIONS: dict[str, type[BaseModel]] = {"training": TrainingSpec, "model": ModelSpec}
_COMMON = (  # described once, in docs/commands.md
    "--run",
    "--checkpoint",
    "--force",
    "--json",
    "--seed",
    "--nulls",
    "--plot",
    "--topology",
    "--nodes",
)
_HELP_ONLY = (  # options and examples are only in --help
    "analyze",
    "calibrate",
    "checkpoint",
    "convert-layout",
    "criteo",
    "doctor",
    "generate",
    "histories",
    "logs",
    "papercal",
    "plugins",
    "profile",
    "rank",
    "report",
    "rm1",
    "rm2",
    "rm3",
    "schema",
    "simulate",
    "trace",
    "validate",
)
_ARGUMENTS = """\
REGISTRY selects its newest finished run. RUN is a run folder, which needs no registry file.
KEY=VALUE overrides a value, as in recd run.
"""  # as in docs/commands.md
_KEYS = {  # of options, with or without their plugin, whose keys another page describes
    "generate": "Keys: the options of [`recd generate`](../../docs/commands.md#recd-generate), "
    "with `rows` required.",
    "source.storage": "Keys: those of [recd.session_parquet](../recd_plugin_recd/README.md).",
    "streaming.files.storage": "Keys: those of "
    "[recd.session_parquet](../recd_plugin_recd/README.md).",
}
_BLOCK = re.compile(r"(<!-- (options: ([\w.]+)|commands) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> Iterator[Path]:
    """Yield the pages that may have generated parts."""
    for pattern in ("docs/**/*.md", "plugins/*/README.md"):
        yield from sorted(ROOT.glob(pattern))


def filled(text: str) -> str:
    """Return the text of a page with its generated parts as they should be."""
    seen: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        content = commands() if match[3] is None else options(match[3], seen)
        return f"{match[1]}\n{content}\n{match[4]}"

    return _BLOCK.sub(fill, text)


def options(name: str, seen: dict[str, str]) -> str:
    """Return the table of a section's or plugin's keys.

    ``seen`` maps each row of earlier tables of the page to its plugin. If at least three rows of a
    plugin repeat, one row names their keys.
    """
    rows = list(_rows(_model(name), name))
    plugins = Counter(seen[row] for row in rows if row in seen)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += [row for row in rows if plugins[seen.get(row, "")] < 3]
    for plugin, count in plugins.items():
        if count >= 3:
            keys = (row.split(" | ")[:2] for row in rows if seen.get(row) == plugin)
            names = ", ".join(f"{key[2:]}{' (required)' * (of == 'required')}" for key, of in keys)
            lines.append(f"| {names} | | as in `{plugin}` |")
    for row in rows:
        seen.setdefault(row, name)
    return "".join(f"{line}\n" for line in lines)


def _model(name: str) -> type[BaseModel]:
    if name in _SECTIONS:
        return _SECTIONS[name]
    for found in PluginManager().plugins.values():
        if name in found:
            return found[name].cls.Options
    raise SystemExit(f"no section or plugin is named {name}")


def _rows(model: type[BaseModel], plugin: str, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = _inner(field.annotation)
        if field.is_required():
            default = "required"
        else:
            value = field.get_default(call_default_factory=True)
            default = "" if isinstance(value, BaseModel) else f"`{json.dumps(value, default=str)}`"
        meaning = (field.description or "").replace("|", "\\|")
        values = _values(field.annotation)
        if not {*map(str, values)} <= {*re.findall(r"\w+", meaning)}:
            meaning += f" One of {', '.join(f'`{each}`' for each in values)}."
        keys = _KEYS.get(key, _KEYS.get(f"{plugin}.{key}", ""))
        meaning += f" {keys}" if keys else ""
        yield f"| `{key}` | {default} | {meaning} |"
        if inner is not None and not keys:
            yield from _rows(inner, plugin, f"{key}.")


def _inner(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as ``Model | None`` or ``dict[str, Model]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_inner, get_args(annotation))), None)


def _values(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a Literal in an annotation such as ``Literal["a", "b"] | None``."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next(filter(None, map(_values, get_args(annotation))), ())


def commands() -> str:
    """Return every command: its help, then a table of its options."""
    return "\n".join(_commands(main, "recd", click.Context(main, info_name="recd")))


def _commands(group: click.Group, path: str, context: click.Context) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        help = cleandoc(command.help or "")
        usage = " ".join(command.collect_usage_pieces(inner)).removeprefix("[OPTIONS] ")
        prose, *examples = re.split("^\x08\n", help, maxsplit=1, flags=re.M)
        yield f"## {path} {name}\n"
        if like := seen.get(alike := re.sub(r"\d", "", f"{name} {help}")):
            yield f"Like `{like}`.\n"
            continue
        seen[alike] = f"{path} {name}"
        shown = path if name in usage.split() else f"{path} {name}"  # TABLE is an argument
        if not isinstance(command, click.Group) and usage != "[OPTIONS]":
            yield f"`{shown} {usage}`\n"
        yield f"{prose.replace(_ARGUMENTS, '').strip()}\n"
        if name in _HELP_ONLY:
            if isinstance(command, click.Group):
                yield "".join(_subcommands(command, f"{path} {name}", inner))
            continue
        for each in examples:
            yield f"```sh\n{each.strip()}\n```\n"
        rows = "".join(_option(each, inner) for each in command.get_params(inner))
        if common := sorted(filter(None, map(_common, command.get_params(inner)))):
            rows += f"| {', '.join(common)} | [common](#common-options) |\n"
        if rows in seen:
            yield f"The options are those of `{seen[rows]}`.\n"
        elif rows:
            yield f"| option | meaning |\n|---|---|\n{rows}"
            seen[rows] = f"{path} {name}"
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}", inner)


def _subcommands(group: click.Group, path: str, context: click.Context) -> Iterator[str]:
    """Yield a list item per subcommand: its usage and the first paragraph of its help."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        pieces = command.collect_usage_pieces(click.Context(command, info_name=name))
        usage = " ".join([path, name, *pieces[1:]])
        summary = (command.help or "").split("\n\n")[0]
        yield f"- `{usage}`: {' '.join(summary.split())}\n"


def _common(option: click.Parameter) -> str:
    """Return the name of a common option, else an empty text."""
    json_flag = getattr(option, "is_flag", False) and "--json" in option.opts
    key = option.opts[0].removeprefix("--").replace("-", "_")
    if getattr(option, "help", None) == f"Overrides training.{key}.":
        return f"`{option.opts[0]}`"
    return "".join(f"`{name}`" for name in option.opts if name in _COMMON and not json_flag)


def _option(option: click.Parameter, context: click.Context) -> str:
    record = option.get_help_record(context)
    if record is None or isinstance(option, click.Argument):
        return ""
    if "--help" in option.opts or _common(option):
        return ""
    names, meaning = (part.replace("|", "\\|") for part in record)
    names = names.replace(" RANGE", "")
    meaning = re.sub(r" ?\[([^][]*)\]", _without_range, " ".join(meaning.split()))
    return f"| `{names}` | {meaning} |\n"


def _without_range(match: re.Match[str]) -> str:
    """Return a group such as ``[default: 1; x>=1]`` without the range."""
    kept = [part for part in match[1].split("; ") if not re.search("x[<>]|[<>]=?x", part)]
    return f"{match[0][: match[0].index('[')]}[{'; '.join(kept)}]" if kept else ""


if __name__ == "__main__":
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT), file=sys.stderr)

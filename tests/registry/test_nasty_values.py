"""Every field of the schema and of every plugin's options, with values that nobody means."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from recd_plugins.built_in_kinds import BY_NAME, KINDS
from recd_plugins.errors import Problem, RegistryError
from recd_plugins.manager import PluginManager
from recd_plugins.registry.loader import Document, read_yaml
from recd_plugins.registry.resolve import resolve
from recd_plugins.registry.schema import registry_spec

BASE = {
    "version": "1",
    "dataset": "{use: recd.session_parquet, options: {path: clicks}}",
    "converter": "{use: recd.kjt}",
}
# What pydantic is handed as it stands.
VALUES = [
    *("true", "no", "null", "''", "' '", "[]", "{}", "[[[]]]", "{a: {b: 1}}", "[null]"),
    *("-1", "0", "2.5", "1e-320", "1e308", ".nan", "-.inf", "'nan'", "'5'"),
    *("9223372036854775807", "18446744073709551615", "0o17", "1_000", "10:30:00"),
    *("2020-01-01", "x" * 300, "\N{COLLISION SYMBOL}", '"\\x1b[2J"'),
]
# What the loader looks at, wherever it stands.
UNREADABLE = [
    *("1e400", "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "18446744073709551616"),
    *("017", "-01", "2020-99-99", "2020-01-01 10:00:00+25:00", "!!timestamp now"),
    *('"a\\0b"', '"\\ud800"', '{"a\\0b": 1}', "a/" * 3000, "x" * 100_000),
    *("!!python/name:os.system", "!!binary aGk=", "!!set {a}", "!mine 5", "!!int x", "!!float x"),
    *("=", "<<", "*nothing", "{<<: {a: 1}}", "{a: 1, a: 2}", "{1: 2}", "{? [a] : 1}"),
]
#: Where a value is to stand.
HERE = "here"
MANAGER = PluginManager()


def fields(model: type[BaseModel], location: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The location of every field of a model, and of the models inside of it."""
    for name, field in model.model_fields.items():
        yield (*location, name)
        for inner in models_in(field.annotation):
            yield from fields(inner, (*location, name))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def text(location: tuple[str, ...], value: str, in_list: bool = False) -> str:
    """A value at a place, in YAML, with the lists of the schema around it."""
    for name in reversed(location):
        value = f"{{{name}: {value}}}"
    return f"[{value}]" if in_list else value


def cases() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """A name, the section, and where in it a value stands."""
    for location in fields(registry_spec(KINDS)):
        yield ".".join(location), location[0], location[1:]
    for kind, plugins in MANAGER.plugins.items():
        for name, registered in plugins.items():
            for location in fields(registered.cls.Options):
                yield f"{name}.{'.'.join(location)}", f"{kind} {name}", ("options", *location)


def document(section: str, location: tuple[str, ...], value: str) -> str:
    kind, _, plugin = section.partition(" ")
    in_list = kind in (
        *("preprocessing", "pooling", "sharding", "cache", "optimizer", "metric"),
        *("optimizers", "metrics", "callbacks"),
    )
    if plugin == "scars.hot_batches":
        options = text(location[1:], value)
        inner = f"[{{use: {plugin}, options: {options}}}]"
        content = f"{{use: recd.session_parquet, options: {{path: a}}, wrap: {inner}}}"
    elif plugin:
        who = {"preprocessing": ", features: [a]", "pooling": ", features: [a]",
               "sharding": ", tables: [a]", "cache": ", tables: [a]",
               "optimizer": ", tables: [a]"}.get(kind, "")  # fmt: skip
        content = f"{{use: {plugin}{who}, options: {text(location[1:], value)}}}"
        content = f"[{content}]" if in_list else content
    else:
        content = text(location, value, in_list=in_list and bool(location))
    sections = {**BASE, BY_NAME[kind].section if plugin else kind: content}
    return "".join(f"{name}: {written}\n" for name, written in sections.items())


def check(value: Any) -> None:
    """What was taken is what may be meant."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            check(getattr(value, name))
    elif isinstance(value, dict):
        check(list(value))
        check(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            check(item)
    elif isinstance(value, float):
        assert math.isfinite(value)
    elif isinstance(value, int):
        assert -(1 << 63) <= value < 1 << 64
    elif isinstance(value, str | Path):
        assert "\0" not in str(value)
        str(value).encode()
        assert not isinstance(value, Path) or len(str(value)) <= 4096


@pytest.mark.parametrize(
    ("section", "location"), [pytest.param(*case[1:], id=case[0]) for case in cases()]
)
def test_a_value_is_taken_or_refused_with_its_line(tmp_path, values, section, location):
    written = read(tmp_path / "r.yaml", document(section, location, HERE))
    for value in values:
        taken_or_refused(partial(replace, written, data=with_value(written.data, value)))


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> list[Any]:
    """``VALUES`` as the loader reads them, wherever they stand."""
    path = tmp_path_factory.mktemp("values") / "r.yaml"
    forms = [
        *VALUES,
        *(f"[{value}]" for value in ("true", ".nan")),
        *(f"{{a: {value}}}" for value in ("true", ".nan")),
    ]
    return [read(path, f"value: {form}").data["value"] for form in forms]


def read(path: Path, text: str) -> Document:
    path.unlink(missing_ok=True)  # what is written over goes to the disk at once
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)


def with_value(data: Any, value: Any) -> Any:
    """A copy of ``data`` that has the value where ``HERE`` stands."""
    if isinstance(data, dict):
        return {key: with_value(item, value) for key, item in data.items()}
    if isinstance(data, list):
        return [with_value(item, value) for item in data]
    return deepcopy(value) if data == HERE else data


def taken_or_refused(make: Callable[[], Document]) -> bool:
    problems: tuple[Problem, ...] = ()
    try:
        resolved = resolve(make(), MANAGER)
    except RegistryError as error:
        problems = error.problems
    if problems:
        assert all(problem.line for problem in problems), problems
        assert all(len(str(problem)) < 2500 for problem in problems)
        return False
    check(resolved.spec)
    for item in (*chain(*resolved.entries.values()), *resolved.wrappers):
        check(item.plugin.options)
    return True


@pytest.mark.parametrize(
    ("section", "location"),
    [("training", ("seed",)), ("training", ("checkpoint", "path")), ("model", ("tables",)),
     ("dataset dlrm.random", ("options", "rows")),
     ("dataset recd.session_parquet", ("options", "path")),
     ("dataset recd.session_parquet", ("options", "where")),
     ("preprocessing recd.bucketize", ("options", "borders"))],
)  # fmt: skip
def test_what_no_field_takes(tmp_path, section, location):
    for value in UNREADABLE:
        for form in (value, f"[{value}]", f"{{a: {value}}}"):
            text = document(section, location, form)
            taken = taken_or_refused(partial(read, tmp_path / "r.yaml", text))
            assert not taken, form[:99]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("version: true", "r.yaml:1 version: input should be a number, got True"),
        (
            "training: {checkpoint: {path: ''}}",
            "r.yaml:4 training.checkpoint.path: input should be a path, got ''",
        ),
        ("training: {seed: 18446744073709551616}", "r.yaml:4 training.seed: '18446744073709551616'"
         " has more than 64 bits"),
        ("training: {learning_rate: 1e308}", "r.yaml:4 training.learning_rate: input should be "
         "less than or equal to 1000000000, got 1e+308"),
        ("training: {learning_rate: 1e400}", "r.yaml:4 training.learning_rate: '1e400' is beyond"),
        ("training: {seed: 017}", "r.yaml:4 training.seed: 017 is octal to some readers"),
        ("model: {num_embeddings: 9000000000000000}", "r.yaml:4 model.num_embeddings: a table of "
         "9,000,000,000,000,000 rows of 16 float32 takes 576,000 TB"),
        ("model: {embedding_dim: 4000000000}", "r.yaml:4 model.embedding_dim: input should be less "
         "than or equal to 1048576"),
        ("model: {embedding_dim: 64, tables: {t_a: {num_embeddings: 5000000000000}}}",
         "r.yaml:4 model.tables: t_a of 5,000,000,000,000 rows of 64 float32 takes 1,280 TB"),
        ('dataset: {use: recd.session_parquet, options: {path: "a\\0b"}}',
         "r.yaml:2 dataset.options.path: holds a NUL character"),
        ("dataset: {use: recd.session_parquet, options: {path: ''}}",
         "r.yaml:2 dataset.options.path: input should be a path, got ''"),
        ("dataset: {use: dlrm.random, options: {rows: true}}",
         "r.yaml:2 dataset.options.rows: input should be a number, got True"),
        ("dataset: {use: recd.interactions, options: {path: a, positive_threshold: .nan}}",
         "r.yaml:2 dataset.options.positive_threshold: input should be a finite number, got nan"),
    ],
)  # fmt: skip
def test_what_is_said(tmp_path, section, expected):
    kind, _, content = section.partition(": ")
    path = tmp_path / "r.yaml"
    sections = {**BASE, kind: content}
    path.write_text("".join(f"{name}: {written}\n" for name, written in sections.items()))
    with pytest.raises(RegistryError) as caught:
        resolve(read_yaml(path), MANAGER)
    assert expected in str(caught.value)

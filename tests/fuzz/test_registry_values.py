"""Registry files with other values, keys and names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd
from tests.fuzz.registries import TEXT, Path_, judge, leaves, parsed, put

KINDS = Kinds("registry values")


@KINDS.add
def numbers_of_other_yamls(case: Case) -> Outcome:
    """A number that two readers of YAML read differently is one of them, or is refused."""
    number = case.one_of(
        [
            "0b11",
            "0o3",
            "03",
            "0x3",
            "3_0",
            "+3",
            "3.",
            "3e0",
            "1:30",
            ".3e1",
            "３",
            "3 ",
            "3,0",
            "1,000",
            "~3",
            ".inf",
            "-.inf",
            ".nan",
            "'3'",
            "3.0000000000000001",
        ],
        "number",
    )
    key = case.one_of(["steps: 3", "batch_size: 8", "learning_rate: 0.5", "seed: 7"], "key")
    return judge(TEXT.replace(key, f"{key.partition(':')[0]}: {number}"))


@KINDS.add
def a_value_of_another_type(case: Case) -> Outcome:
    document = parsed(TEXT)
    path = case.one_of(list(leaves(document)), "place")
    inner: Any = document
    for key in path:
        inner = inner[key]
    others: list[Any] = [
        None,
        True,
        False,
        "",
        " ",
        [],
        {},
        [inner],
        {"value": inner},
        [[inner]],
        "x",
    ]
    if isinstance(inner, str):
        others = [*others, 3, 0.5]
    else:
        others = [*others, str(inner), inner + 0.25, -inner, -1, -0.0, 1e400]
    value = case.one_of([each for each in others if each != inner], "value")
    text = json.dumps(put(document, path, value)).replace("Infinity", ".inf")
    number = isinstance(inner, (int, float))
    refuse = number and isinstance(value, (bool, str, list, dict))
    return judge(text, refuse=refuse or (isinstance(inner, int) and value == inner + 0.25))


@KINDS.add
def a_key_of_another_spelling(case: Case) -> Outcome:
    """Every key is known, and none is taken for another."""
    document = parsed(TEXT)
    paths = [path for path in leaves(document) if isinstance(path[-1], str)]
    path = case.one_of([*paths, *((section,) for section in document)], "key")
    change: Callable[[str], str] = case.one_of(
        [
            str.upper,
            str.title,
            lambda key: key + " ",
            lambda key: " " + key,
            lambda key: key + "s",
            lambda key: key.replace("_", "-") + "_",
            lambda key: key.replace("e", "е"),
            lambda key: key + "\u200b",
            lambda key: key + "\0",
            lambda key: "",
            lambda key: "__class__",
            lambda key: "model_config",
        ],
        "change",
    )
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    new = change(str(path[-1]))
    value = inner[path[-1]]
    text = json.dumps(put(put(document, path, ...), (*path[:-1], new), value))
    return judge(text, refuse=True)


@KINDS.add
def a_key_more(case: Case) -> Outcome:
    document = parsed(TEXT)
    places: list[Path_] = [(), ("dataset",), ("dataset", "options"), ("converter",), ("model",)]
    places += [("preprocessing", 0), ("pooling", 0), ("sharding", 0), ("training",)]
    place = case.one_of(places, "place")
    key = case.one_of(["extra", "use2", "Use", "x-use", "1", "null", "", "model_fields"], "key")
    value = case.one_of([None, 1, [], {}, "x"], "value")
    return judge(json.dumps(put(document, (*place, key), value)), refuse=True)


@KINDS.add
def keys_that_are_no_text(case: Case) -> Outcome:
    key = case.one_of(["1", "1.5", "true", "null", "~", "? [a]", "? {a: b}", "2024-01-01", "!!str"])
    return judge(f"{TEXT}{key}: 1\n" if key[0] != "?" else f"{TEXT}{key}\n: 1\n", refuse=True)


@KINDS.add
def a_section_that_is_none(case: Case) -> Outcome:
    """Null, a list for a mapping, a mapping for a list."""
    document = parsed(TEXT)
    section = case.one_of(list(document), "section")
    given = document[section]
    others: list[Any] = [None, [], {}, "", 0, True, "x", [given]]
    if isinstance(given, list):
        others += [given[0], {"0": given[0]}, [None], [[]], given * 2]
    elif isinstance(given, dict):
        others += [list(given), list(given.items()), given.get("use", "x")]
    return judge(json.dumps(put(document, (section,), case.one_of(others, "value"))))


@KINDS.add
def patterns(case: Case) -> Outcome:
    pattern = case.one_of(
        [
            "",
            "[",
            "[]",
            "[!]",
            "[!a]",
            "**",
            "?",
            "[a-",
            "items\n",
            "ITEMS",
            "{items}",
            "\\*",
            "items*",
            "(items)",
            "^items$",
            " items",
            "t_items",
            "[i]tems",
            "*" * 500,
            "[" * 500,
        ],
        "pattern",
    )
    section = case.one_of(["preprocessing", "pooling", "sharding", "dataset"], "section")
    document = parsed(TEXT)
    if section == "dataset":
        return judge(json.dumps(put(document, ("dataset", "options", "sparse"), ["user", pattern])))
    key = "tables" if section == "sharding" else "features"
    return judge(json.dumps(put(document, (section, 0, key), [pattern])))


@KINDS.add
def names_of_plugins(case: Case) -> Outcome:
    name = case.one_of(
        [
            "",
            "recd",
            "recd.",
            ".ikjt",
            "recd.IKJT",
            "recd.ikjt ",
            "recd/ikjt",
            "os.system",
            "recd..ikjt",
            "recd.ikjt.x",
            "../ikjt",
            "x" * 5000,
            "recd.sigrid_hash",
            "torchrec.planner",
            "\n",
            "recd.mean",
        ],
        "name",
    )
    section = case.one_of(["dataset", "converter", "preprocessing", "pooling", "sharding"])
    document = parsed(TEXT)
    path = (section, "use") if section in ("dataset", "converter") else (section, 0, "use")
    fits = (section, name) in {
        ("preprocessing", "recd.sigrid_hash"),
        ("sharding", "torchrec.planner"),
        ("pooling", "recd.mean"),
    }
    return judge(json.dumps(put(document, path, name)), refuse=not fits)


@KINDS.add
def groups_that_are_none(case: Case) -> Outcome:
    groups = case.one_of(
        [
            [],
            [[]],
            [["user"], ["user"]],
            [["nobody"]],
            [["user", "user"]],
            ["user"],
            "Auto",
            "",
            None,
            5,
            [[None]],
            [["*"]],
            [["user", "items"], ["items"]],
            {"a": ["user"]},
            [["user"], []],
        ]
    )
    document = put(parsed(TEXT), ("converter", "options", "groups"), groups)
    return judge(json.dumps(document))


@KINDS.add
def odd_characters(case: Case) -> Outcome:
    """Anything anywhere."""
    odd = st.sampled_from("\0\x01\x1b\x7f\x85\ufeff\u202e\ufffe\U0010ffff&*!|>%@`\"'#,[]{}?:-\t\\")
    at = case.number(0, len(TEXT), "at")
    return judge(TEXT[:at] + case.draw(st.text(odd, min_size=1, max_size=3), "text") + TEXT[at:])


@KINDS.add
def long_texts(case: Case) -> Outcome:
    where = case.one_of(["comment", "key", "value", "path", "line"], "where")
    long = "x" * case.one_of([5000, 200_000], "characters")
    if where == "comment":
        return judge(f"# {long}\n{TEXT}", same=True)
    text = {
        "key": f"{TEXT}{long}: 1\n",
        "value": TEXT.replace("recd.ikjt", long),
        "path": TEXT.replace("path: table", f"path: {long}"),
        "line": TEXT.replace("[user, items]", f"[user, items{', items' * (len(long) // 50)}]"),
    }[where]
    return judge(text, refuse=where != "line")


@KINDS.add
def no_registry_at_all(case: Case) -> Outcome:
    content = case.one_of(
        [
            b"",
            b"\n",
            b"#\n",
            b"null",
            b"[]",
            b"1",
            b"---\n...\n",
            b"PAR1",
            bytes(99),
            b"\xff\xfe",
            b"text",
            b"a: b: c",
            b"{",
            b"&a",
            b"*a",
            b"%",
        ]
    )
    return judge(content, refuse=True)


@KINDS.add
def no_file_at_all(case: Case) -> Outcome:
    what = case.one_of(["folder", "missing", "long", "link", "nul"], "what")
    path = {"long": "x" * 400 + ".yaml", "nul": "a\0b"}.get(what, "registry.yaml")
    if what == "folder":
        Path(path).mkdir()
    elif what == "link":
        Path(path).symlink_to(path)
    command = case.one_of(["validate", "run", "plan", "simulate"], "command")
    if what == "nul" and command != "validate":
        command = "validate"
    return recd(command, path).refused()


test_registry_values = KINDS.test()

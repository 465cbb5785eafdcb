"""Registry files that are damaged, or written by somebody who knows another YAML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Done, Outcome, recd, wrong

KINDS = Kinds("registry")

TEXT = """\
# A comment.
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: table
    prefetch: 0
    sparse: [user, items]
converter:
  use: recd.ikjt
  options:
    groups:
      - [user]
      - [items]
preprocessing:
  - use: recd.sigrid_hash
    features: ["*"]
    options: {buckets: 40}
pooling:
  - use: recd.mean
    features: [items]
sharding:
  - use: torchrec.row_wise
    tables: ["t_*"]
model:
  embedding_dim: 4
  num_embeddings: 40
  bottom_mlp: [4]
  top_mlp: [4]
training:
  batch_size: 8
  steps: 3
  learning_rate: 0.5
  seed: 7
  device: cpu
"""
Path_ = tuple[str | int, ...]


def parsed(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Where the scalars of a document are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        if isinstance(each, (dict, list)):
            yield from leaves(each, (*path, key))
        else:
            yield (*path, key)


def put(document: Any, path: Path_, value: Any) -> Any:
    """The document with another value at a place; an Ellipsis removes what is there."""
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


def judge(content: str | bytes, *, refuse: bool = False, same: bool = False) -> Outcome:
    """Refused; or it trains as what it says, written as JSON, does.

    Args:
        content: of the file.
        refuse: it cannot be anything that trains.
        same: it says what ``TEXT`` says.
    """
    tables.write_two()
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    Path("registry.yaml").write_bytes(data)
    checked = recd("validate", "registry.yaml")
    found = tables.losses()
    if isinstance(found, Done):
        if same:
            wrong(f"what says the same is refused: {found.output}")
        if not checked.ok:
            checked.refused("registry.yaml")
        return found.refused()
    if refuse:
        wrong(f"trained to {found} with {content[:300]!r}")
    if not checked.ok:
        wrong(f"trained what validate refuses: {checked.output}")
    try:
        document = parsed(data.decode("utf-8-sig"))
    except (YAMLError, UnicodeDecodeError) as error:
        wrong(f"trained what is no YAML: {error}")
    steps = (document.get("training") or {}).get("steps")
    size = (document.get("training") or {}).get("batch_size", 512)
    if len(found) != min(steps or 1 << 30, tables.ROWS // size):
        wrong(f"{len(found)} steps with {document['training']}")
    meant = _meant(document)
    if found != meant or (same and document != parsed(TEXT)):
        wrong(f"losses {found}, not {meant}")
    return Outcome.RIGHT


def _meant(document: Any) -> list[float] | Done:
    Path("meant.yaml").write_text(json.dumps(document, default=str), encoding="utf-8")
    return tables.losses("meant.yaml")


def lines() -> list[str]:
    return TEXT.splitlines(keepends=True)


@KINDS.add
def flipped_bits(case: Case) -> Outcome:
    data = bytearray(TEXT.encode())
    for _ in range(case.number(1, 3, "flips")):
        data[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
    return judge(bytes(data))


@KINDS.add
def cut_off(case: Case) -> Outcome:
    return judge(TEXT[: case.number(0, len(TEXT) - 2, "characters")])


@KINDS.add
def lines_left_out(case: Case) -> Outcome:
    kept = lines()
    for _ in range(case.number(1, 3, "lines")):
        del kept[case.number(0, len(kept) - 1, "line")]
    return judge("".join(kept))


@KINDS.add
def a_line_twice(case: Case) -> Outcome:
    at = case.number(0, len(lines()) - 1, "line")
    return judge("".join([*lines()[: at + 1], *lines()[at:]]))


@KINDS.add
def a_line_indented(case: Case) -> Outcome:
    given = lines()
    at = case.number(0, len(given) - 1, "line")
    by = case.number(-3, 5, "columns")
    given[at] = given[at][-by:] if by < 0 else " " * by + given[at]
    return judge("".join(given))


@KINDS.add
def tabs(case: Case) -> Outcome:
    given = lines()
    at = case.one_of([at for at, line in enumerate(given) if line.startswith(" ")], "line")
    given[at] = given[at].replace("  ", "\t", 1)
    return judge("".join(given))


@KINDS.add
def two_lines_swapped(case: Case) -> Outcome:
    given = lines()
    one, two = case.number(0, len(given) - 1, "one"), case.number(0, len(given) - 1, "two")
    given[one], given[two] = given[two], given[one]
    return judge("".join(given))


@KINDS.add
def sections_in_another_order(case: Case) -> Outcome:
    document = parsed(TEXT)
    order = case.draw(st.permutations(list(document)), "order")
    return judge("".join(f"{key}: {json.dumps(document[key])}\n" for key in order), same=True)


@KINDS.add
def another_encoding(case: Case) -> Outcome:
    encoding = case.one_of(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp037", "utf-7"])
    if encoding == "utf-7":
        return judge(TEXT.encode("utf-7"))
    return judge(TEXT.encode(encoding))


@KINDS.add
def other_line_ends(case: Case) -> Outcome:
    end = case.one_of(["\r\n", "\r", "\n\n", "\n\r\n", " \n", "\x85", "\u2028", "\x0b"], "end")
    same = end not in ("\x85", "\u2028", "\x0b")
    return judge(TEXT.replace("\n", end).encode(), same=same)


@KINDS.add
def another_style(case: Case) -> Outcome:
    document = parsed(TEXT)
    style = case.one_of(["json", "json in lines", "start and end", "quoted", "comments"])
    text = {
        "json": json.dumps(document),
        "json in lines": json.dumps(document, indent=3),
        "start and end": f"---\n{TEXT}...\n",
        "quoted": TEXT.replace("use:", '"use":').replace("recd.ikjt", "'recd.ikjt'"),
        "comments": TEXT.replace("\n", " # use: nothing\n"),
    }[style]
    return judge(text, same=True)


@KINDS.add
def several_documents(case: Case) -> Outcome:
    other = case.one_of(["", "a: 1\n", TEXT, "- 1\n", "null\n"], "other")
    return judge(case.one_of([f"{TEXT}---\n{other}", f"{other}\n---\n{TEXT}"]))


@KINDS.add
def directives_and_tags(case: Case) -> Outcome:
    text = case.one_of(
        [
            "%YAML 1.1\n---\n" + TEXT,
            "%YAML 9.9\n---\n" + TEXT,
            "%TAG ! tag:x,2000:\n---\n" + TEXT,
            TEXT.replace("steps: 3", "steps: !!int '3'"),
            TEXT.replace("steps: 3", "steps: !!float 3"),
            TEXT.replace("use: recd.ikjt", "use: !!python/name:os.system recd.ikjt"),
            TEXT.replace("path: table", "path: !!python/object/apply:os.getcwd []"),
            TEXT.replace("path: table", "path: !!binary dGFibGU="),
            TEXT.replace("[4]", "!!set {4}", 1),
            TEXT.replace("seed: 7", "seed: !local 7"),
            TEXT.replace("dataset:", "dataset: !!omap", 1),
        ]
    )
    return judge(text)


@KINDS.add
def anchors_and_aliases(case: Case) -> Outcome:
    text, same = case.one_of(
        [
            (TEXT.replace("[4]", "&mlp [4]", 1).replace("top_mlp: [4]", "top_mlp: *mlp"), True),
            (TEXT.replace("path: table", "path: &here table"), True),
            (TEXT.replace("path: table", "path: *nowhere"), False),
            (TEXT.replace("[4]", "&a [*a]", 1), False),
            (TEXT.replace("model:\n", "model: &model\n").replace("seed: 7", "<<: *model"), False),
            (TEXT.replace("seed: 7", "<<: {seed: 7}"), False),
            (TEXT.replace("seed: 7", "<<: [{seed: 7}, {seed: 8}]"), False),
            (TEXT.replace("seed: 7", '"<<": 7'), False),
            (TEXT.replace("seed: 7", "seed: &x 7\n  &x epochs: 1"), False),
        ]
    )
    return judge(text, same=same)


@KINDS.add
def nested_deeply(case: Case) -> Outcome:
    depth = case.one_of([50, 500, 5000], "depth")
    opening, closing = case.one_of([("[", "]"), ("{a: ", "}"), ("- ", "")], "of")
    where = case.one_of(["sparse", "top", "key"], "at")
    deep = opening * depth + "1" + closing * depth
    if opening == "- ":
        deep = (
            "\n"
            + "".join("  " * at + "-\n" for at in range(2, depth + 2))
            + "  " * (depth + 2)
            + "1"
        )
    if where == "sparse":
        return judge(TEXT.replace("[user, items]", deep), refuse=True)
    if where == "key":
        return judge(f"{TEXT}? {deep}\n: 1\n", refuse=True)
    return judge(f"{TEXT}extra: {deep}\n", refuse=True)


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


test_registry = KINDS.test()

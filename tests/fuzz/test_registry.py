"""Registry files whose text is damaged or written otherwise, and values that are none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tests.fuzz import tables
from tests.fuzz.cases import Case, Done, fuzz, json_values, recd, wrong

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
Place = tuple[str | int, ...]


def parsed(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def leaves(value: Any, path: Place = ()) -> Iterator[Place]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        if isinstance(each, (dict, list)):
            yield from leaves(each, (*path, key))
        else:
            yield (*path, key)


def put(document: Any, path: Place, value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


def judge(content: str | bytes, *, refuse: bool = False, same: bool = False) -> None:
    """Refused, or it trains as the same document in JSON does; ``same``: as ``TEXT`` does."""
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
        found.refused()
        return
    if refuse:
        wrong(f"trained to {found} with {content[:300]!r}")
    if not checked.ok:
        wrong(f"trained what validate refuses: {checked.output}")
    try:
        document = parsed(data.decode("utf-8-sig"))
    except (YAMLError, UnicodeDecodeError) as error:
        wrong(f"trained what is no YAML: {error}")
    training = document.get("training") or {}
    if len(found) != min(
        training.get("steps") or 1 << 30, tables.ROWS // training.get("batch_size", 512)
    ):
        wrong(f"{len(found)} steps with {document['training']}")
    Path("meant.yaml").write_text(json.dumps(document, default=str), encoding="utf-8")
    meant = tables.losses("meant.yaml")
    if found != meant or (same and document != parsed(TEXT)):
        wrong(f"losses {found}, not {meant}")


@fuzz
def test_damaged_bytes(case: Case) -> None:
    judge(case.damaged(TEXT.encode()))


@fuzz
def test_damaged_lines(case: Case) -> None:
    given = TEXT.splitlines(keepends=True)
    at, other = case.number(0, len(given) - 1, "line"), case.number(0, len(given) - 1, "other")
    how = case.one_of(["out", "twice", "less", "more", "tab", "swap"], "how")
    if how == "swap":
        given[at], given[other] = given[other], given[at]
    else:
        spaces = " " * case.number(1, 5, "columns")
        given[at] = {
            "out": "",
            "twice": given[at] * 2,
            "less": given[at].removeprefix("  "),
            "more": spaces + given[at],
            "tab": given[at].replace("  ", "\t", 1),
        }[how]
    judge("".join(given))


@fuzz
def test_the_same_in_another_form(case: Case) -> None:
    document = parsed(TEXT)
    order = case.draw(st.permutations(list(document)), "order")
    text = case.one_of(
        [
            "".join(f"{key}: {json.dumps(document[key])}\n" for key in order),
            json.dumps(document),
            json.dumps(document, indent=3),
            f"---\n{TEXT}...\n",
            TEXT.replace("use:", '"use":').replace("recd.ikjt", "'recd.ikjt'"),
            TEXT.replace("\n", " # use: nothing\n"),
            *(TEXT.replace("\n", end) for end in ("\r\n", "\r", "\n\n", "\n\r\n", " \n")),
            TEXT.replace("[4]", "&mlp [4]", 1).replace("top_mlp: [4]", "top_mlp: *mlp"),
            TEXT.replace("path: table", "path: &here table"),
            f"# {'x' * 200_000}\n{TEXT}",
        ]
    )
    judge(text.encode(), same=True)


@fuzz
def test_a_value_of_another_type(case: Case) -> None:
    document = parsed(TEXT)
    path = case.one_of(list(leaves(document)), "place")
    inner: Any = document
    for key in path:
        inner = inner[key]
    is_number = isinstance(inner, (int, float))
    near = st.sampled_from([inner + 0.25, -inner, str(inner)] if is_number else [3, [inner]])
    value = case.draw((near | json_values).filter(lambda each: each != inner), "value")
    refuse = is_number and isinstance(value, (bool, str, list, dict))
    text = json.dumps(put(document, path, value)).replace("Infinity", ".inf").replace("NaN", ".nan")
    judge(text, refuse=refuse or (isinstance(inner, int) and value == inner + 0.25))


@fuzz
def test_other_keys(case: Case) -> None:
    document = parsed(TEXT)
    paths = [path for path in leaves(document) if isinstance(path[-1], str)]
    path = case.one_of([*paths, *((section,) for section in document)], "key")
    if case.flag("one more"):
        key = case.one_of(
            ["extra", "use2", "Use", "x-use", "1", "null", "", "model_fields"], "name"
        )
        judge(json.dumps(put(document, (*path[:-1], key), case.draw(json_values))), refuse=True)
        return
    change: Callable[[str], str] = case.one_of(
        [
            *(str.upper, str.title, lambda key: key + " ", lambda key: " " + key),
            *(lambda key: key + "s", lambda key: key.replace("_", "-") + "_"),
            *(lambda key: key.replace("e", "е"), lambda key: key + "\u200b"),
            *(lambda key: key + "\0", lambda key: "", lambda key: "__class__"),
        ],
        "change",
    )
    inner = document
    for key in path:
        inner = inner[key]
    new = (*path[:-1], change(str(path[-1])))
    judge(json.dumps(put(put(document, path, ...), new, inner)), refuse=True)

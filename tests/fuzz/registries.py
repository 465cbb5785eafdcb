"""A registry file, and what becomes of one that is not as it should be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tests.fuzz import tables
from tests.fuzz.oracle import Done, Outcome, recd, wrong

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

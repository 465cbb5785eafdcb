"""Names that tables had in checkpoints of earlier versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from recd_plugins.training.checkpoint_files.metadata import Contents

# Where models of two towers, and the one of the page of models, had their replicated tables.
_COPIES = re.compile(r"(^|\.)copies(\.embedding_bags\.)")
_MODEL = "model."


def as_named_now(contents: Contents, names: Callable[[], Iterable[str]]) -> Contents:
    """What a checkpoint holds, with replicated tables under the names that the model has for them.

    As it is where that is not what differs: a model may have tables in ``copies`` today.

    Args:
        contents: of the checkpoint.
        names: gives the model's parameters, as checkpoints name them; asked where there are such
            tables alone.
    """
    entries = contents.entries
    new = {name: _COPIES.sub(r"\1bags\2", name) for name in entries}
    tables = [name for name in entries if name.startswith(_MODEL) and new[name] != name]
    if not tables:
        return contents
    known = {f"{_MODEL}{name}" for name in names()}
    if any(name in known or new[name] not in known - entries.keys() for name in tables):
        return contents
    return Contents(
        {new[name]: entry for name, entry in entries.items()},
        {(new[name], at, number): place for (name, at, number), place in contents.places.items()},
    )

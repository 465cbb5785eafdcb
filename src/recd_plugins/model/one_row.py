"""Models whose tables have one row each, to count on what a model of any size computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from torch import nn

from recd_plugins.model.made_collections import collections_made_by


def one_row_tables() -> AbstractContextManager[None]:
    """A context in which TorchRec's collections are made with one row a table, whoever makes them.

    A module that exists cannot be made smaller: it may take more memory than there is.
    """
    return collections_made_by(_with_one_row)


def _with_one_row(
    _: type[nn.Module],
    init: Callable[..., None],
    module: nn.Module,
    tables: list[Any],
    *args: Any,
    **options: Any,
) -> None:
    small = [copy(table) for table in tables]
    for table in small:
        table.num_embeddings = 1
    init(module, small, *args, **options)

"""Ranks all items, or sampled ones, for each positive row of the test split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from recd_plugin_ranking.items import Items, is_positive, item_of_rows, lists_of
from recd_plugin_ranking.metrics import figures, means
from recd_plugins.api import (
    DataError,
    ModelInput,
    RecdError,
    Rows,
    RunConfig,
    file_utils,
    lower,
    row_pipelines,
    row_tables,
    trained_models,
)

#: Files of item and user vectors.
VECTORS = ("items.parquet", "users.parquet")
_QUERIES = 256


@dataclass(frozen=True)
class Rules:
    """Options of ``recd rank``; the fields have the names of the command line options."""

    item: str
    user: str | None
    seen: Sequence[str]
    most: Sequence[int]
    sampled: int | None
    seed: int


def rank(
    registry: RunConfig, rules: Rules, checkpoint: Path, vectors_to: Path | None = None
) -> dict[str, float]:
    """Rank items for each positive test row. Return mean metrics by name and ``num_queries``.

    Writes user and item vectors to folder ``vectors_to``, if given.
    """
    registry.dataset.prepare()
    schema = registry.dataset.schema()
    prepared = trained_models.whole_model(registry, checkpoint)
    module: Any = prepared.model.eval()
    if not (hasattr(module, "user_vectors") and hasattr(module, "item_vectors")):
        raise RecdError(
            f"{registry.path}: the model has no user and item vectors. Use the model "
            "'ranking.sasrec' or 'ranking.two_tower'."
        )
    rules = replace(rules, item=_item(registry, rules, module))
    items = Items.of(registry.dataset, rules.item, [*schema.sparse, *schema.dense, schema.label])
    with torch.no_grad():
        # The converter is fitted to training batches. The batches here have other sizes.
        pipeline = row_pipelines.RowPipeline.of_model(registry, prepared)

        def batch_of(rows: Rows) -> ModelInput:
            return lower(pipeline.batch(rows), prepared.placement)

        vectors = module.item_vectors(batch_of(items.rows.take(np.arange(len(items)))))
        had = _Had(registry, rules, items)
        parts, of_users = [], []
        num_queries = 0
        for rows in _positive(registry, schema.label):
            users = module.user_vectors(batch_of(rows))
            scores = (users @ vectors.T).double().numpy()
            _check_scores(rows, scores, items)
            own = items.places(item_of_rows(rows, rules.item))
            left_out = had.of(rows)
            parts.append(_figures(scores, own, left_out, rules, num_queries))
            num_queries += len(rows)
            of_users.append(_named(rows, rules, users))
    if not num_queries:
        raise RecdError(
            f"{registry.path}: the test split has no positive rows. Check the label and the test "
            "split in dataset.options."
        )
    if vectors_to is not None:
        of_items = pa.table({"item": items.ids, "vector": _column(vectors)})
        items_to, users_to = (vectors_to / name for name in VECTORS)
        with (
            file_utils.new_file(items_to) as items_file,
            file_utils.new_file(users_to) as users_file,
        ):
            pq.write_table(of_items, items_file)
            pq.write_table(pa.concat_tables(of_users), users_file)
    return {**means(parts), "num_queries": num_queries, "num_items": len(items)}


def _check_scores(rows: Rows, scores: NDArray[np.float64], items: Items) -> None:
    """Raise an error if a score ``[Q, C]`` is not finite."""
    if len(wrong := np.argwhere(~np.isfinite(scores))):
        row, place = (int(each) for each in wrong[0])
        raise DataError(
            f"{rows.place_of(row)}: the score of item {items.ids[place]} is "
            f"{scores[row, place]}, so items cannot be ranked. Use another checkpoint."
        )


def _item(registry: RunConfig, rules: Rules, module: Any) -> str:
    """Return the item feature to rank, from option ``item`` or the model."""
    own = getattr(module, "item_feature", "")
    item = rules.item or own
    known = registry.dataset.schema().sparse
    if unknown := {item, rules.user or item, *rules.seen} - set(known):
        raise RecdError(
            f"--item, --user or --seen: the dataset has no sparse feature '{min(unknown)}'. Use "
            f"one of: {', '.join(map(repr, known))}."
        )
    if own and item != own:
        raise RecdError(
            f"--item {item}: the model of {registry.path} ranks the ids of feature {own!r} only. "
            "Remove --item."
        )
    return item


def _named(rows: Rows, rules: Rules, users: torch.Tensor) -> pa.Table:
    """Return a table of user vectors, items, and user ids if ``rules.user`` is set."""
    columns: dict[str, Any] = {}
    if rules.user is not None:
        columns["user"] = pa.array(map(list, _keys(rows, rules.user)), pa.list_(pa.int64()))
    return pa.table({**columns, "item": item_of_rows(rows, rules.item), "vector": _column(users)})


def _figures(
    scores: NDArray[np.float64],
    own: NDArray[np.int64],
    left_out: NDArray[np.bool_],
    rules: Rules,
    first: int,
) -> dict[str, tuple[float, int]]:
    """Return the sum and count of each metric for ``Q`` rows, keyed by metric name.

    Args:
        scores: ``[Q, C]``, the score of each item.
        own: ``[Q]``, index of each row's item, or -1 if it is unknown; then all metrics are 0.
        left_out: bool ``[Q, C]``, items to exclude from the ranking.
        rules: options of the command.
        first: number of the first row, which seeds the sampling of items.
    """
    known = np.flatnonzero(own >= 0)
    ranked = ~left_out
    ranked[known, own[known]] = False
    if rules.sampled is not None:
        for query in range(len(ranked)):
            others = np.flatnonzero(ranked[query])
            drawn = np.random.default_rng([rules.seed, first + query]).choice(
                others, min(rules.sampled, len(others)), replace=False
            )
            ranked[query] = False
            ranked[query, drawn] = True
    labels = np.zeros_like(ranked)
    labels[known, own[known]] = True
    ranked[own < 0] = False
    place, item = np.nonzero(ranked | labels)
    one = np.zeros(1, np.int64)  # keeps all names even without results
    names = figures(one, one.astype(np.float64), np.ones(1, bool), rules.most)
    found = dict.fromkeys(names, (0.0, 0))
    found |= figures(place, scores[place, item], labels[place, item], rules.most)
    missed = len(own) - len(known)
    return {name: (total, count + missed) for name, (total, count) in found.items()}


def _column(vectors: torch.Tensor) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(vectors.flatten().numpy(), vectors.shape[1])


class _Had:
    """Finds the items to exclude from the ranking of a test row.

    These are the items of the user's training rows (``--user``) and of the lists ``--seen``.
    """

    def __init__(self, registry: RunConfig, rules: Rules, items: Items) -> None:
        self._rules, self._items = rules, items
        self._by_user: dict[tuple[int, ...], list[int]] = {}
        if rules.user is not None:
            for rows in row_tables.rows_of_split(registry.dataset, "train"):
                places = items.places(item_of_rows(rows, rules.item)).tolist()
                for user, place in zip(_keys(rows, rules.user), places, strict=True):
                    if user:  # rows without a user id come from many users
                        self._by_user.setdefault(user, []).append(place)

    def of(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the items to exclude for each row, bool ``[rows, C]``."""
        had = np.zeros((len(rows), len(self._items)), bool)
        if self._rules.user is not None:
            for query, user in enumerate(_keys(rows, self._rules.user)):
                had[query, self._by_user.get(user, [])] = True
        for feature in self._rules.seen:
            ids, lengths = lists_of(rows, feature)
            places = self._items.places(ids)
            row = np.repeat(np.arange(len(rows)), lengths)
            had[row[places >= 0], places[places >= 0]] = True
        return had


def _keys(rows: Rows, feature: str) -> Iterator[tuple[int, ...]]:
    ids, lengths = lists_of(rows, feature)
    parts: Any = np.split(ids, np.cumsum(lengths)[:-1])
    return (tuple(part.tolist()) for part in parts)


def _positive(registry: RunConfig, label: str) -> Iterator[Rows]:
    """Yield the positive rows of the test split in batches of ``_QUERIES``."""
    for rows in row_tables.rows_of_split(registry.dataset, "test"):
        table = row_tables.RowTable([rows])
        chosen = np.flatnonzero(is_positive(rows, label))
        for start in range(0, len(chosen), _QUERIES):
            yield table.take(chosen[start : start + _QUERIES])

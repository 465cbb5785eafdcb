"""A loader of plain KeyedJaggedTensors that ``dedup`` wraps, and readers that deduplicate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import recd_plugins
from recd_plugin_recd.benchmarks.tables import Order, Settings, write_tables
from recd_plugin_recd.ikjt import IkjtConverter
from recd_plugin_recd.kjt import KjtConverter
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.api import Rows
from recd_plugins.api.batches import (
    Batch,
    InverseKeyedJaggedTensor,
    Placement,
    lower,
)
from recd_plugins.testing.benchmark import processor_seconds

#: Seconds by side: to read rows, and what each loader makes of them.
Turn = dict[str, float]


def read_turns(folder: Path, num_rows: int, batch_size: int, turns: int) -> list[Turn]:
    """Processor seconds of reading a table of PAPERCAL, in turns after one that warms up.

    ``read`` are the rows of all sides, batch by batch in turn. ``plain`` is a trainer's own loader
    of KeyedJaggedTensors, and ``dedup`` wraps it; ``conversion`` makes IKJTs of the same
    KeyedJaggedTensors and the model's input of these, and ``ikjt`` that of the table's columns.
    """
    tables: dict[str, tuple[Order, Settings]] = {"list": ("clustered", Settings("list", 16_384))}
    path = write_tables(folder, num_rows, tables)["list"]
    dataset = SessionParquet(SessionParquet.Options(path=path, prefetch=0))
    schema = dataset.schema()
    placement = Placement(pooled=schema.sparse)
    kjt, ikjt = KjtConverter(KjtConverter.Options()), IkjtConverter(IkjtConverter.Options())
    reader = partial(dataset.reader, rank=0, world_size=1, batch_size=batch_size, split="train")
    ikjt.fit(next(iter(reader())), schema)
    dedup = recd_plugins.Dedup(_model(schema.sparse))

    def plain(rows: Rows) -> Batch:
        return kjt.convert(rows, schema)

    sides: dict[str, Callable[[Rows], object]] = {
        "plain": plain,
        "dedup": lambda rows: dedup.batch(plain(rows)),
        "conversion": lambda rows: lower(_converted(plain(rows)), placement),
        "ikjt": lambda rows: lower(ikjt.convert(rows, schema), placement),
    }
    found: list[Turn] = []
    for turn in range(turns + 1):
        spent = dict.fromkeys(["read", *sides], 0.0)
        batches = iter(reader())
        for number in count():
            start = time.thread_time()
            rows = next(batches, None)
            spent["read"] += time.thread_time() - start
            if rows is None:
                break
            names = list(sides)
            for place in range(len(names)):  # no side is always the first to see the rows
                name = names[(place + number + turn) % len(names)]
                spent[name] += processor_seconds(sides[name], rows)
        found.append(spent)
    return found[1:]


def _converted(batch: Batch) -> Batch:
    assert batch.kjt is not None, "all features are plain"
    ikjts = InverseKeyedJaggedTensor.from_kjt(batch.kjt, [[key] for key in batch.kjt.keys()])  # noqa: SIM118
    return Batch(batch.dense_features, batch.labels, ikjts=ikjts)


def _model(features: Iterable[str]) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=4, num_embeddings=1, feature_names=[name]
            )
            for name in features
        ],
        device=torch.device("meta"),
    )

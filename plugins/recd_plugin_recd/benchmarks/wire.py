"""Bytes from a reader to a trainer: batches without duplicates against all of their rows.

Every side is the same batches of PAPERCAL, lowered for a model that keeps ``seq_`` features as
sequences, and encoded as readers on other machines send them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from recd_plugin_recd.benchmarks.batches import BATCH_SIZE, SCHEMA, papercal_batches
from recd_plugin_recd.ikjt import IkjtConverter
from recd_plugin_recd.kjt import KjtConverter
from recd_plugin_recd.partial_ikjt import PartialIkjtConverter
from recd_plugins.api import Converter, Rows
from recd_plugins.api.batches import ModelInput, Placement, lower
from recd_plugins.api.ingestion import decode, encode
from recd_plugins.testing.benchmark import Figure, Size, keep_freed_memory, one_thread

SUMMARY = "bytes of a row from reader to trainer, KJT over IKJT"

_BATCHES: dict[Size, int] = {"tiny": 1, "small": 2, "reference": 8}
#: Ids of items repeat by chance, and are as small plain.
_MIN_FACTOR = {"min_dedupe_factor": 2}
_SEQUENCES = tuple(name for name in SCHEMA.sparse if name.startswith("seq_"))
_PLACEMENT = Placement(
    pooled=tuple(name for name in SCHEMA.sparse if name not in _SEQUENCES), sequence=_SEQUENCES
)


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"PAPERCAL, clustered by session, {_BATCHES[size]} batches of {BATCH_SIZE} rows as model "
        "input, processor time of one thread"
    )


@dataclass
class _Sent:
    """Of each batch: bytes, and processor seconds of both ways."""

    size: list[int] = field(default_factory=list)
    encoding: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)

    def add(self, model_input: ModelInput) -> None:
        with one_thread():
            start = time.thread_time()
            buffer = encode(model_input)
            encoded = time.thread_time()
            decode(buffer)
            self.decoding.append(time.thread_time() - encoded)
        self.encoding.append(encoded - start)
        self.size.append(buffer.nbytes)


def run(size: Size) -> list[Figure]:
    """Measure."""
    keep_freed_memory()
    batches = papercal_batches(_BATCHES[size] + 1)
    sent = {
        "kjt": _send(KjtConverter(KjtConverter.Options()), batches),
        "ikjt": _send(IkjtConverter(IkjtConverter.Options.model_validate(_MIN_FACTOR)), batches),
        "partial_ikjt": _send(
            PartialIkjtConverter(PartialIkjtConverter.Options.model_validate(_MIN_FACTOR)), batches
        ),
    }
    return [
        *(
            Figure.of(
                f"wire_bytes_ratio_{name}",
                [all_rows / one for all_rows, one in zip(sent["kjt"].size, side.size, strict=True)],
                unit="x",
                better="higher",
            )
            for name, side in sent.items()
            if name != "kjt"
        ),
        *(
            Figure.of(
                f"{name}_bytes_per_row",
                [each / BATCH_SIZE for each in side.size],
                unit="B",
                better="lower",
            )
            for name, side in sent.items()
        ),
        *(
            Figure.of(
                f"{name}_{what}_us_per_row",
                [each / BATCH_SIZE * 1e6 for each in seconds],
                unit="us",
                better="lower",
            )
            for name, side in sent.items()
            for what, seconds in (("encode", side.encoding), ("decode", side.decoding))
        ),
    ]


def _send(converter: Converter, batches: list[Rows]) -> _Sent:
    """The first batch shows the converter what repeats, and warms up."""
    first, *rest = batches
    converter.fit(first, SCHEMA)
    _Sent().add(lower(converter.convert(first, SCHEMA), _PLACEMENT))
    sent = _Sent()
    for rows in rest:
        sent.add(lower(converter.convert(rows, SCHEMA), _PLACEMENT))
    return sent

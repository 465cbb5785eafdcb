"""A batch in logical form, as converters make it, and as a model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.sparse.index_select import Segments

#: What a batch is made of, in order.
STALL_CAUSES = ("fill", "convert", "preprocess", "transfer")


@dataclass(frozen=True, slots=True)
class MakingTimes:
    """Seconds that one batch took, by part.

    All are wall time of the process that did the part, which does one batch at a time: a reader
    makes a batch every ``total`` seconds.

    Attributes:
        fill: until its rows were there: reading, decompressing, decoding and joining them. Where
            the dataset reads ahead in a thread, only what was left to wait for.
        convert: the converter, and the check of what it made.
        preprocess: the preprocessing steps, and the check of the ids.
        transfer: from the preprocessed batch to the trainer's input: lowering, packing, pinning by
            a thread, and what ``arrival`` says. The way over a network counts where a process
            waits for it.
        arrival: of ``transfer``, what the trainer did itself when it took the batch: unpacking,
            and pinning what no thread has pinned. Of the batches of one block the first has it all.
    """

    fill: float = 0.0
    convert: float = 0.0
    preprocess: float = 0.0
    transfer: float = 0.0
    arrival: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all processes together."""
        return self.fill + self.convert + self.preprocess + self.transfer

    @property
    def reader(self) -> float:
        """Seconds of the process that made it, where that is not the trainer's."""
        return self.total - self.arrival

    def transferred(self, seconds: float) -> MakingTimes:
        """With more transfer, in the process that made it."""
        return replace(self, transfer=self.transfer + seconds)

    def arrived(self, seconds: float) -> MakingTimes:
        """With more transfer, in the trainer's process while it took the batch."""
        return replace(self, transfer=self.transfer + seconds, arrival=self.arrival + seconds)

    def causes_of(self, waited: float) -> tuple[float, ...]:
        """Seconds of a wait for this batch by cause, in the order of ``STALL_CAUSES``; they add up.

        What the trainer's process did itself in that time is known: ``arrival``, which is transfer.
        The rest is waiting for the batch to be made, and each part has the share of it that it has
        of the making. All is transfer where no making times came along.
        """
        arrival = min(self.arrival, waited)
        rest = waited - arrival
        made = self.fill, self.convert, self.preprocess, self.transfer - self.arrival
        total = sum(made)
        if total <= 0:
            return 0.0, 0.0, 0.0, waited
        *first, last = (rest * (part / total) for part in made)
        return (*first, last + arrival)


@dataclass(frozen=True)
class Batch(Pipelineable):
    """One batch of B rows. Every sparse feature stands in it once.

    Attributes:
        dense_features: ``[B, num_dense]``, float32; before preprocessing maybe float64.
        labels: float32 ``[B]``.
        kjt: the features that are not deduplicated, or None where all are.
        ikjts: deduplicated features, one entry a group that shares its inverse lookup.
        partials: features whose rows share ids with the row before.
    """

    dense_features: Tensor
    labels: Tensor
    kjt: KeyedJaggedTensor | None = None
    ikjts: tuple[InverseKeyedJaggedTensor, ...] = ()
    partials: tuple[PartialInverseKeyedJaggedTensor, ...] = ()

    def __post_init__(self) -> None:
        # What yields them is at its end when they are looked at.
        object.__setattr__(self, "ikjts", tuple(self.ikjts))
        object.__setattr__(self, "partials", tuple(self.partials))

    @property
    def batch_size(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return replace(
            self,
            dense_features=self.dense_features.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            kjt=None if self.kjt is None else self.kjt.to(device, non_blocking=non_blocking),
            ikjts=tuple(ikjt.to(device, non_blocking=non_blocking) for ikjt in self.ikjts),
            partials=tuple(part.to(device, non_blocking=non_blocking) for part in self.partials),
        )

    def pin_memory(self) -> Self:
        return replace(
            self,
            dense_features=self.dense_features.pin_memory(),
            labels=self.labels.pin_memory(),
            kjt=None if self.kjt is None else self.kjt.pin_memory(),
            ikjts=tuple(ikjt.pin_memory() for ikjt in self.ikjts),
            partials=tuple(partial.pin_memory() for partial in self.partials),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense_features.record_stream(stream)
        self.labels.record_stream(stream)
        if self.kjt is not None:
            self.kjt.record_stream(stream)
        for ikjt in self.ikjts:
            ikjt.record_stream(stream)
        for partial in self.partials:
            partial.record_stream(stream)


@dataclass(frozen=True)
class Placement:
    """Which features a model pools in which way, each in the order in which the KJT carries it."""

    pooled: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()


class _Noting(dict[str, Tensor]):
    """A dict that notes for which keys it was asked, all of them where it was gone through."""

    def __init__(self, items: Mapping[str, Tensor], asked: set[str]) -> None:
        super().__init__(items)
        self._asked = asked

    def __getitem__(self, key: str) -> Tensor:
        self._asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self._asked.update(self)
        return super().items()

    def values(self) -> Any:
        self._asked.update(self)
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        # The default one asks for every item.
        return type(self), (dict(dict.items(self)), self._asked)


@dataclass(frozen=True)
class ModelInput(Pipelineable):
    """One batch of B rows as the model takes it; the first three names are those of TorchRec's.

    Attributes:
        dense_features: float32 ``[B, num_dense]``.
        sparse_features: pooled features, plain or VBE, or None without any.
        labels: float32 ``[B]``.
        replicated_features: features of data-parallel tables, plain, or None.
        sequence_features: plain KJT over unique rows, or None. Its stride is the largest number of
            unique rows of any group; a group with fewer has empty rows at its end. A feature of a
            partial IKJT has its stored ids in the first row instead.
        num_unique: unique rows by sequence feature.
        inverse_lookup: int64 ``[B]`` by sequence feature: the unique row of each row. A feature
            that is not deduplicated has no entry. Features of one group share one tensor.
        segments: by sequence feature of a partial IKJT: its unique rows among the stored ids.
        groups: how many of the rows belong to which group, as ``Rows`` says.
        making: seconds that it took, by part.
        sessions: int64 ``[B]``, equal where rows are of one session; only where they are asked for.
        taken: sequence features whose unique rows, or whose ``inverse_lookup``, were asked for.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor | None
    labels: Tensor
    replicated_features: KeyedJaggedTensor | None = None
    sequence_features: KeyedJaggedTensor | None = None
    num_unique: Mapping[str, int] = field(default_factory=dict)
    inverse_lookup: Mapping[str, Tensor] = field(default_factory=dict)
    segments: Mapping[str, Segments] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    making: MakingTimes = field(default_factory=MakingTimes)
    sessions: Tensor | None = None
    taken: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        noting = _Noting(self.inverse_lookup, self.taken)
        object.__setattr__(self, "inverse_lookup", noting)

    def check_taken(self) -> None:
        """Refuse a model that took unique rows for rows, once it has had this batch.

        Those of a sequence feature may be as many as the batch has rows, where another feature has
        no duplicates: then no shape is wrong.

        Raises:
            ExactnessError: names the features whose unique rows were not asked for.
        """
        forgotten = [
            feature
            for feature in self.num_unique
            if feature not in self.taken
            and (feature in self.segments or feature in self.inverse_lookup)
        ]
        if forgotten:
            raise ExactnessError(
                f"the model takes no notice of what is deduplicated: it pools the sequence "
                f"features {', '.join(forgotten)} as they come out of the EmbeddingCollection. "
                "Pool batch.unique_rows(feature, output[feature]) and repeat the results with "
                "index_select(0, batch.inverse_lookup[feature]), or use SequencePooling, or leave "
                "the features out of the converter"
            )

    def unique_rows(self, feature: str, embeddings: JaggedTensor) -> JaggedTensor:
        """The unique rows of a sequence feature, for a module that pools rows.

        Args:
            feature: its name.
            embeddings: what an EmbeddingCollection made of it from ``sequence_features``.

        Returns:
            Embeddings of ``num_unique[feature]`` rows.
        """
        self.taken.add(feature)
        if (segments := self.segments.get(feature)) is not None:
            return segments.gather(embeddings.values())
        return JaggedTensor(
            values=embeddings.values(), lengths=embeddings.lengths()[: self.num_unique[feature]]
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._map(lambda value: value.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self._map(lambda value: value.record_stream(stream))
        if self.sparse_features is not None:
            # A KeyedJaggedTensor (torchrec 1.6 to 1.9) leaves these out.
            inverse_indices = self.sparse_features.inverse_indices_or_none()
            if inverse_indices is not None:
                inverse_indices[1].record_stream(stream)

    def _map(self, function: Any) -> Self:
        """Apply ``function`` to every tensor, to a shared one once."""
        done: dict[int, Any] = {}

        def once(value: Any) -> Any:
            if id(value) not in done:
                done[id(value)] = function(value)
            return done[id(value)]

        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if not item.init:
                continue
            if item.name in ("num_unique", "groups", "making") or value is None:
                changed[item.name] = value
            elif isinstance(value, Mapping):
                items = dict.items(value) if isinstance(value, _Noting) else value.items()
                changed[item.name] = {key: once(tensor) for key, tensor in items}
            else:
                changed[item.name] = once(value)
        return type(self)(**changed)

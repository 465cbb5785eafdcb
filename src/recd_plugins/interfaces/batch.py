"""``Batch``, the output of converters, and ``ModelInput``, the input of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.index_select import Segments
from recd_plugins.sparse.jagged import MeasuredRows
from recd_plugins.sparse.one_buffer import has_known_tensors, map_tensors, move, pack
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor
from recd_plugins.sparse.request_rows import RequestRows

#: Parts of the time to produce a batch, in order.
STALL_CAUSES = ("fill", "convert", "preprocess", "transfer")


@dataclass(frozen=True, slots=True)
class MakingTimes:
    """Wall-clock seconds to produce one batch, split into four stages.

    Attributes:
        fill: reading, decompressing, decoding and joining rows.
        convert: the converter and the check of its result.
        preprocess: preprocessing and the check of ids.
        transfer: building the ``ModelInput``, serialization, pinning, and ``arrival``.
        arrival: the part of ``transfer`` in the training process, for deserialization and pinning.
            Batches arrive in blocks. The first batch of a block has the time of its block.
    """

    fill: float = 0.0
    convert: float = 0.0
    preprocess: float = 0.0
    transfer: float = 0.0
    arrival: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all stages. ``arrival`` is a part of ``transfer`` and not added again."""
        return self.fill + self.convert + self.preprocess + self.transfer

    @property
    def reader(self) -> float:
        """Seconds to produce the batch in the reader process: ``total`` minus ``arrival``."""
        return self.total - self.arrival

    def arrived(self, seconds: float) -> MakingTimes:
        """Return a copy with ``seconds`` of the training process added to ``transfer``."""
        return replace(self, transfer=self.transfer + seconds, arrival=self.arrival + seconds)

    def causes_of(self, waited: float) -> tuple[float, ...]:
        """Split ``waited`` seconds of waiting for this batch into the times of ``STALL_CAUSES``.

        The first ``arrival`` seconds count as transfer. All other seconds are divided in proportion
        to the times of the stages in the reader process.
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
class Batch:
    """Batch of B rows. Each sparse feature is in exactly one of the jagged tensors.

    Attributes:
        dense_features: float32 ``[B, num_dense]``; can be float64 before preprocessing.
        labels: float32 ``[B]``. With T tasks ``[B, T]``, NaN where a row has no label.
        kjt: features without deduplication, or None.
        ikjts: deduplicated features, one InverseKeyedJaggedTensor per group of features.
        partials: partially deduplicated features, whose rows share ids.
        user_features: deduplicated features that repeat for all candidates of a request, such as
            the user's id and history.
        user_dense_columns: columns of ``dense_features`` that repeat in the same way.
    """

    dense_features: Tensor
    labels: Tensor
    kjt: KeyedJaggedTensor | None = None
    ikjts: tuple[InverseKeyedJaggedTensor, ...] = ()
    partials: tuple[PartialInverseKeyedJaggedTensor, ...] = ()
    user_features: tuple[str, ...] = ()
    user_dense_columns: tuple[int, ...] = ()

    @property
    def batch_size(self) -> int:
        return self.labels.shape[0]


@dataclass(frozen=True)
class Placement:
    """Names of the features in each KeyedJaggedTensor of a ModelInput, in order."""

    pooled: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()


class _Noting(dict[str, Tensor]):
    """A dict that records which keys were read."""

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
        # The default reads every item.
        return type(self), (dict(dict.items(self)), self._asked)


@dataclass(frozen=True)
class ModelInput(Pipelineable):
    """Batch of B rows for the model.

    Attributes:
        dense_features: float32 ``[B, num_dense]``.
        sparse_features: KJT of pooled features, with one or several batch sizes (VBE), or None.
        labels: float32 ``[B]``. With T tasks ``[B, T]``, NaN where a row has no label.
        replicated_features: KJT of the features of data-parallel tables, or None.
        sequence_features: plain KJT over unique rows, or None. Its stride is the largest number of
            unique rows of any feature; other features are padded with empty rows. A partially
            deduplicated feature has all its stored ids in the first row.
        num_unique: maps each sequence feature to its number of unique rows.
        inverse_lookup: maps each deduplicated sequence feature to the unique row of each batch
            row, int64 ``[B]``.
        segments: maps each partially deduplicated sequence feature to the position of its unique
            rows among the stored ids.
        longest: maps sequence features to the length of their longest row, or to an upper bound.
            Without it, CUDA kernels of variable length wait for the device.
        making: seconds to produce the batch, per stage.
        sessions: int64 ``[B]``, session id of each row, if requested.
        request: runs of rows with the same user features; None without deduplicated features.
        taken: sequence features for which the model read unique rows or ``inverse_lookup``.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor | None
    labels: Tensor
    replicated_features: KeyedJaggedTensor | None = None
    sequence_features: KeyedJaggedTensor | None = None
    num_unique: Mapping[str, int] = field(default_factory=dict)
    inverse_lookup: Mapping[str, Tensor] = field(default_factory=dict)
    segments: Mapping[str, Segments] = field(default_factory=dict)
    longest: Mapping[str, int] = field(default_factory=dict)
    making: MakingTimes = field(default_factory=MakingTimes)
    sessions: Tensor | None = None
    request: RequestRows | None = None
    taken: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        noting = _Noting(self.inverse_lookup, self.taken)
        object.__setattr__(self, "inverse_lookup", noting)

    def check_taken(self) -> None:
        """Check after a forward pass that the model expanded unique rows to batch rows.

        Raises:
            ExactnessError: the model did not read the unique rows of some features.
        """
        forgotten = [
            feature
            for feature in self.num_unique
            if feature not in self.taken
            and (feature in self.segments or feature in self.inverse_lookup)
        ]
        if forgotten:
            raise ExactnessError(
                "the model ignores deduplication of the features "
                f"{', '.join(map(repr, forgotten))} and pools the output of the "
                "EmbeddingCollection directly. Pool batch.unique_rows(feature, output[feature]) "
                "and repeat the results with index_select(0, batch.inverse_lookup[feature]). Or "
                "use SequencePooling, or remove the features from the converter"
            )

    def unique_rows(
        self, feature: str, embeddings: JaggedTensor, keep_empty: bool = False
    ) -> JaggedTensor:
        """Return a sequence feature's embeddings without padding, for its unique rows only.

        Args:
            feature: name of the feature.
            embeddings: output of an EmbeddingCollection for ``sequence_features``.
            keep_empty: keep the empty rows after the unique rows, so that most features have the
                same number of rows.
        """
        self.taken.add(feature)
        longest = self.longest.get(feature)
        if (segments := self.segments.get(feature)) is not None:
            rows = segments.gather(embeddings.values())
            return MeasuredRows(rows.values(), rows.lengths(), longest)
        lengths = embeddings.lengths()
        if not keep_empty:
            lengths = lengths[: self.num_unique[feature]]
        return MeasuredRows(embeddings.values(), lengths, longest)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return a copy on ``device``. After ``pin_memory``, all tensors move in one copy."""

        def moved(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking)

        if device.type == "cuda":
            tensors = self._tensors()
            copies = move(list(tensors.values()), device, non_blocking=non_blocking)
            if copies is not None:
                return self._with(dict(zip(tensors, copies, strict=True)), moved)
        return self._map(moved)

    def pin_memory(self) -> Self:
        """Return a copy with all tensors in one buffer of pinned memory."""
        if self.labels.is_pinned():
            return self
        tensors = self._tensors()
        copies = pack(list(tensors.values()), pin_memory=True)
        return self._with(dict(zip(tensors, copies, strict=True)), lambda value: value.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        # Streams are recorded per storage.
        tensors = {t.untyped_storage().data_ptr(): t for t in self._tensors().values()}
        for tensor in tensors.values():
            tensor.record_stream(stream)
        self._with({}, lambda value: value.record_stream(stream))

    def _tensors(self) -> dict[int, Tensor]:
        """Return all tensors in values of known types, keyed by their Python id."""
        found: dict[int, Tensor] = {}

        def add(tensor: Tensor) -> Tensor:
            return found.setdefault(id(tensor), tensor)

        self._map(lambda value: map_tensors(value, add))
        return found

    def _with(self, tensors: Mapping[int, Tensor], otherwise: Callable[[Any], Any]) -> Self:
        """Replace tensors by id, and values of unknown types by ``otherwise(value)``."""

        def replaced(tensor: Tensor) -> Tensor:
            return tensors.get(id(tensor), tensor)

        def changed(value: Any) -> Any:
            known = has_known_tensors(value)
            return map_tensors(value, replaced) if known else otherwise(value)

        return self._map(changed)

    def _map(self, function: Callable[[Any], Any]) -> Self:
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
            if item.name in ("num_unique", "longest", "making") or value is None:
                changed[item.name] = value
            elif isinstance(value, Mapping):
                items = dict.items(value) if isinstance(value, _Noting) else value.items()
                changed[item.name] = {key: once(tensor) for key, tensor in items}
            else:
                changed[item.name] = once(value)
        return type(self)(**changed)

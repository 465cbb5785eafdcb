"""The last step before the model: features in the form that TorchRec's modules take exactly.

Three forms are exact on every back end (docs/exactness.md):

- pooled features go to an EmbeddingBagCollection as a KJT with variable batch per feature (VBE):
  only unique rows are sent and looked up, and TorchRec expands after its output all-to-all;
- replicated features go to a data-parallel EmbeddingBagCollection, whose kernels take no VBE, as a
  plain KJT of all B rows;
- sequence features go to an EmbeddingCollection as a plain KJT *over unique rows*; the model pools
  those rows and then repeats the vectors with ``inverse_lookup``.

Of a partial IKJT, a sequence feature goes there as one row of its stored ids, so that an id which
rows share is looked up once; ``ModelInput.unique_rows`` then takes the unique rows out of the
embeddings. Modules that pool have no use for shared ids: pooled and replicated features become
exact IKJTs first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recd_plugins.data.batch import Batch
from recd_plugins.data.stalls import MakingTimes
from recd_plugins.errors import DataError, ExactnessError
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.sparse.index_select import jagged_index_select
from recd_plugins.sparse.jagged import runs_of_equal_rows
from recd_plugins.sparse.stretches import Stretches


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
        stretches: by sequence feature of a partial IKJT: its unique rows among the stored ids.
        groups: how many of the rows belong to which group, as ``Rows`` says.
        making: seconds that it took, by part.
        taken: sequence features whose unique rows, or whose ``inverse_lookup``, were asked for.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor | None
    labels: Tensor
    replicated_features: KeyedJaggedTensor | None = None
    sequence_features: KeyedJaggedTensor | None = None
    num_unique: Mapping[str, int] = field(default_factory=dict)
    inverse_lookup: Mapping[str, Tensor] = field(default_factory=dict)
    stretches: Mapping[str, Stretches] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    making: MakingTimes = field(default_factory=MakingTimes)
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
            and (feature in self.stretches or feature in self.inverse_lookup)
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
        if (stretches := self.stretches.get(feature)) is not None:
            return stretches.gather(embeddings.values())
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


@dataclass(frozen=True)
class _Feature:
    """One feature over the rows that are kept, ``inverse`` None where those are all B rows.

    With ``stretches``, ``jagged`` has one row: the ids that these are stretches of.
    """

    jagged: JaggedTensor
    num_rows: int
    inverse: Tensor | None
    stretches: Stretches | None = None

    def expanded(self) -> JaggedTensor:
        """All B rows."""
        if self.inverse is None:
            return self.jagged
        return jagged_index_select(self.jagged, self.inverse)


def lower(batch: Batch, placement: Placement) -> ModelInput:
    """Sort the features of ``batch`` into the three forms of this module.

    Raises:
        KeyError: the placement names a feature that the batch lacks.
        DataError: of features that are placed together, some have weights and some have none.
    """
    features = dict(_split(batch))
    features |= _exact(batch.partials, {*placement.pooled, *placement.replicated})
    sequences = features | dict(_stored(batch.partials, set(placement.sequence)))
    sequence = [sequences[name] for name in placement.sequence]
    return ModelInput(
        dense_features=batch.dense_features,
        sparse_features=_variable_batch_kjt(placement.pooled, features, batch.batch_size),
        labels=batch.labels,
        replicated_features=_plain_kjt(
            placement.replicated,
            [features[name].expanded() for name in placement.replicated],
            batch.batch_size,
        ),
        sequence_features=_plain_kjt(
            placement.sequence,
            [feature.jagged for feature in sequence],
            max((feature.jagged.lengths().numel() for feature in sequence), default=0),
        ),
        num_unique={name: sequences[name].num_rows for name in placement.sequence},
        inverse_lookup={
            name: inverse
            for name in placement.sequence
            if (inverse := sequences[name].inverse) is not None
        },
        stretches={
            name: stretches
            for name in placement.sequence
            if (stretches := sequences[name].stretches) is not None
        },
    )


def _split(batch: Batch) -> Iterable[tuple[str, _Feature]]:
    if batch.kjt is not None:
        for key, jagged in batch.kjt.to_dict().items():
            yield key, _Feature(jagged, batch.batch_size, None)
    for ikjt in batch.ikjts:
        yield from _split_ikjt(ikjt)


def _split_ikjt(ikjt: InverseKeyedJaggedTensor) -> Iterable[tuple[str, _Feature]]:
    inverse = ikjt.inverse_lookup().long()
    for key, jagged in ikjt.to_unique_kjt().to_dict().items():
        yield key, _Feature(jagged, ikjt.num_unique(), inverse)


def _exact(
    partials: Sequence[PartialInverseKeyedJaggedTensor], names: set[str]
) -> dict[str, _Feature]:
    """Features of partial IKJTs over unique rows."""
    return {
        key: feature
        for partial in partials
        for ikjt in partial.to_ikjt([[key] for key in partial.keys() if key in names])  # noqa: SIM118
        for key, feature in _split_ikjt(ikjt)
    }


def _stored(
    partials: Sequence[PartialInverseKeyedJaggedTensor], names: set[str]
) -> Iterable[tuple[str, _Feature]]:
    """Features of partial IKJTs as one row of stored ids."""
    for partial in partials:
        for key, values, offsets, lengths in partial.split():
            if key not in names:
                continue
            first_rows, inverse = runs_of_equal_rows([offsets, lengths])
            kept = lengths.index_select(0, first_rows)
            stretches = Stretches(offsets.index_select(0, first_rows), kept, int(kept.sum()))
            stored = JaggedTensor(values, lengths=lengths.new_tensor([values.numel()]))
            yield key, _Feature(stored, first_rows.numel(), inverse, stretches)


def _variable_batch_kjt(
    names: Sequence[str], features: Mapping[str, _Feature], batch_size: int
) -> KeyedJaggedTensor | None:
    """One KJT in which each feature has its own number of rows; plain where none is shared."""
    chosen = [features[name] for name in names]
    if all(feature.inverse is None for feature in chosen):
        return _plain_kjt(names, [feature.jagged for feature in chosen], batch_size)
    every_row = torch.arange(batch_size, device=chosen[0].jagged.values().device)
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.cat([feature.jagged.values() for feature in chosen]),
        lengths=torch.cat([feature.jagged.lengths() for feature in chosen]),
        weights=_weights(names, [feature.jagged for feature in chosen]),
        stride_per_key_per_rank=[[feature.num_rows] for feature in chosen],
        # Known here; asked of tensors on a device it would wait for them.
        length_per_key=[feature.jagged.values().numel() for feature in chosen],
        inverse_indices=(
            list(names),
            torch.stack(
                [every_row if feature.inverse is None else feature.inverse for feature in chosen]
            ),
        ),
    )


def _plain_kjt(
    names: Sequence[str], features: Sequence[JaggedTensor], stride: int
) -> KeyedJaggedTensor | None:
    """One KJT with ``stride`` rows a key; shorter features get empty rows at their end."""
    if not names:
        return None
    lengths = []
    for feature in features:
        missing = stride - feature.lengths().numel()
        lengths.append(feature.lengths())
        if missing:
            lengths.append(feature.lengths().new_zeros(missing))
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.cat([feature.values() for feature in features]),
        lengths=torch.cat(lengths),
        weights=_weights(names, features),
        stride=stride,
        length_per_key=[feature.values().numel() for feature in features],
    )


def _weights(names: Sequence[str], features: Sequence[JaggedTensor]) -> Tensor | None:
    weights = {
        name: weight
        for name, feature in zip(names, features, strict=True)
        if (weight := feature.weights_or_none()) is not None
    }
    if not weights:
        return None
    without = [name for name in names if name not in weights]
    if without:
        raise DataError(
            f"features {', '.join(weights)} have weights and {', '.join(without)} have none, but "
            "one KeyedJaggedTensor carries them all; give every feature weights (1 changes "
            "nothing), or none"
        )
    return torch.cat(list(weights.values()))

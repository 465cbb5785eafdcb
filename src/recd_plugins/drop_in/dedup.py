"""Deduplication of the batches of a trainer's own loader."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import get_worker_info
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.rank_agreement import tell_all
from recd_plugins.drop_in.batch_fields import replace_kjts
from recd_plugins.drop_in.own_reads import OwnReads
from recd_plugins.drop_in.pooled_features import PooledFeatures
from recd_plugins.drop_in.stored import Stored, check_lengths
from recd_plugins.errors import SetupError
from recd_plugins.sparse.unique_groups import deduplicate
from recd_plugins.words import shortened

logger = logging.getLogger(__name__)

#: Ids over ids that are stored, below which looking for duplicates costs more than it saves.
WORTHWHILE = 1.25


@dataclass(frozen=True)
class Counted:
    """The ids of a feature in the first batches of all ranks.

    Attributes:
        ids: of all rows.
        stored: of the rows that are left when equal ones are stored once.
        rows: all of them.
    """

    ids: int
    stored: int
    rows: int

    def __add__(self, other: Counted) -> Counted:
        """Of both."""
        return Counted(self.ids + other.ids, self.stored + other.stored, self.rows + other.rows)

    @property
    def factor(self) -> float:
        """Ids for one that is stored; 1.0 without any."""
        return self.ids / self.stored if self.stored else 1.0


_NONE = Counted(0, 0, 0)

# What TorchRec's own sharders make: in some shardings they take deduplicated batches for others,
# and say nothing.
_STOCK = (ShardedEmbeddingBagCollection, ShardedManagedCollisionCollection)


@dataclass(frozen=True)
class Decision:
    """What is deduplicated, the same on all ranks.

    Attributes:
        features: of each KeyedJaggedTensor that changes, by its place in the batch: those in which
            equal rows are looked for.
        counted: of each KeyedJaggedTensor, its features that could be deduplicated.
        left: of each KeyedJaggedTensor that stays as it is: why.
    """

    features: Mapping[str, frozenset[str]]
    counted: Mapping[str, Mapping[str, Counted]]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = []
        for path, features in self.features.items():
            total = sum((self.counted[path][name] for name in sorted(features)), _NONE)
            names = shortened(sorted(features))
            lines.append(f"{path}: {total.factor:.1f} ids for one that is stored, in {names}")
            rest = self.counted[path].keys() - features
            if rest:
                lines.append(f"{path}: hardly any duplicates in {shortened(sorted(rest))}")
        lines += [f"{path}: left alone, as {why}" for path, why in self.left.items()]
        return "deduplication of batches\n" + "\n".join(f"  {line}" for line in lines)


class Dedup:
    """Deduplication of a trainer's batches for the model that they are for.

    Called with a loader, it gives one of the same batches in which pooled features store equal rows
    once, as KeyedJaggedTensors with ``stride_per_key_per_rank`` and ``inverse_indices``: a sharded
    EmbeddingBagCollection returns all rows, in their order, and sends and looks up the stored ones.
    At the first batch the ranks decide together, for all batches, and say once what came of it:
    where next to nothing is to be saved, batches stay what they are.

    Args:
        model: before it is sharded, by sharders of ``Prepared.sharders``. What it reads of a
            KeyedJaggedTensor by itself, past its embedding modules, it would find deduplicated.
        process_group: of the ranks that train it; without it the one that the model is sharded
            over when the first batch comes, or the default one where it is not sharded.

    Raises:
        SetupError: the model has no embedding module.
    """

    def __init__(self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        self.pooled = PooledFeatures.of(model)
        self._model: nn.Module | None = model
        self._group = process_group
        self.decision: Decision | None = None
        self._idle: list[Stored] = []  # each is used by one thread at a time

    def __call__(self, loader: Iterable[Any]) -> DedupLoader:
        """A loader of the same batches, deduplicated.

        Raises:
            SetupError: ``loader`` is nothing to iterate over.
        """
        if not isinstance(loader, Iterable):
            raise SetupError(
                f"dedup takes a loader of batches, not a {type(loader).__name__}; one batch is for "
                "dedup.batch"
            )
        return DedupLoader(loader, self)

    def batch(self, batch: Any) -> Any:
        """One batch, deduplicated; a collective call for the first one.

        Raises:
            SetupError: ranks have batches of different make, no batch has a KeyedJaggedTensor, or
                the model was sharded by TorchRec's own sharders.
        """
        decision = self.decision or self.decide(batch)
        if not decision.features:
            return batch
        try:
            stored = self._idle.pop()
        except IndexError:
            stored = Stored(decision.features)
        batch = replace_kjts(batch, stored)
        self._idle.append(stored)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy for a worker of a DataLoader, which needs no model."""
        return {**vars(self), "_model": None}

    def _of_stock(self) -> str:
        """What was sharded by TorchRec's own sharders, in words; empty without such."""
        for path, module in () if self._model is None else self._model.named_modules():
            if type(module) in _STOCK:
                return f"{path or 'the model'} is TorchRec's own {type(module).__name__}"
        return ""

    def _sharded_over(self) -> dist.ProcessGroup | None:
        """The ranks over which the model is sharded, which may be a part of all."""
        modules = () if self._model is None else self._model.modules()
        envs = (getattr(module, "_env", None) for module in modules)
        found = {env.process_group for env in envs if isinstance(env, ShardingEnv)}
        return found.pop() if len(found) == 1 else None

    def give_up(self, error: Exception) -> None:
        """Tell ranks that wait for the first batch of this one why there is none; collective."""
        if self.decision is None:
            with suppress(SetupError):
                self.decide(None, f"{type(error).__name__}: {error}")

    def decide(self, batch: Any, failed: str = "") -> Decision:
        """Decide by the first batch of every rank, ``None`` where a rank has none; collective.

        Args:
            batch: of this rank.
            failed: why there is none, where it could not be made.

        Raises:
            SetupError: this is a worker of a DataLoader, in which no rank finds the others; a rank
                could not make a batch; or as ``batch``.
        """
        if get_worker_info() is not None:
            raise SetupError(
                "dedup is in a worker of a DataLoader and the ranks have not decided yet what to "
                "deduplicate: put it around the DataLoader, ready.dedup(loader), or give "
                "ready.dedup.batch a first batch on every rank before the DataLoader is iterated"
            )
        if self._model is not None:
            self.pooled = self.pooled.after_sharding(self._model)
        look = _Look(self.pooled)
        try:
            replace_kjts(batch, look)
        except Exception as error:
            self.give_up(error)
            raise
        step, group = "the first batch of dedup(loader)", self._group or self._sharded_over()
        told = tell_all(
            step, (failed, look.counted, look.left, _on_one_machine(), self._of_stock()), group
        )
        failures, counted, left, alone, of_stock = zip(*told, strict=True)
        for rank, failure in enumerate(failures):
            if failure:
                raise SetupError(f"rank {rank} has no first batch: {failure}")
        decision = _decide(
            list(zip(counted, left, strict=True)),
            self.pooled.names - self.pooled.sequences if all(alone) else frozenset(),
        )
        if decision.features and (stock := next(filter(None, of_stock), None)):
            raise SetupError(
                f"{stock}, which takes deduplicated batches wrong where tables are split by rows "
                "or ids are remapped: shard the model with ready.sharders(...), or leave out dedup"
            )
        if self._model is not None and decision.features:
            OwnReads(self._model, frozenset[str]().union(*decision.features.values()))
        self.decision, self._model = decision, None
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            logger.warning("%s", self.decision)
        return self.decision


class DedupLoader:
    """A loader whose batches are deduplicated; in all else the one that was given."""

    def __init__(self, loader: Iterable[Any], dedup: Dedup) -> None:
        self._loader = loader
        self._dedup = dedup

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        # Where nothing is deduplicated the loader's own iterator goes on, at no cost.
        return batches if self._off else self._batches(batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in self._told(batches):
            yield self._dedup.batch(batch)
            if self._off:
                yield from batches
                return
        if self._dedup.decision is None:  # the other ranks wait for this one
            self._dedup.decide(None)

    def _told(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; ranks that wait for the first one are told where there is none."""
        try:
            yield from batches
        except Exception as error:
            self._dedup.give_up(error)
            raise

    @property
    def _off(self) -> bool:
        return self._dedup.decision is not None and not self._dedup.decision.features

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is the loader's own there, as an epoch that it shuffles by."""
        if name in ("_loader", "_dedup"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


@dataclass
class _Look:
    """A look at the KeyedJaggedTensors of a batch, which changes none."""

    pooled: PooledFeatures
    counted: dict[str, dict[str, Counted]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __call__(self, path: str, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if kjt.variable_stride_per_key() or kjt.inverse_indices_or_none() is not None:
            self.left[path] = "it is deduplicated already"
        elif _weights_learn(kjt):
            self.left[path] = "its weights require a gradient, of which equal rows would share one"
        elif _half_weights(kjt):
            self.left[path] = "its weights are float16, which no CPU kernel permutes by rows"
        elif why := self.pooled.why_not(kjt.keys()):
            self.left[path] = why
        else:
            check_lengths(path, kjt)
            names = [key for key in kjt.keys() if key in self.pooled.names]  # noqa: SIM118
            found = deduplicate(kjt, [[name] for name in names])
            self.counted[path] = {
                name: Counted(ids, unique.values.numel(), kjt.stride())
                for name, unique, ids in zip(names, found, _num_ids(kjt, names), strict=True)
            }
        return kjt


def _num_ids(kjt: KeyedJaggedTensor, names: Iterable[str]) -> list[int]:
    num_ids = dict(zip(kjt.keys(), kjt.length_per_key(), strict=True))
    return [num_ids[name] for name in names]


def _weights_learn(kjt: KeyedJaggedTensor) -> bool:
    weights = kjt.weights_or_none()
    return weights is not None and weights.requires_grad


def _half_weights(kjt: KeyedJaggedTensor) -> bool:
    weights = kjt.weights_or_none()
    return weights is not None and weights.dtype == torch.float16 and weights.device.type == "cpu"


def _on_one_machine() -> bool:
    """Whether no vector goes over a network, and processors look it up."""
    if torch.cuda.is_available():
        return False
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) >= ranks


def _decide(
    looks: list[tuple[dict[str, dict[str, Counted]], dict[str, str]]], copied: frozenset[str]
) -> Decision:
    """One decision of what every rank saw.

    Args:
        looks: of the ranks.
        copied: features of which deduplication saves the lookup alone, and copies what came of it.
    """
    seen = [(rank, look) for rank, look in enumerate(looks) if look != ({}, {})]
    if not seen:
        raise SetupError(
            "no batch has a KeyedJaggedTensor in an attribute or item, or the loader of no rank "
            "has a batch: there is nothing to deduplicate"
        )
    first, (counted, left) = seen[0]
    made = {path: list(features) for path, features in counted.items()}
    for rank, (theirs, theirs_left) in seen[1:]:
        others = {path: list(features) for path, features in theirs.items()}
        if (others, theirs_left) != (made, left):
            raise SetupError(
                f"the first batch of rank {first} has {made or 'nothing'} to deduplicate, that of "
                f"rank {rank} {others or 'nothing'}: give all ranks batches of one make"
            )
    total = {
        path: {name: sum((look[path][name] for _, (look, _) in seen), _NONE) for name in features}
        for path, features in counted.items()
    }
    left, chosen = dict(left), dict[str, frozenset[str]]()
    for path, features in total.items():
        whole = sum(features.values(), _NONE)
        if whole.factor < WORTHWHILE:
            left[path] = f"it has {whole.factor:.2f} ids for one that would be stored"
        elif features.keys() <= copied and whole.ids <= whole.rows:
            left[path] = (
                f"it has {whole.ids / whole.rows:.1f} ids a row and feature, and without a network "
                "between the ranks the copy of a vector into each row costs what its lookup does"
            )
        else:
            chosen[path] = frozenset(n for n, each in features.items() if each.factor > 1.05)
    return Decision(chosen, total, left)

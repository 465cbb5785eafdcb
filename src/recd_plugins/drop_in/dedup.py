"""Deduplicates the batches of a custom training loop's data loader."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import get_worker_info
from torchrec.distributed.types import ShardedModule, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.drop_in.batches import Stored, check_lengths, replace_kjts
from recd_plugins.interfaces.model_tables import EmbeddingModule, embedding_modules
from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.rank_agreement import all_gather_object
from recd_plugins.runtime.text import did_you_mean, shortened
from recd_plugins.sharding.batch_form import BatchForm, accepts_deduplicated
from recd_plugins.sharding.other_sharders import why_plain
from recd_plugins.sparse.deduplicated_kjt import unique_rows
from recd_plugins.sparse.unique_groups import deduplicate

logger = logging.getLogger(__name__)

#: Minimum ids per stored id. Below this, deduplication costs more than it saves.
WORTHWHILE = 1.25

# The cost of deduplication on a CPU, in lookups of ids. Measured with 3 to 80 ids a row, vectors of
# 8 to 128 numbers, batches of 4,000 to 33,000 rows over all features, on 1 and 2 ranks. A unique id
# costs more than an id of a plain batch, whose equal neighbour has left its vector in the cache.
_IDS_PER_UNIQUE_ID = 1.4
_IDS_PER_ROW = 6
_IDS_PER_BATCH = 60_000
# Minimum fraction of lookups to save. Below it, the faster way depends on the machine.
_MARGIN = 0.15


@dataclass(frozen=True)
class PooledFeatures:
    """Features that modules pool, so that looking up their unique rows is enough.

    ``features`` is a dict from module path to its features. ``sequences`` are the features of
    PooledSequences modules. ``others`` maps each feature that cannot be deduplicated to the reason.
    """

    features: dict[str, frozenset[str]]
    names: frozenset[str]
    sequences: frozenset[str]
    others: dict[str, str]

    @classmethod
    def of(cls, modules: Sequence[EmbeddingModule]) -> Self:
        """Find the pooled features in the ``embedding_modules`` of an unsharded model."""
        sequences, others, by_path = set[str](), dict[str, str](), dict[str, frozenset[str]]()
        if not modules:
            raise SetupError(
                "the model has no unsharded EmbeddingBagCollection or EmbeddingCollection. Pass "
                "the model before DistributedModelParallel shards it."
            )
        for module in modules:
            features = {feature for table in module.tables for feature in table.features}
            if module.is_subclass:
                why = module.why_left
            elif accepts_deduplicated(module.shardable):
                why, sequences = "", sequences | features
            elif isinstance(module.shardable, EmbeddingCollection):
                why = "because EmbeddingCollection does not pool; use PooledSequences instead"
            else:
                why = why_plain(module.shardable)
            if why:
                others |= dict.fromkeys(features, why)
            else:
                by_path[module.path] = frozenset(features)
        names = frozenset[str]().union(*by_path.values())
        return cls(by_path, names, frozenset(sequences), others)


@dataclass(frozen=True)
class Counted:
    """Counts for one feature: all ids, ids in unique rows (``stored``), and rows."""

    ids: int
    stored: int
    rows: int

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.ids + other.ids, self.stored + other.stored, self.rows + other.rows)

    @property
    def factor(self) -> float:
        """Return the dedupe factor, ids divided by stored ids; 1.0 for a feature without ids."""
        return self.ids / self.stored if self.stored else 1.0


_NONE = Counted(0, 0, 0)


@dataclass(frozen=True)
class Decision:
    """States which features to deduplicate, the same on all ranks.

    ``features`` is a dict from the path of a KeyedJaggedTensor to the features to deduplicate.
    ``counted`` has the counts of all features that could be deduplicated. ``left`` maps the path of
    each tensor that stays plain to the reason.
    """

    features: Mapping[str, frozenset[str]]
    counted: Mapping[str, Mapping[str, Counted]]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = []
        for path, features in self.features.items():
            total = sum((self.counted[path][name] for name in sorted(features)), _NONE)
            names = shortened(sorted(features), str)
            lines.append(f"{path}: dedupe factor {total.factor:.1f} for the features {names}")
            if rest := self.counted[path].keys() - features:
                lines.append(
                    f"{path}: not deduplicated, too few duplicates: {shortened(sorted(rest), str)}"
                )
        lines += [f"{path}: not deduplicated, since {why}" for path, why in self.left.items()]
        if not lines:
            return "deduplication: none, since the first batch contains no KeyedJaggedTensor"
        if any(self.counted.get(path) for path in self.left):
            lines.append("if the first batch is not typical, pass features=[...] to dedup")
        return "deduplication, measured on the first batch\n" + "\n".join(f"  {x}" for x in lines)


class Dedup:
    """Deduplicates the batches of a custom training loop for its model.

    Call it with a loader or an iterator. It returns the same batches, whose KeyedJaggedTensors also
    have the unique rows of pooled features. Sharded modules look up only unique rows, and return
    all rows in the original order. Other code sees all rows, as in a plain batch. On the first
    batch, the ranks agree on the features to deduplicate, and rank 0 logs them with level INFO.
    Batches stay plain if deduplication would not save time. The choice is final, because TorchRec
    builds its collectives for the form of the first batch.

    Args:
        model: the model, before the sharders of ``Prepared.sharders`` shard it.
        process_group: the ranks that train the model. Default: the ranks over which the model is
            sharded when the first batch arrives, or the default group if it is not sharded.

    Raises:
        SetupError: the model has no embedding module.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.pooled = PooledFeatures.of(list(embedding_modules(model)))
        self._model: nn.Module | None = model
        self._group = process_group
        self._features: frozenset[str] | None = None
        self.decision: Decision | None = None
        self._idle: list[Stored] = []  # each is used by one thread at a time

    def __call__(
        self, loader: Iterable[Any], *, features: Iterable[str] | None = None
    ) -> DedupLoader | Iterator[Any]:
        """Return a loader of deduplicated batches, or an iterator if one is given.

        Args:
            loader: yields batches. Their KeyedJaggedTensors may be in dicts, lists, tuples,
                dataclasses and other objects.
            features: features to deduplicate, the same on all ranks. Default: measure the first
                batch. Pass them if it is not typical, for example if data sorted by time begins
                with empty histories. Has no effect after the first batch.

        Raises:
            SetupError: no module of the model pools one of ``features``.
        """
        if features is not None:
            self._features = frozenset(features)
            for name in sorted(self._features - self.pooled.names):
                why = self.pooled.others.get(name)
                meant = f", {why}." if why else did_you_mean(name, self.pooled.names) or "."
                raise SetupError(f"dedup: no module pools the feature {name!r}{meant}")
        return self._batches(loader) if isinstance(loader, Iterator) else DedupLoader(loader, self)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield self.batch(batch)
        if self.decision is None:
            self.decide(None)  # the other ranks wait for this one

    def batch(self, batch: Any) -> Any:
        """Deduplicate one batch. All ranks must make the first call together.

        Raises:
            SetupError: the first batches of two ranks have different features.
        """
        decision = self.decision or self.decide(batch)
        if decision is None or not decision.features:
            return batch
        try:
            stored = self._idle.pop()
        except IndexError:
            stored = Stored(decision.features)
        batch = replace_kjts(batch, stored)
        self._idle.append(stored)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the model, which DataLoader workers do not need."""
        return {**vars(self), "_model": None}

    def decide(self, batch: Any) -> Decision | None:
        """Choose the features to deduplicate from the first batches of all ranks.

        All ranks must call this. A rank without a batch passes None. Return None if no rank has a
        batch.

        Raises:
            SetupError: called in a DataLoader worker, which cannot communicate with other ranks, or
                the first batches of two ranks have different features.
        """
        if get_worker_info() is not None:
            raise SetupError(
                "dedup runs in a DataLoader worker, but ranks can only agree on the features to "
                "deduplicate in the main process. Wrap the DataLoader: ready.dedup(loader). Or "
                "call ready.dedup.batch(first_batch) on every rank before you use the loader."
            )
        look = _Look(self.pooled.names, self._takes_plain())
        replace_kjts(batch, look)
        group = self._group or self._sharded_over()
        told = all_gather_object(
            "the first batch of dedup(loader)",
            (batch is not None, _on_one_machine(), look.counted, look.left),
            group,
        )
        has_batch, on_one_machine, counted, left = zip(*told, strict=True)
        if not any(has_batch):
            return None
        looked_up = self.pooled.names - self.pooled.sequences
        self.decision = _decide(
            list(zip(counted, left, strict=True)),
            looked_up if all(on_one_machine) else frozenset(),
            self._features,
        )
        self._model = None
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            logger.info("%s", self.decision)
        return self.decision

    def _takes_plain(self) -> dict[str, str]:
        """Return a dict from each feature whose module cannot use unique rows to the reason."""
        modules = {} if self._model is None else dict(self._model.named_modules())
        if not any(isinstance(module, ShardedModule) for module in modules.values()):
            return {}  # it may still be sharded
        found: dict[str, str] = {}
        used: set[str] = set()
        for path, features in self.pooled.features.items():
            module = modules.get(path)
            inner = [] if module is None else module.modules()
            forms = [each.form for each in inner if isinstance(getattr(each, "form", 0), BatchForm)]
            if module is None or any(form.takes_unique_rows for form in forms):
                used |= features
                continue
            why = f": {forms[0].plain_only}" if forms else " is not sharded by ready.sharders()"
            found |= dict.fromkeys(features, f"{path or 'the model'}{why}")
        return {name: why for name, why in found.items() if name not in used}

    def _sharded_over(self) -> dist.ProcessGroup | None:
        """Return the process group over which the model is sharded; it may exclude some ranks."""
        modules = () if self._model is None else self._model.modules()
        envs = (getattr(module, "_env", None) for module in modules)
        found = {env.process_group for env in envs if isinstance(env, ShardingEnv)}
        return found.pop() if len(found) == 1 else None


class DedupLoader:
    """Loader of deduplicated batches that forwards other attributes to the original loader."""

    def __init__(self, inner: Any, dedup: Dedup) -> None:
        self._inner, self._dedup = inner, dedup

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the original loader."""
        if name in ("_inner", "_dedup"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._inner)
        decision = self._dedup.decision
        # If nothing is deduplicated, continue with the loader's own iterator, at no cost.
        nothing = decision is not None and not decision.features
        return batches if nothing else self._dedup(batches)


@dataclass
class _Look:
    """Counts duplicates in the KeyedJaggedTensors of a batch without changing them."""

    pooled: frozenset[str]
    takes_plain: Mapping[str, str]
    counted: dict[str, dict[str, Counted]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __call__(self, path: str, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys = kjt.keys()
        if why := self._why_left(kjt, keys):
            self.left[path] = why
            return kjt
        check_lengths(path, kjt)
        names = [key for key in keys if key in self.pooled and key not in self.takes_plain]
        num_ids = dict(zip(keys, kjt.length_per_key(), strict=True))
        found = deduplicate(kjt, [[name] for name in names])
        self.counted[path] = {
            name: Counted(num_ids[name], unique.values.numel(), kjt.stride())
            for name, unique in zip(names, found, strict=True)
        }
        return kjt

    def _why_left(self, kjt: KeyedJaggedTensor, keys: Sequence[str]) -> str:
        weights = kjt.weights_or_none()
        if unique_rows(kjt).inverse_indices_or_none() is not None or kjt.variable_stride_per_key():
            return "it is already deduplicated"
        if weights is not None and weights.requires_grad:
            return "its weights require a gradient, and equal rows would share one gradient"
        if weights is not None and weights.dtype == torch.float16 and weights.device.type == "cpu":
            return "its weights are float16, which TorchRec's CPU kernels do not support"
        if type(kjt) is not KeyedJaggedTensor:
            return f"its type is {type(kjt).__name__}, a subclass of KeyedJaggedTensor"
        if self.pooled.isdisjoint(keys):
            return "none of its features is pooled by an EmbeddingBagCollection or PooledSequences"
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            return f"it contains the feature {twice[0]!r} twice"
        reasons = [self.takes_plain.get(key, "") for key in keys if key in self.pooled]
        return "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""


def _on_one_machine() -> bool:
    """Return True if lookups run on CPU and all ranks are on one machine."""
    if torch.cuda.is_available():
        return False
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) >= ranks


def _pays(whole: Counted, ranks: int) -> bool:
    """Return True if deduplication on one machine saves more CPU work than it costs."""
    cost = _IDS_PER_UNIQUE_ID * whole.stored + _IDS_PER_ROW * whole.rows + _IDS_PER_BATCH * ranks
    return whole.ids - cost > _MARGIN * whole.ids


def _decide(
    looks: list[tuple[dict[str, dict[str, Counted]], dict[str, str]]],
    looked_up: frozenset[str],
    requested: frozenset[str] | None = None,
) -> Decision:
    """Merge the counts and reasons of all ranks into one decision.

    For features in ``looked_up``, deduplication saves only lookups and no network traffic. Chooses
    exactly the features ``requested`` by the user, if given.
    """
    seen = [(rank, look) for rank, look in enumerate(looks) if look != ({}, {})]
    if not seen:
        return Decision({}, {}, {})
    first, (counted, left) = seen[0]
    made = {path: list(features) for path, features in counted.items()}
    for rank, (theirs, theirs_left) in seen[1:]:
        others = {path: list(features) for path, features in theirs.items()}
        if (others, theirs_left) != (made, left):
            raise SetupError(
                f"the first batches of ranks {first} and {rank} have different features to "
                f"deduplicate: {made or 'none'} and {others or 'none'}. Pass batches with the same "
                "structure on all ranks."
            )
    total = {
        path: {name: sum((look[path][name] for _, (look, _) in seen), _NONE) for name in features}
        for path, features in counted.items()
    }
    left, chosen = dict(left), dict[str, frozenset[str]]()
    for path, features in total.items():
        whole = sum(features.values(), _NONE)
        here, ranks = features.keys() <= looked_up, len(seen)
        if requested is not None:
            total[path] = {name: features[name] for name in features if name in requested}
            if total[path]:
                chosen[path] = frozenset(total[path])
        elif whole.factor < WORTHWHILE:
            left[path] = f"its dedupe factor is only {whole.factor:.2f}, below {WORTHWHILE}"
        elif here and not _pays(whole, ranks):
            per_row = whole.ids / whole.rows if whole.rows else 0
            left[path] = (
                f"it would cost more than it saves on one machine (dedupe factor "
                f"{whole.factor:.1f}, {whole.ids:,} ids, {per_row:.1f} ids per row and feature)"
            )
        else:
            chosen[path] = frozenset(n for n, each in features.items() if each.factor > 1.05)
    return Decision(chosen, total, left)

"""Unsharded embedding collections whose tables are looked up by raw ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugin_dynamic.runtime.rank_index import RankIndex
from recd_plugin_dynamic.table import DynamicTable
from recd_plugins.api import SetupError, jagged

# Arguments of an EmbeddingCollection besides its tables. Older versions of TorchRec lack some.
_OPTIONS = ("need_indices", "use_gather_select", "use_gather_select_per_sharding")


class TableIndex(nn.Module):
    """The index of a whole table as buffers, to find the rows of ids without inserting new ids.

    Attributes:
        ids: id of each row, int64 ``[num_embeddings]``, -1 for rows without an id.
    """

    ids: Tensor
    _sorted: Tensor
    _order: Tensor

    def __init__(self, table: DynamicTable) -> None:
        super().__init__()
        for name, state in RankIndex(table, 0, 1).state().items():
            self.register_buffer(name, state)
        self.sort()
        self.register_load_state_dict_post_hook(TableIndex.sort)  # type: ignore[no-untyped-call]

    def sort(self, _: object = None) -> None:
        """Sort the ids, so that they can be searched."""
        ids, order = torch.sort(self.ids)
        self.register_buffer("_sorted", ids, persistent=False)
        self.register_buffer("_order", order, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the table row of each id, int64 ``[n]``; 0 for unknown ids."""
        ids = ids.long()
        place = torch.searchsorted(self._sorted, ids).clamp(max=self._sorted.shape[0] - 1)
        return torch.where(self._sorted[place] == ids, self._order[place], 0)


def _clear_default_rows(module: Any, _: object) -> None:
    """Set row 0, which unknown ids use, to zero. Training changes it after each lookup."""
    tables = module.embedding_bags if isinstance(module, DynamicBags) else module.embeddings
    for name in module.dynamic:
        tables[name].weight.data[0] = 0


class _DynamicCollection:
    """Mixin for collections that replace another one and look up some tables by raw ids."""

    dynamic: dict[str, DynamicTable]

    def _look_up_by_id(
        self: Any, configs: Sequence[BaseEmbeddingConfig], dynamic: Mapping[str, DynamicTable]
    ) -> None:
        self.dynamic = {each.name: dynamic[each.name] for each in configs if each.name in dynamic}
        self.row_state = nn.ModuleDict({name: TableIndex(t) for name, t in self.dynamic.items()})
        tables: dict[str, str] = {}
        for config in configs:
            for feature in config.feature_names:
                first = tables.setdefault(feature, config.name)
                if first != config.name and {first, config.name} & self.dynamic.keys():
                    raise SetupError(
                        f"feature {feature!r} looks up the tables {first!r} and {config.name!r} of "
                        "one module, which dynamic.table does not support. Put each table into its "
                        "own module."
                    )
        self._table_of = tables
        self.register_load_state_dict_post_hook(_clear_default_rows)

    def rows_of(self: Any, table: str) -> nn.Module:
        """Return a module that maps ids to rows of a table, int64 ``[n]``."""
        return self.row_state[table] if table in self.dynamic else nn.Identity()

    def _as_rows(self: Any, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Replace the ids of dynamic tables by rows."""
        if self.training:
            raise SetupError(
                "an unsharded module with dynamic tables cannot be trained, because it inserts no "
                "ids. Shard the model with DistributedModelParallel, or call model.eval()."
            )
        names = features.keys()
        parts, tables = [features[name] for name in names], map(self._table_of.get, names)
        values = [
            self.row_state[table](part.values()) if table in self.dynamic else part.values()
            for part, table in zip(parts, tables, strict=True)
        ]
        return jagged.with_fields(features, values=torch.cat(values))


class DynamicBags(_DynamicCollection, EmbeddingBagCollection):
    """An EmbeddingBagCollection that looks up some tables by raw ids.

    Args:
        bags: the collection to replace. Its weights are shared, not copied.
        dynamic: dynamic tables, keyed by name.
    """

    def __init__(self, bags: EmbeddingBagCollection, dynamic: Mapping[str, DynamicTable]) -> None:
        configs = bags.embedding_bag_configs()
        super().__init__(configs, bags.is_weighted(), torch.device("meta"))
        self.embedding_bags, self._device = bags.embedding_bags, bags.device
        self._look_up_by_id(configs, dynamic)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return super().forward(self._as_rows(features))


class DynamicEmbeddings(_DynamicCollection, EmbeddingCollection):
    """An EmbeddingCollection that looks up some tables by raw ids. Arguments: see DynamicBags."""

    def __init__(
        self, embeddings: EmbeddingCollection, dynamic: Mapping[str, DynamicTable]
    ) -> None:
        configs = embeddings.embedding_configs()
        options = {
            name: getattr(embeddings, name)() for name in _OPTIONS if hasattr(embeddings, name)
        }
        super().__init__(configs, device=torch.device("meta"), **options)
        self.embeddings, self._device = embeddings.embeddings, embeddings.device
        self._look_up_by_id(configs, dynamic)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return super().forward(self._as_rows(features))


def with_dynamic_tables(model: nn.Module, dynamic: Mapping[str, DynamicTable]) -> nn.Module:
    """Replace the collections of ``model`` that contain a table of ``dynamic``. Return the model.

    Raises:
        SetupError: another plugin has replaced the collection, or a feature has two tables.
    """

    def replaced(module: Any) -> nn.Module | None:
        bags = isinstance(module, EmbeddingBagCollection)
        if not bags and not isinstance(module, EmbeddingCollection):
            return None
        configs: Any = module.embedding_bag_configs() if bags else module.embedding_configs()
        own = [config.name for config in configs if config.name in dynamic]
        if not own:
            return None
        made: Any = DynamicBags if bags else DynamicEmbeddings
        before = module.dynamic if isinstance(module, made) else {}
        if not before and type(module) not in (EmbeddingBagCollection, EmbeddingCollection):
            raise SetupError(
                f"table {own[0]!r} is in a {type(module).__name__}, which dynamic.table does not "
                "support. Use one sharding plugin for all tables of the module."
            )
        replacement: nn.Module = made(module, {**before, **dynamic})
        return replacement

    if (whole := replaced(model)) is not None:
        return whole
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (new := replaced(child)) is not None:
                setattr(parent, name, new)
    return model

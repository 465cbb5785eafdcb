"""Delays the allocation of embedding tables by patching constructors of TorchRec modules."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial, wraps
from threading import get_ident
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.generators import GeneratorState, generators_kept

#: Initializes a collection. Called with its class, the class's ``__init__``, and the arguments of
#: ``__init__``, starting with the module.
Maker = Callable[..., None]


@contextmanager
def collections_made_by(maker: Maker) -> Iterator[None]:
    """Let ``maker`` initialize the embedding collections that this thread creates in the context.

    ``maker`` also initializes managed collision modules that contain a collection. It is called as
    ``maker(collection, init, module, *arguments, **options)`` and must call ``init``. Contexts can
    be nested: the inner maker runs first, and its ``init`` is the outer maker.
    """
    with ExitStack() as stack:
        for collection in (
            EmbeddingBagCollection,
            EmbeddingCollection,
            BaseManagedCollisionEmbeddingCollection,
        ):
            init = _made_by(maker, collection, get_ident())
            stack.enter_context(mock.patch.object(collection, "__init__", init))
        yield


def _made_by(maker: Maker, collection: type[nn.Module], thread: int) -> Callable[..., None]:
    before: Callable[..., None] = collection.__init__

    @wraps(before)
    def init(module: nn.Module, *arguments: Any, **options: Any) -> None:
        make = partial(maker, collection, before) if get_ident() == thread else before
        make(module, *arguments, **options)

    return init


def one_row_tables() -> AbstractContextManager[None]:
    """Create TorchRec's embedding collections with one row per table in this context.

    Building the full model first may exhaust the memory. Id maps of managed collision modules keep
    their size, but map every id to row 0.
    """
    return collections_made_by(_with_one_row)


def _with_one_row(
    _: type[nn.Module], init: Callable[..., None], module: nn.Module, *args: Any, **options: Any
) -> None:
    bound = inspect.signature(init).bind(module, *args, **options)
    if "tables" in bound.arguments:
        small = [copy(table) for table in bound.arguments["tables"]]
        for table in small:
            table.num_embeddings = 1
        bound.arguments["tables"] = small
    else:
        _map_to_row_0(
            bound.arguments["managed_collision_collection"], bound.arguments["embedding_module"]
        )
    init(*bound.args, **bound.kwargs)


def _map_to_row_0(
    maps: ManagedCollisionCollection, tables: EmbeddingBagCollection | EmbeddingCollection
) -> None:
    """Make id maps of managed collision modules return row 0 for every id of one-row tables."""
    # Private, torchrec 1.6 to 1.9: compared to the configs of the tables.
    maps._embedding_configs = (
        tables.embedding_bag_configs()
        if isinstance(tables, EmbeddingBagCollection)
        else tables.embedding_configs()
    )
    for each in maps.modules():
        if isinstance(each, ManagedCollisionModule):
            each.register_forward_hook(_to_row_0)


def _to_row_0(*call: Any) -> dict[str, JaggedTensor]:
    """Forward hook that replaces all remapped ids, which are the last argument, by 0."""
    return {
        name: JaggedTensor(torch.zeros_like(ids.values()), lengths=ids.lengths())
        for name, ids in call[-1].items()
    }


logger = logging.getLogger(__name__)

#: Initializers that draw numbers in memory order, so that a table can be drawn in parts. On CPU,
#: normal_ draws 16 numbers at a time, or single numbers for tensors with fewer than 16.
_BY_ELEMENT = (nn.init.uniform_, nn.init.normal_)
_TOGETHER = 16
_CHUNK = 1 << 20  # elements

Init = Callable[[Tensor], Any]


class Window(NamedTuple):
    """A block of a table: its first row, its first column, and the tensor to fill."""

    target: Tensor
    row: int
    column: int


class FirstValues:
    """The initial values of a table, which can be drawn later with the saved generator state.

    ``weight`` is the table's parameter ``[num_embeddings, embedding_dim]``, on the meta device.
    ``init`` draws the values from the current generator state.
    """

    def __init__(self, name: str, weight: nn.Parameter, init: Init) -> None:
        self.name = name
        self.shape = weight.shape
        self._dtype = weight.dtype
        self._init = init
        self._generators = GeneratorState.now()
        self._digest = b""
        if _is_by_element(init):
            for _ in self._chunks():
                pass
        else:
            self._digest = _digest(self._whole())
        self._version = weight._version

    def check(self, weight: nn.Parameter) -> None:
        """Raise an error if the parameter was written to; writes on the meta device are lost.

        Raises:
            SetupError: the message names the table.
        """
        if weight._version != self._version:
            raise SetupError(
                f"table {self.name!r}: values were written before sharding, but a table of "
                "deferred_tables() has no memory yet. Write to the sharded model, or create the "
                "table outside of deferred_tables()."
            )

    def fill(self, windows: Iterable[Window]) -> None:
        """Write the initial values into blocks of the table.

        Raises:
            SetupError: the table's ``init_fn`` returns other values than in its first call.
        """
        wanted = [window for window in windows if window.target.numel()]
        end = max((window.row + window.target.shape[0] for window in wanted), default=0)
        if not end:
            return
        with generators_kept(), torch.no_grad():
            self._generators.put_back()
            if self._digest:
                values = self._whole()
                if _digest(values) != self._digest:
                    raise SetupError(
                        f"table {self.name!r}: init_fn returned other values in its second call, "
                        "which deferred_tables() makes. Use the global generators of torch, numpy "
                        "or Python in init_fn, or do not use deferred_tables()."
                    )
                _copy(values, 0, wanted)
                return
            for row, values in self._chunks():
                _copy(values, row, wanted)
                if row + values.shape[0] >= end:
                    return

    def _whole(self) -> Tensor:
        weight = nn.Parameter(torch.empty(self.shape, dtype=self._dtype))
        self._init(weight)
        return weight.detach()

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, values) of consecutive chunks of rows."""
        rows, dim = self.shape
        step = max(_TOGETHER, _CHUNK // max(1, dim) // _TOGETHER * _TOGETHER)
        starts = [0, *range(step, rows, step)]
        if (rows - starts[-1]) * dim < _TOGETHER and len(starts) > 1:
            starts.pop()
        buffer = torch.empty(min(rows, step + _TOGETHER), dim, dtype=self._dtype)
        for start, end in zip(starts, [*starts[1:], rows], strict=True):
            values = buffer[: end - start]
            self._init(values)
            yield start, values


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects reads and writes of tables without memory; ``touched`` describes the first access."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched = ""
        # Kept alive, so that no new storage reuses the address of a freed one.
        self._weights: list[tuple[str, nn.Parameter]] = []
        self._names: dict[int, str] = {}

    def add(self, name: str, weight: nn.Parameter) -> None:
        """Register a table whose initial values are drawn later."""
        self._weights.append((name, weight))
        self._names[_storage(weight)] = name

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._names and not self.touched and not func.is_view:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.is_meta and _storage(leaf) in self._names:
                    self.touched = f"table {self._names[_storage(leaf)]!r} is used by {func}"
        return func(*args, **(kwargs or {}))


@contextmanager
def deferred_tables() -> Iterator[Deferred]:
    """Create TorchRec's embedding collections in this context without allocating tables.

    Parameters of EmbeddingBagCollections and EmbeddingCollections are on the meta device instead of
    the CPU. torch's random generator advances as usual, so dense layers get their usual values.
    Call ``first = recd_plugins.first_weights(model)`` before sharding, and then
    ``recd_plugins.copy_weights(dmp.state_dict(), first)``, which sets the shards of each rank to
    the initial values of the full tables. Before this call, tables cannot be read or written.

    An ``init_fn`` other than ``torch.nn.init.uniform_`` (TorchRec's default) or ``normal_`` is
    called a second time, and needs memory for one full table at a time.
    """
    deferred = Deferred()
    with collections_made_by(functools.partial(_defer, deferred)), deferred:
        yield deferred


def first_values_of(weight: Tensor) -> FirstValues | None:
    """Return the initial values of a parameter created in ``deferred_tables``, else None."""
    return getattr(weight, "recd_first_values", None)


def _defer(
    deferred: Deferred,
    collection: type[nn.Module],
    init: Callable[..., None],
    module: nn.Module,
    *args: Any,
    **options: Any,
) -> None:
    bound = inspect.signature(init).bind(module, *args, **options)
    device = torch.device(bound.arguments.get("device") or torch.get_default_device())
    # Others are not sharded as these; a module of managed collision is a subclass of its base.
    if type(module) is not collection or device.type != "cpu":
        init(module, *args, **options)
        return
    bound.arguments["device"] = torch.device("meta")
    configs = list(bound.arguments["tables"])
    given = [config.init_fn for config in configs]
    for config in configs:  # or an EmbeddingCollection calls it, with nothing to set
        config.init_fn = None
    try:
        init(*bound.args, **bound.kwargs)
    finally:
        for config, init_fn in zip(configs, given, strict=True):
            config.init_fn = init_fn
    _draw(module, configs, deferred)


def _draw(collection: nn.Module, configs: Iterable[Any], deferred: Deferred) -> None:
    """Draw initial values in the order of the collection's constructor (torchrec 1.6 to 1.9)."""
    pooled = isinstance(collection, EmbeddingBagCollection)
    modules: Any = collection.embedding_bags if pooled else collection.embeddings
    weights = [(config, modules[config.name].weight) for config in configs]
    if pooled:
        for config, weight in weights:
            FirstValues(config.name, weight, nn.init.normal_)
    for config, weight in weights:
        first = None if pooled else FirstValues(config.name, weight, nn.init.normal_)
        if config.init_fn is not None:
            if not _is_by_element(config.init_fn):
                logger.warning(
                    "table %r: each rank allocates the full table, because init_fn is neither "
                    "uniform_ nor normal_ of torch.nn.init",
                    config.name,
                )
            first = FirstValues(config.name, weight, config.init_fn)
        weight.recd_first_values = first
        deferred.add(config.name, weight)


def _is_by_element(init: Init) -> bool:
    if isinstance(init, functools.partial):
        plain = not init.args and not init.keywords.keys() - {"a", "b", "mean", "std"}
        return plain and init.func in _BY_ELEMENT
    return init in _BY_ELEMENT


def _copy(values: Tensor, row: int, windows: Iterable[Window]) -> None:
    """Copy consecutive rows of a table, starting at ``row``, into the windows."""
    for target, first, column in windows:
        start, end = max(row, first), min(row + len(values), first + len(target))
        if start < end:
            part = values[start - row : end - row, column : column + target.shape[1]]
            target[start - first : end - first].copy_(part)


def _digest(values: Tensor) -> bytes:
    return hashlib.blake2b(values.contiguous().view(torch.uint8).numpy().data).digest()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # private; what views of one storage share

"""What a plugin asks of the planner for one table, held against what TorchRec takes."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, get_args, get_origin, get_type_hints

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Plugin, Table
from recd_plugins.words import did_you_mean

_UNSET = ParameterConstraints()
_WORDS = {
    "sharding_types": [each.value for each in ShardingType],
    "compute_kernels": [each.value for each in EmbeddingComputeKernel],
}
_AS_IN = {
    "sharding_types": ", as [ShardingType.ROW_WISE.value]",
    "compute_kernels": ", as [EmbeddingComputeKernel.FUSED.value]",
}
_DEVICES = ("cpu", "cuda")
#: One number for each feature of the table.
_OF_FEATURES = ("pooling_factors", "num_poolings", "batch_sizes")
#: Types in words.
_CALLED = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
_LISTED = {int: "finite whole numbers", float: "finite numbers", str: "texts"}


def check_constraints(plugin: Plugin, table: Table, constraints: ParameterConstraints) -> None:
    """Refuse of a plugin what ``wrong_constraint`` finds.

    Args:
        plugin: whose constraints they are.
        table: that they are for.
        constraints: of it.

    Raises:
        PluginError: names the plugin, the line of its entry, the field and what is expected.
    """
    if wrong := wrong_constraint(table, constraints):
        raise PluginError(f"{plugin.title}: constraints returned {wrong}")


def wrong_constraint(table: Table, constraints: ParameterConstraints) -> str:
    """Types and words that TorchRec has not, and numbers that none of its costs can be of.

    Args:
        table: that they are for.
        constraints: of it; dataclasses take anything for a field.

    Returns:
        The first of them, with its field and what is expected; empty where all are right.
    """
    for name, hint in get_type_hints(ParameterConstraints).items():
        value, unset = getattr(constraints, name), getattr(_UNSET, name)
        is_unset = type(value) is type(unset) and value == unset
        if not is_unset and (wanted := _wanted(name, value, hint, table)):
            return f"{name} {value!r:.200} for table {table.name}; expected {wanted}"
    return ""


def _wanted(name: str, value: Any, hint: Any, table: Table) -> str:
    """What is expected in place of a value, in words; empty where it is right."""
    # Of Optional[List[str]] the list; None is what such a field has where it is not set.
    (kind,) = [each for each in get_args(hint) if each is not type(None)] or [hint]
    if get_origin(hint) is list or get_origin(kind) is list:
        return _wanted_list(name, value, (get_args(kind) or (kind,))[0], table)
    if name == "device_group" and value not in _DEVICES:
        return " or ".join(_DEVICES)
    if not _is(value, kind):
        return _CALLED.get(kind, f"TorchRec's {kind.__name__}")
    if name == "min_partition" and value < 0:
        return "a whole number that is not below 0"
    return ""


def _wanted_list(name: str, value: Any, kind: type, table: Table) -> str:
    is_list = isinstance(value, list | tuple | set | frozenset)
    if not is_list or not all(_is(each, kind) for each in value):
        return f"a list of {_LISTED[kind]}{_AS_IN.get(name, '')}"
    words = _WORDS.get(name, ())
    if words and not value:
        # TorchRec would take it for all of them.
        return f"at least one{_AS_IN[name]}, or None where any will do"
    if words and (unknown := [word for word in value if word not in words]):
        return f"TorchRec's {', '.join(words)}{did_you_mean(unknown[0], words)}"
    if name not in _OF_FEATURES:
        return ""
    least = 1 if name == "batch_sizes" else 0
    if not all(math.isfinite(each) and each >= least for each in value):
        return f"{_LISTED[kind]}, none of them below {least}"
    if len(value) != len(table.features):
        return f"one for each of its features, {', '.join(table.features)}"
    return ""


def _is(value: object, kind: type) -> bool:
    if kind in (int, float):
        # A number may be a whole one, and numpy's; True is none.
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    # Of words, their enums are none: they are texts, and TorchRec tells them apart.
    return type(value) is str if kind is str else isinstance(value, kind)

"""One step of preprocessing on some rows, and a look at what it returned."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor

from recd_plugins.errors import DataError, PluginError, Problem, RecdError, RegistryError
from recd_plugins.interfaces.preprocessing import Preprocessing
from recd_plugins.plugin_call import plugin_call
from recd_plugins.sparse.jagged import offsets_of

#: What steps returned last, while somebody has it; by id, as a plugin may be no key of a mapping.
_RETURNED: dict[int, ref[Tensor]] = {}


@contextmanager
def step_call(
    step: Preprocessing, what: str, of_others: Collection[RecdError] = ()
) -> Iterator[None]:
    """A context in which code of a step runs, whoever reads: what it refuses names its entry.

    Args:
        step: whose code runs.
        what: the method and what it is called for.
        of_others: errors that go through the step and are none of its own.

    Raises:
        PluginError: as ``plugin_call``.
        DataError: the step raised one.
        RegistryError: the step raised another RecdError of its own.
    """
    try:
        with plugin_call(step, what):
            yield
    except (PluginError, RegistryError):
        raise
    except RecdError as error:
        if step.stands_at is None or error in of_others:
            raise
        problem = Problem(*step.stands_at, f"{step.name}: {error}")
        if isinstance(error, DataError):
            raise DataError(str(problem)) from error
        raise RegistryError([problem]) from error


def apply_steps(
    steps: Sequence[Preprocessing], features: Sequence[str], values: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """New values and lengths of the rows of ``features``, one feature after the other."""
    for step in steps:
        if step.scope == "id":
            values = apply_to_ids(step, features, values)
        else:
            values, offsets = apply_step(step, features, values, offsets_of(lengths))
            lengths = torch.diff(offsets).to(lengths.dtype)
    return values, lengths


def apply_to_ids(step: Preprocessing, features: Sequence[str], values: Tensor) -> Tensor:
    """A step whose scope is one id: rows do not matter, so all values go as one row."""
    return apply_step(step, features, values, torch.tensor([0, values.numel()]))[0]


def apply_step(
    step: Preprocessing, features: Sequence[str], values: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """What ``step`` makes of the rows of ``features``, one feature after the other.

    Raises:
        DataError: the step refused them; names its entry.
        PluginError: the step failed, or returned values of another type or offsets that do not fit.
    """
    of = f"of {', '.join(features)}"
    default = torch.get_default_dtype()
    with step_call(step, f"transform {of}"):
        result = step.transform(values, offsets)
    if (now := torch.get_default_dtype()) != default:
        torch.set_default_dtype(default)
        raise PluginError(
            f"{step.title}: transform {of} made {now} the default of torch, which is that of the "
            "model too: give a dtype to each tensor that needs one"
        )
    if not (
        isinstance(result, tuple)
        and len(result) == 2
        and all(isinstance(part, Tensor) for part in result)
    ):
        raise PluginError(
            f"{step.title}: transform {of} returned {_form(result)}; expected a pair of tensors, "
            "values and offsets"
        )
    new_values, new_offsets = result
    numbers = (torch.float32, torch.float64)
    dtypes = numbers if values.dtype in numbers else (values.dtype,)
    if new_values.dtype not in dtypes or new_values.dim() != 1 or _elsewhere(new_values, values):
        what = "ids" if values.dtype == torch.int64 else "numbers"
        raise PluginError(
            f"{step.title}: transform {of} returned values as {_form(new_values)}; expected "
            f"{what}, {values.dtype} [num_values]"
        )
    if new_offsets.dtype not in (torch.int32, torch.int64) or _elsewhere(new_offsets, values):
        raise PluginError(
            f"{step.title}: transform {of} returned offsets as {_form(new_offsets)}; expected "
            "torch.int64 or torch.int32"
        )
    if new_offsets.shape != offsets.shape:
        raise PluginError(
            f"{step.title} returned {new_offsets.numel() - 1} rows for {offsets.numel() - 1} {of}; "
            "preprocessing changes what is in a row, never how many rows there are"
        )
    first, last = int(new_offsets[0]), int(new_offsets[-1])
    if (first, last) != (0, new_values.numel()):
        raise PluginError(
            f"{step.title}: transform {of} returned {new_values.numel()} values and offsets from "
            f"{first} to {last}; offsets start at 0 and end at the number of values"
        )
    if bool((torch.diff(new_offsets) < 0).any()):
        raise PluginError(
            f"{step.title}: transform {of} returned offsets that fall; each row ends where the "
            "next one starts"
        )
    if step.scope == "id" and not torch.equal(new_offsets, offsets):
        raise PluginError(
            f"{step.title}: transform {of} changed the lengths of rows; its scope is id, so each "
            "value becomes one value: give it the scope row"
        )
    _refuse_reuse(step, of, new_values, values)
    return new_values, new_offsets


def _refuse_reuse(step: Preprocessing, of: str, new: Tensor, values: Tensor) -> None:
    """Refuse memory that what the step returned before is still in."""
    memory = new.untyped_storage().data_ptr()
    if not new.numel() or memory == values.untyped_storage().data_ptr():
        return
    before = _RETURNED.get(id(step))
    kept = before() if before is not None else None
    if kept is not None and kept is not new and kept.untyped_storage().data_ptr() == memory:
        raise PluginError(
            f"{step.title}: transform {of} returned memory that holds what it returned before: "
            "return tensors of their own with each call"
        )
    _RETURNED[id(step)] = ref(new)


def _elsewhere(new: Tensor, values: Tensor) -> bool:
    """Whether a tensor is sparse, or on another device."""
    return new.layout != torch.strided or new.device != values.device


def _form(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    usual = value.layout == torch.strided and value.device.type == "cpu"
    where = "" if usual else f" ({value.layout} on {value.device})"
    return f"{value.dtype} {list(value.shape)}{where}"

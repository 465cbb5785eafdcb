"""Trains cells on two ranks: with recd_plugins, with TorchRec alone and unsharded."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.drop_in.matrix.axes import OPTIMIZERS, PIPELINES, REST, Rest, table_of
from tests.drop_in.matrix.batches import BATCHES
from tests.drop_in.matrix.modules import MODULES
from tests.drop_in.matrix.trainer import Cell, Variant
from tests.sharded import whole
from torch import Tensor
from torchrec.distributed import comm_ops

from recd_plugins.runtime.errors import RankError, RecdError
from recd_plugins.testing.device import DEVICE
from recd_plugins.testing.gloo import run_on_ranks

#: A rank that fails leaves the others in a collective for so long.
_TIMEOUT = timedelta(seconds=10 if DEVICE.type == "cpu" else 20)
#: Cells in one call: their waits for ranks that fail fit into its time limit.
_AT_A_TIME = 6
# An unsharded model sums in another order, and Adagrad divides by small numbers.
_NEAR_TRUTH = 1e-5
_LOST = re.compile("gloo|[Tt]imeout|Timed out|Connection (closed|reset)")


@dataclass
class Trained:
    """One side of a cell on one rank: losses and parameters, whole tables, warnings, errors."""

    values: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)
    still: set[str] = field(default_factory=set)  # tables that never moved
    warned: list[str] = field(default_factory=list)
    error: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Seen:
    """One rank's differences; None if a side failed or there is no unsharded model."""

    ours: Trained
    stock_error: str
    to_stock: float | None
    to_truth: float | None
    stock_to_truth: float | None
    changed: bool | None


@dataclass(frozen=True)
class Outcome:
    """``equal``, ``warned``, ``refused``, ``fault``, or where TorchRec fails, and a message."""

    sign: str
    said: str = ""


def outcome_of(cell: Cell, ranks: Sequence[Seen]) -> Outcome:
    """Return the outcome of a cell; a fault if it trains differently without a message."""
    ours = [seen.ours for seen in ranks]
    error = next((each.error for each in ours if each.error), "")
    stock_error = next((seen.stock_error for seen in ranks if seen.stock_error), "")
    warned = " | ".join(dict.fromkeys(text for each in ours for text in each.warned))
    if error:
        if all(each.refused for each in ours if each.error):
            return Outcome("refused", error)
        return Outcome("TorchRec fails" if stock_error else "fault", error)
    to_stock = _most([seen.to_stock for seen in ranks])
    to_truth = _most([seen.to_truth for seen in ranks])
    stock_to_truth = _most([seen.stock_to_truth for seen in ranks])
    still = set.intersection(*(each.still for each in ours))
    ignored = False in {seen.changed for seen in ranks}
    if PIPELINES[cell.pipeline].trains and (still or ignored):
        what = f"never moved: {sorted(still)}" if still else "changes nothing"
        return Outcome("warned", warned) if warned else Outcome("fault", what)
    near_stock = to_stock is not None and to_stock <= REST[cell.rest].near
    if to_truth is not None and to_truth > _NEAR_TRUTH:
        if near_stock and warned:
            return Outcome("warned", warned)
        return Outcome("fault", f"{to_truth:.1e} off, TorchRec {stock_to_truth} {stock_error}")
    if stock_error or (stock_to_truth or 0.0) > _NEAR_TRUTH:
        return Outcome("TorchRec fails", stock_error or f"it is {stock_to_truth:.1e} off")
    return Outcome("equal") if near_stock else Outcome("fault", f"{to_stock} off TorchRec's")


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def outcomes_of(cells: list[Cell]) -> dict[Cell, Outcome]:
    """Train cells on two ranks. A cell that ends a rank is a fault."""
    found: dict[Cell, Outcome] = {}
    for start in range(0, len(cells), _AT_A_TIME):
        part = cells[start : start + _AT_A_TIME]
        try:
            seen = run_on_ranks(train_cells, 2, part)
            found |= {c: outcome_of(c, of) for c, *of in zip(part, *seen, strict=True)}
        except (RecdError, RankError) as error:
            if len(part) == 1:
                found[part[0]] = Outcome("fault", str(error))
            else:
                for cell in part:
                    found |= outcomes_of([cell])
    return found


def train_cells(rank: int, world_size: int, cells: list[Cell]) -> list[Seen]:
    torch.set_num_threads(1)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    return [see(cell, rank) for cell in cells]


def see(cell: Cell, rank: int) -> Seen:
    ours, plan = attempt(cell, "ours", rank)
    stock, _ = attempt(cell, "stock", rank, plan)
    optimizer = OPTIMIZERS[cell.optimizer]
    form, loop = BATCHES[cell.batch], PIPELINES[cell.pipeline]
    has_truth = all(part.truth for part in (MODULES[cell.module], REST[cell.rest], loop))
    truth = None
    if has_truth and (optimizer.reference or not loop.trains):
        truth = attempt(cell, "whole", rank)[0]
    elif cell.batch != "plain" and not form.plain_for_stock:
        truth = attempt(replace(cell, batch="plain"), "stock", rank, plan)[0]
    changed = None
    if optimizer.unlike is not None:
        name = "unlike"
        OPTIMIZERS[name] = optimizer.unlike
        other, _ = attempt(replace(cell, optimizer=name), "stock", rank, plan)
        apart = _difference(stock if ours.error else ours, other)
        changed = None if apart is None else apart != 0.0
    return Seen(
        ours,
        stock.error,
        _difference(ours, stock),
        _difference(ours, truth),
        _difference(stock, truth),
        changed,
    )


def attempt(cell: Cell, flow: str, rank: int, plan: Any = None) -> tuple[Trained, Any]:
    """Train one side, and return it with the plan that it made or was given."""
    trained, made, side = Trained(), [plan], None
    group: Any = dist.new_group(timeout=_TIMEOUT, backend="gloo")
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: record.name != "recd_plugins.drop_in.dedup")
    handler.emit = lambda record: trained.warned.append(  # type: ignore[method-assign]
        record.getMessage()
    )
    logger = logging.getLogger("recd_plugins")
    logger.addHandler(handler)
    if REST[cell.rest].compiled:
        torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            side = _train(cell, flow, rank, group, trained, made)
    except Exception as error:
        trained.error = f"{type(error).__name__}: {error}"
        trained.refused = isinstance(error, RecdError)
    finally:
        logger.removeHandler(handler)
        comm_ops.set_use_sync_collectives(False)  # a pipeline that fails leaves them on
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, (trained.error, trained.refused))
    # Errors that only say that another rank failed come last.
    failed = sorted(
        (bool(_LOST.search(text)), not refused, text) for text, refused in errors if text
    )
    if failed:  # one rank's failure is all ranks'
        _, unclear, trained.error = failed[0]
        trained.refused = not unclear
    elif side is not None:
        _keep(side, trained)
    dist.destroy_process_group(group)
    return trained, made[0]


def _train(cell: Cell, flow: str, rank: int, group: Any, trained: Trained, made: list[Any]) -> Any:
    rest = REST[cell.rest]
    sides = _sides(rest, flow)
    side: Any = None
    if rest.state and flow == "ours":
        Variant(cell, "ours", rank, group, made)
    for turn, name in enumerate(sides):
        before = side
        if before is None or not (name == "whole" and "whole" not in rest.state):
            side = Variant(cell, name, rank, group, made, seed=turn)
        if before is not None and side is not before:
            _load(side, before)
        with comm_ops.torchrec_use_sync_collectives() if rest.sync else nullcontext():
            for step, (loss, predictions) in enumerate(side.train()):
                trained.values[f"loss {turn}.{step}"] = loss.float().cpu()
                trained.values[f"predictions {turn}.{step}"] = predictions.float().cpu()
            trained.values["evaluation"] = side.evaluate().float().cpu()
    return side


def _sides(rest: Rest, flow: str) -> list[str]:
    """Return the sides that train in turn; TorchRec's in place of ours, in its flow."""
    if not rest.state:
        return [flow]
    names = rest.state.split(" to ")
    if flow == "whole":
        return ["whole", "whole"]
    return ["stock" if name == "ours" and flow == "stock" else name for name in names]


def _load(side: Variant, before: Variant) -> None:
    state = before.dmp.state_dict()
    if "whole" in (side.side, before.side):
        side.dmp.load_state_dict(whole(state))
    else:
        side.dmp.load_state_dict(state)
        side.optimizer.load_state_dict(before.optimizer.state_dict())


def _keep(side: Variant, trained: Trained) -> None:
    for name, value in whole(side.dmp.state_dict()).items():
        if table := table_of(name):
            trained.tables[name] = value.float()
            if torch.equal(value, side.before[name].cpu()):
                trained.still.add(table)
        elif value.is_floating_point():
            trained.values[name] = value.float()


def _difference(one: Trained, other: Trained | None) -> float | None:
    """Return the largest difference of numbers that both have; None if one of them failed."""
    if other is None or one.error or other.error:
        return None
    common = one.values.keys() & other.values.keys()
    pairs = [(one.values[name], other.values[name]) for name in common]
    pairs += [(table, other.tables[name]) for name, table in one.tables.items()]
    return max(_apart(*pair) for pair in pairs)


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    apart = (one - other).abs() / other.abs().clamp(min=1.0)
    # Losses that grow without bound end in the same infinities.
    apart = apart.masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
    return float(apart.nan_to_num(nan=float("inf")).max())

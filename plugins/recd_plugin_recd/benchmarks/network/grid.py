"""What is measured on networks: cells of workload, nodes and rate, and the sides of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from recd_plugins.api import RecdError
from recd_plugins.api.registry import did_you_mean
from recd_plugins.testing.benchmark import Size

Group = Literal["stock", "alone", "joined", "auto", "every"]
WorkloadName = Literal["papercal", "rm1", "requests"]
#: What a sharding entry says.
Entry = dict[str, Any]

RATES = ("unshaped", "1gbit", "200mbit", "100mbit", "50mbit")
NODES = ("2x1", "4x1", "2x2", "4x2")
WORKLOADS: tuple[WorkloadName, ...] = ("papercal", "rm1", "requests")
GROUPS: tuple[Group, ...] = ("stock", "alone", "joined", "auto", "every")
#: Of the smaller sizes; all others are for ``reference``.
_SMALL = {"papercal", "4x1", "200mbit", "stock", "alone", "joined", "auto"}
#: Only where they are asked for.
_ASKED = {"2x1", "100mbit"}
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Side:
    """One way to train the model of a cell.

    Attributes:
        name: what reports call it.
        group: why it is there.
        deduplicated: whether batches are IKJTs.
        sequences: the sharding of tables whose features are pooled as sequences.
        pooled: that of all others; None where the first is for all.
        stock: with TorchRec's own sharders, which have no row-wise bags on CPU.
        overlap: ``training.overlap``.
    """

    name: str
    group: Group
    deduplicated: bool
    sequences: Entry
    pooled: Entry | None = None
    stock: bool = False
    overlap: bool | None = None


@dataclass(frozen=True)
class Cell:
    """A workload on nodes with links of a rate.

    Attributes:
        nodes: nodes x ranks of each, ``4x1``.
        rate: as ``tc`` takes it, or ``unshaped``.
    """

    workload: WorkloadName
    nodes: str
    rate: str

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.workload} {self.nodes} {self.rate}"

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return int(self.nodes.partition("x")[0])

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each."""
        return int(self.nodes.partition("x")[2])

    @property
    def bytes_per_second(self) -> float | None:
        """Of a link, in one direction; None of an unshaped one."""
        if self.rate == "unshaped":
            return None
        return float(self.rate[:-4]) * _UNITS[self.rate[-4:]] / 8


def chosen(size: Size, only: str | None) -> tuple[list[Cell], list[Side]]:
    """Cells, and the sides of each.

    Args:
        size: what is measured without ``only``.
        only: names with commas between them; of an axis that has one of them only those.

    Raises:
        RecdError: a name that there is not, or a choice where there is none.
    """
    if size == "tiny":
        if only is not None:
            raise RecdError(f"--only {only!r}: size tiny has one cell; name another --size")
        everyone = {side.name: side for side in _sides()}
        names = ("stock planner", "IKJT, joint coalesced + planner")
        return [Cell("papercal", "2x1", "200mbit")], [everyone[name] for name in names]
    asked = _names(only)
    axes = [
        [name for name in axis if name in asked]
        or [name for name in axis if name not in _ASKED and (size == "reference" or name in _SMALL)]
        for axis in (WORKLOADS, NODES, RATES, GROUPS)
    ]
    cells = [Cell(workload, nodes, rate) for workload, nodes, rate in product(*axes[:3])]  # type: ignore[arg-type]
    return cells, _sides_of(asked, axes[3])


def chosen_of(names: Iterable[str], only: str | None) -> tuple[list[Cell], list[Side]]:
    """Cells that were measured, and the sides that each may have.

    Args:
        names: of cells.
        only: as of ``chosen``; without it all.

    Raises:
        RecdError: a name that there is not, or no cell is left.
    """
    asked = _names(only)
    cells = [
        cell
        for cell in (Cell(*name.split(" ")) for name in names)  # type: ignore[arg-type]
        for own in [(cell.workload, cell.nodes, cell.rate)]
        if all(
            name in asked or asked.isdisjoint(axis)
            for name, axis in zip(own, (WORKLOADS, NODES, RATES), strict=True)
        )
    ]
    if not cells:
        raise RecdError(f"--only {only!r}: no cell that was measured is left")
    return cells, _sides_of(asked, [group for group in GROUPS if group in asked] or GROUPS)


def _sides_of(asked: Set[str], groups: Sequence[str]) -> list[Side]:
    """Those that are asked for, else all of the groups; stock ones always."""
    sides = list(_sides())
    if not asked.isdisjoint(side.name for side in sides) and asked.isdisjoint(GROUPS):
        groups = []
    return [s for s in sides if s.name in asked or s.group in groups or s.group == "stock"]


def _names(only: str | None) -> set[str]:
    """Sides have commas in their names: the longest that fits is taken."""
    sides = [side.name for side in _sides()]
    known = sorted({*RATES, *NODES, *WORKLOADS, *GROUPS, *sides}, key=len, reverse=True)
    left, found = (only or "").strip(), set()
    while left:
        name = next((name for name in known if f"{left},".startswith(f"{name},")), None)
        if name is None:
            first, short = left.partition(",")[0], [*WORKLOADS, *NODES, *RATES, *GROUPS]
            raise RecdError(
                f"--only: {first!r} is none of {', '.join(short)}, and no side begins so"
                + did_you_mean(first, [*short, *sides])
            )
        found.add(name)
        left = left[len(name) :].lstrip(", ")
    return found


def _sides() -> list[Side]:
    row_wise, planner = {"use": "torchrec.row_wise"}, {"use": "torchrec.planner"}
    two_tier, joint = {"use": "flexshard.two_tier"}, {"use": "flexshard.joint"}
    named = [
        Side("KJT, row-wise", "stock", False, row_wise),
        Side("stock table-wise", "stock", False, {"use": "torchrec.table_wise"}, stock=True),
        Side("stock planner", "stock", False, planner, stock=True),
    ]
    columns = [
        ("row-wise", row_wise, None),
        ("planner", planner, None),
        ("two tiers", two_tier, planner),
        ("joint", joint, planner),
        ("row-wise, all coalesced", _coalesced(row_wise), None),
        ("joint, all coalesced", _coalesced(joint), _coalesced(row_wise)),
        ("joint coalesced + planner", _coalesced(joint), planner),
    ]
    alone = {"KJT, two tiers", "KJT, joint", "KJT, row-wise, all coalesced", "IKJT, planner"}
    for deduplicated, (words, sequences, pooled) in product((False, True), columns):
        name = f"{_batches(deduplicated)}, {words}"
        if any(side.name == name for side in named):
            continue
        group: Group = "alone" if name in alone else "joined"
        named.append(Side(name, group, deduplicated, sequences, pooled))
    named += [
        Side(f"{_batches(deduplicated)}, auto", "auto", deduplicated, {"use": "auto"})
        for deduplicated in (False, True)
    ]
    # TorchRec's own loop.
    named = [replace(each, overlap=False) if each.group == "stock" else each for each in named]
    waiting = [
        replace(side, name=f"{side.name} without overlap", group="every", overlap=False)
        for side in named
        if side.group == "auto"
    ]
    return [*named, *waiting, *_every(named)]


def _every(named: Sequence[Side]) -> Iterator[Side]:
    """All combinations but those that have a name."""
    there = {(s.deduplicated, _text(s.sequences), _text(s.pooled or s.sequences)) for s in named}
    shardings = ("row_wise", "table_wise", "planner")
    pooled = [{"use": f"torchrec.{name}"} for name in shardings]
    tiered: list[Entry] = [
        {"use": "flexshard.two_tier"},
        {"use": "flexshard.joint"},
        {"use": "flexshard.joint", "options": {"minimise": "bytes"}},
    ]
    for deduplicated, s, s_coalesced, p, p_coalesced in product(
        (False, True), [*pooled, *tiered], (False, True), pooled, (False, True)
    ):
        sequences = _coalesced(s) if s_coalesced else s
        others = _coalesced(p) if p_coalesced else p
        words = _text(sequences), _text(others)
        if (deduplicated, *words) not in there:
            name = f"{_batches(deduplicated)}, {' + '.join(words)}"
            yield Side(name, "every", deduplicated, sequences, others)


def _coalesced(entry: Entry) -> Entry:
    return {**entry, "options": {**entry.get("options", {}), "coalesce": True}}


def _batches(deduplicated: bool) -> str:
    return "IKJT" if deduplicated else "KJT"


def _text(entry: Entry) -> str:
    options = {"coalesce": "coalesced", "minimise": "for bytes"}
    words = [words for option, words in options.items() if option in entry.get("options", {})]
    return " ".join([entry["use"], *words])

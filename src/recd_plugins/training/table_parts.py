"""Table parts in a run: what they count, and the sections that they report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Section, TablePart, TrainedRun
from recd_plugins.registry.checked_part import CheckedPart, by_class, call_class
from recd_plugins.training.assembly import Assembled
from recd_plugins.values.channels import Channel

#: What the ranks of a run have observed, by class of part.
Observed = dict[str, Any]


def channels_of(parts: Sequence[CheckedPart], model: nn.Module) -> dict[Channel, str]:
    """Names of collectives that are counted apart.

    Raises:
        PluginError: two parts have other names for one.
    """
    found: dict[Channel, str] = {}
    named_by: dict[Channel, CheckedPart] = {}
    for part in parts:
        for channel, name in part.channels(model).items():
            first = named_by.setdefault(channel, part)
            if found.setdefault(channel, name) != name:
                raise PluginError(
                    f"{first} and {part} count the {channel[1]}s of process group {channel[0]} "
                    f"under two names, {found[channel]} and {name}: they cannot be told apart; "
                    "count them under one name, or in a process group of your own"
                )
    return found


def observed_by(parts: Sequence[CheckedPart], model: nn.Module, steps: int) -> Observed:
    """What this rank counted, once for all parts of a class."""
    return {
        _name(cls): call_class(some, "observe", model, steps)
        for cls, some in by_class(parts).items()
    }


def sections_of(
    assembled: Assembled,
    sent: Mapping[str, float] | None,
    ranks: Sequence[Observed],
    *,
    taken: Collection[str] = (),
) -> dict[str, Section]:
    """What table parts report, by the name of the section.

    Args:
        assembled: the trained model.
        sent: bytes of all ranks in one step by channel; None where nothing was counted.
        ranks: what each has observed.
        taken: names in the report that sections cannot have.

    Raises:
        PluginError: two parts report sections of one name, or one has a name that is taken.
    """
    if assembled.setting is None:  # a baseline has no parts
        return {}
    found: dict[str, Section] = {}
    for cls, parts in by_class(assembled.prepared.checked_parts).items():
        run = TrainedRun(
            assembled.dmp.module,
            assembled.dmp.plan,
            assembled.tables,
            assembled.setting,
            sent,
            [rank[_name(cls)] for rank in ranks],
        )
        for section in call_class(parts, "sections", run):
            if section.name in taken or section.name in found:
                raise PluginError(
                    f"{_name(cls)} reports a section {section.name}, which the report of a run "
                    "has already: give it another name"
                )
            found[section.name] = section
    return found


def _name(cls: type[TablePart]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

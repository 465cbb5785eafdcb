"""Checks of the sections of topology files that packages register."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from recd_plugins.errors import PluginError
from recd_plugins.plugin_modules import qualified

#: What a ``TopologySpec`` has itself; it is not imported for them, since it needs torch.
OF_TOPOLOGIES = frozenset(
    {
        "collective_rates",
        "collectives",
        "costs",
        "ddr_bandwidth",
        "ddr_bytes",
        "device",
        "flops",
        "hbm_bandwidth",
        "hbm_bytes",
        "hbm_to_ddr_bandwidth",
        "inter_node_bandwidth",
        "intra_node_bandwidth",
        "least_costs",
        "memory_bytes",
        "nodes",
        "ranks_per_node",
        "sections",
        "to_torchrec",
        "with_section",
        "world_size",
    }
)
_WORD = re.compile(r"[a-z][a-z0-9_]*")


def check_sections(returned: Any, others: Mapping[str, type[BaseModel]], where: str) -> None:
    """Refuse what are no usable sections, or whose names are taken.

    Args:
        returned: by the hook.
        others: sections of other packages.
        where: the hook, for messages.

    Raises:
        PluginError: says what is wrong, after ``where``.
    """
    if not isinstance(returned, Mapping):
        raise PluginError(
            f"{where} returned {returned!r:.80}; return models by name, {{}} for none"
        )
    for name, model in returned.items():
        if not (isinstance(name, str) and _WORD.fullmatch(name)):
            raise PluginError(f"{where}: {name!r:.80} is no word in lower case, as in 'links'")
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginError(
                f"{where}: {name} is {model!r:.80}; expected a pydantic model's class"
            )
        if name in OF_TOPOLOGIES or hasattr(BaseModel, name):
            raise PluginError(f"{where}: {name} is recd-plugins' own; take another name")
        if name in others:
            raise PluginError(
                f"{where}: {name} is the section of {qualified(others[name])}; rename it, or leave "
                "one package out (--without NAME)"
            )

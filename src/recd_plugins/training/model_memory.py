"""Whether the model of a registry fits into this machine, before its memory is asked for."""

from __future__ import annotations

import os

import torch

from recd_plugins.errors import SetupError
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.model.build import build_model
from recd_plugins.registry import Registry


def check_model_fits(registry: Registry, schema: FeatureSchema) -> None:
    """Refuse a model whose parameters alone are more than the memory of this machine.

    Raises:
        SetupError: names what they take, the largest of them, and what there is.
    """
    with torch.random.fork_rng([]), torch.device("meta"):
        sizes = {
            name: parameter.nbytes
            for name, parameter in build_model(registry, schema).named_parameters()
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(sizes.values()) > memory:
        largest = max(sizes, key=sizes.__getitem__)
        raise SetupError(
            f"{registry.path}: the model's parameters take {sum(sizes.values()) / 1e9:,.1f} GB, of "
            f"which {largest} takes {sizes[largest] / 1e9:,.1f} GB, and this machine has "
            f"{memory / 1e9:,.1f} GB; take fewer rows or smaller layers in the section model"
        )

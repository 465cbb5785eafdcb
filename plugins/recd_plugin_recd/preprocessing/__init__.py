"""Transforms of ids and numbers, scriptable: TorchArrow's where it defines them."""

from recd_plugin_recd.preprocessing.plugins import (
    BoxCox,
    Bucketize,
    Clamp,
    FirstX,
    Logit,
    MapId,
    NGram,
    Onehot,
    SigridHash,
)

__all__ = [
    "BoxCox",
    "Bucketize",
    "Clamp",
    "FirstX",
    "Logit",
    "MapId",
    "NGram",
    "Onehot",
    "SigridHash",
]

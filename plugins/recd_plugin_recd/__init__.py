"""RecD (arXiv 2211.05239): session data, deduplication, preprocessing and pooling plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

    from recd_plugins.api import Plugin

REQUIRES_API = 2


@hookimpl
def register_plugins() -> Sequence[type[Plugin]]:
    from recd_plugin_recd import ikjt, pooling, preprocessing
    from recd_plugin_recd.interactions import Interactions
    from recd_plugin_recd.partial_ikjt import PartialIkjtConverter
    from recd_plugin_recd.session_parquet import SessionParquet
    from recd_plugin_recd.whole_requests import WholeRequests

    return [
        Interactions,
        SessionParquet,
        ikjt.IkjtConverter,
        ikjt.KjtConverter,
        ikjt.ListDictConverter,
        PartialIkjtConverter,
        *(getattr(preprocessing, name) for name in preprocessing.__all__),
        pooling.AttentionPooling,
        pooling.DinPooling,
        pooling.MaxPooling,
        pooling.MeanPooling,
        pooling.SumPooling,
        pooling.TargetAttentionPooling,
        pooling.TransformerPooling,
        WholeRequests,
    ]


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_recd.analyze import analyze
    from recd_plugin_recd.cluster import cluster
    from recd_plugin_recd.convert_layout import convert_layout
    from recd_plugin_recd.logs import logs
    from recd_plugin_recd.papercal_table import generate

    for command in (analyze, cluster, convert_layout, generate, logs):
        cli.add_command(command)


@hookimpl
def register_starts() -> Sequence[click.Command]:
    from recd_plugin_recd.models import STARTS

    return STARTS

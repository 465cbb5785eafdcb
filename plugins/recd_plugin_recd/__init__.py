"""RecD: session data, deduplicating converters, preprocessing and pooling on unique rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recd_plugins.api import hookimpl

if TYPE_CHECKING:
    import click

    from recd_plugins.api import Converter, Dataset, Internal, Pooling, Preprocessing

REQUIRES_API = 2


@hookimpl
def register_datasets() -> Sequence[type[Dataset]]:
    from recd_plugin_recd.interactions import Interactions
    from recd_plugin_recd.session_parquet import SessionParquet

    return [Interactions, SessionParquet]


@hookimpl
def register_converters() -> Sequence[type[Converter]]:
    from recd_plugin_recd.ikjt import IkjtConverter, KjtConverter, ListDictConverter
    from recd_plugin_recd.partial_ikjt import PartialIkjtConverter

    return [IkjtConverter, KjtConverter, ListDictConverter, PartialIkjtConverter]


@hookimpl
def register_preprocessing() -> Sequence[type[Preprocessing]]:
    from recd_plugin_recd import preprocessing

    return [getattr(preprocessing, name) for name in preprocessing.__all__]


@hookimpl
def register_poolings() -> Sequence[type[Pooling]]:
    from recd_plugin_recd.pooling.plugins import (
        AttentionPooling,
        DinPooling,
        MaxPooling,
        MeanPooling,
        SumPooling,
        TransformerPooling,
    )

    return [AttentionPooling, DinPooling, MaxPooling, MeanPooling, SumPooling, TransformerPooling]


@hookimpl
def register_commands(cli: click.Group) -> None:
    from recd_plugin_recd.analyze.command import analyze
    from recd_plugin_recd.cluster.command import cluster
    from recd_plugin_recd.convert_layout import convert_layout
    from recd_plugin_recd.generate import generate
    from recd_plugin_recd.logs.commands import logs

    cli.add_command(analyze)
    cli.add_command(cluster)
    cli.add_command(convert_layout)
    cli.add_command(generate)
    cli.add_command(logs)


@hookimpl
def register_starts() -> Sequence[click.Command]:
    from recd_plugin_recd.models import STARTS

    return STARTS


@hookimpl
def register_internals() -> Sequence[Internal]:
    from recd_plugin_recd.internals import INTERNALS

    return INTERNALS

"""``recd logs``: log shards, and Kafka topics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recd_plugin_recd import command_options
from recd_plugins.api import DataError
from recd_plugins.api.commands import (
    AT_LEAST_1,
    COUNT_FROM_0,
    OUTPUT,
    OUTPUT_FOLDER,
    OUTPUT_PATH,
    new_place,
    output_console,
    progress_bars,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from recd_plugin_recd.logs.damage import Damage

_MB = 1 << 20

_path = click.Path(path_type=Path)

_servers = click.option("--servers", required=True, help="Kafka's bootstrap servers: HOST:PORT,...")
_topic = click.option("--topic", required=True)
_config = click.option(
    "--config",
    multiple=True,
    metavar="KEY=VALUE",
    help="More configuration of librdkafka, such as credentials.",
)


@click.group()
def logs() -> None:
    """Rows in a log: sharded by session, compressed in blocks, safe against damage."""


def _log_folder(ctx: click.Context, parameter: click.Parameter, value: Path) -> Path | None:
    """A folder, which has a name where it is made."""
    return value if ctx.params["append"] else new_place(ctx, parameter, value)


@logs.command()
@click.argument("source", type=_path)
@click.argument("folder", type=OUTPUT_FOLDER, callback=_log_folder)
@command_options.session
@click.option(
    "--shards",
    type=click.IntRange(1, 99_999),
    help="Files of the log, each held open.  [default: 16]",
)
@click.option(
    "--key",
    type=click.Choice(["session", "message"]),
    help="What decides the shard of a row: its session, or chance.  [default: session]",
)
@click.option(
    "--record",
    type=click.Choice(["sample", "batch"]),
    help="How a block stores its rows: one after the other, or as an Arrow record batch.  "
    "[default: sample]",
)
@click.option(
    "--block-size",
    type=click.FloatRange(min=0.001, max=1024),
    default=4,
    show_default=True,
    help="MB of rows that make a block; each shard gathers as many in memory.",
)
@click.option(
    "--sort/--no-sort",
    default=True,
    show_default=True,
    help="Bring the rows of a session together inside a block.",
)
@click.option("--level", type=click.IntRange(1, 22), default=3, show_default=True, help="zstd's.")
@click.option(
    "--long-distance", is_flag=True, help="zstd's long-distance matching: slower; for --no-sort."
)
@click.option(
    "--append",
    is_flag=True,
    is_eager=True,  # before FOLDER is looked at
    help="Add to the log in FOLDER, sharded as it is.",
)
@click.pass_obj
def write(
    plugins_dir: Path | None,
    source: Path,
    folder: Path,
    session: str | None,
    shards: int | None,
    key: str | None,
    record: str | None,
    block_size: float,
    sort: bool,
    level: int,
    long_distance: bool,
    append: bool,
) -> None:
    """Write the rows of SOURCE to the log in FOLDER.

    SOURCE is a Parquet file, a folder of them, or a registry file, whose dataset is read.
    """
    from recd_plugin_recd.logs.compression import Compression
    from recd_plugin_recd.logs.ingest import open_rows, write_log
    from recd_plugin_recd.logs.log_writer import LogSettings
    from recd_plugin_recd.logs.shard_files import log_header

    usual = (log_header(folder) if append else None) or LogSettings()
    rows = open_rows(source, session, plugins_dir, default=usual.session)
    settings = LogSettings(
        session=rows.keys.session,
        num_shards=shards or usual.num_shards,
        key=key or usual.key,  # type: ignore[arg-type]
        record=record or usual.record,  # type: ignore[arg-type]
        block_size=round(block_size * _MB),
        sort=sort,
        compression=Compression(level, long_distance),
    )
    found = _Damages()
    written = 0
    with progress_bars() as add_bar:
        advance = add_bar(f"writing {folder.name}", rows.num_rows)

        def count(num_rows: int) -> None:
            nonlocal written
            written += num_rows
            advance(num_rows)

        log = write_log(rows, folder, settings, append=append, report=found, progress=count)
    found.show()
    ratio = log.raw_bytes / max(1, log.stored_bytes)
    click.echo(
        f"{folder}: {written:,} rows in {settings.num_shards} shards, "
        f"{log.stored_bytes / 1e6:.1f} MB, compressed {ratio:.2f}x"
    )


@logs.command()
@click.argument("source", type=_path)
@click.argument("destination", type=OUTPUT_PATH)
@click.option(
    "--offsets",
    type=OUTPUT_PATH,
    help="Read what is new since this file was written, then update it.",
)
@click.option("--skip-damaged", is_flag=True, help="Succeed although records were lost.")
@click.option("--force", is_flag=True, help="Replace DESTINATION where it exists.")
def read(
    source: Path, destination: Path, offsets: Path | None, skip_damaged: bool, force: bool
) -> None:
    """Write the rows of the log SOURCE, a folder or one shard, to a Parquet file.

    What is damaged is reported on stderr and left out; all else is written. The exit status is
    then 1, with --skip-damaged 0.
    """
    from recd_plugin_recd.logs.export import export_log

    found = _Damages()
    with progress_bars() as add_bar:
        done = export_log(
            source,
            destination,
            offsets=offsets,
            force=force,
            report=found,
            progress=add_bar(f"reading {source.name}", None),
        )
    found.show()
    if done.was_there:
        click.echo(f"{destination}: was written before, {done.num_rows:,} rows; offsets updated")
    elif done.num_rows or offsets is None:
        click.echo(f"{destination}: {done.num_rows:,} rows")
    else:
        click.echo(f"{source}: nothing new; no file written")
    if found and not skip_damaged:
        written = done.num_rows or offsets is None
        rest = f"{destination} has all that could be read" if written else "nothing more was read"
        raise DataError(
            f"{source} is damaged in {len(found)} places, shown above; {rest}. "
            "--skip-damaged takes that for success"
        )


@logs.command()
@click.argument("path", type=_path)
@click.option("--json", "json_path", type=OUTPUT, help="Write the report here.")
def stat(path: Path, json_path: Path | None) -> None:
    """Show what is in each shard of the log PATH, and check every block's checksum.

    Shards are compared with the log's manifest. The exit status is 1 where one is damaged, cut,
    missing, replaced or none of the log's.
    """
    from rich.table import Table

    from recd_plugin_recd.logs.stat import log_statistics
    from recd_plugins.api.files import write_json

    shards = log_statistics(path)
    table = Table("shard")
    for heading in ("blocks", "records", "MB", "raw MB", "ratio", "damaged"):
        table.add_column(heading, justify="right")
    for shard in shards:
        table.add_row(
            shard.path.name.removeprefix("shard-").removesuffix(".recdlog"),
            f"{shard.blocks:,}",
            f"{shard.records:,}",
            f"{shard.size / 1e6:.1f}",
            f"{shard.raw_bytes / 1e6:.1f}",
            f"{shard.ratio:.2f}",
            str(len(shard.damage)),
        )
    records, size = sum(shard.records for shard in shards), sum(shard.size for shard in shards)
    raw = sum(shard.raw_bytes for shard in shards)
    damages = _Damages([damage for shard in shards for damage in shard.damage])
    totals = {"records": records, "bytes": size, "raw_bytes": raw, "ratio": raw / max(1, size)}
    output_console().print(table)
    click.echo(f"{path}: {records:,} records, {size / 1e6:.1f} MB, {totals['ratio']:.2f}x")
    if json_path is not None:
        report: dict[str, Any] = {**totals, "shards": [shard.to_json() for shard in shards]}
        write_json(json_path, report)
    damages.show()
    if damages:
        raise DataError(f"{path} is damaged in {len(damages)} places, shown above")


@logs.command()
@click.argument("source", type=_path)
@_servers
@_topic
@command_options.session
@_config
@click.pass_obj
def produce(
    plugins_dir: Path | None,
    source: Path,
    servers: str,
    topic: str,
    session: str | None,
    config: tuple[str, ...],
) -> None:
    """Send the rows of SOURCE to a Kafka topic, sessions as partition keys.

    SOURCE is what it is for recd logs write. A run that is killed has sent some of the rows; to
    run it again sends them again.
    """
    from recd_plugin_recd.logs.data_errors import naming_source
    from recd_plugin_recd.logs.ingest import each_batch, log_schema, open_rows
    from recd_plugin_recd.logs.kafka_producer import KafkaProducer

    rows = open_rows(source, session, plugins_dir)
    schema = log_schema(rows)
    with naming_source(source):
        producer = KafkaProducer(servers, topic, schema, rows.keys.session, _settings(config))
    with progress_bars() as add_bar:
        advance = add_bar(f"sending to {topic}", rows.num_rows)

        def send(batch: pa.RecordBatch) -> None:
            producer.write(batch)
            advance(batch.num_rows)

        each_batch(rows, schema, send)
        producer.flush()
    click.echo(f"{topic}: {producer.delivered:,} rows delivered")


@logs.command()
@click.argument("folder", type=OUTPUT_FOLDER)
@_servers
@_topic
@click.option("--group", required=True, help="Whose offsets are read and committed.")
@click.option("--partition", "partitions", type=COUNT_FROM_0, multiple=True, help="[default: all]")
@click.option("--rows-per-file", type=AT_LEAST_1, default=65_536, show_default=True)
@_config
def consume(
    folder: Path,
    servers: str,
    topic: str,
    group: str,
    partitions: tuple[int, ...],
    rows_per_file: int,
    config: tuple[str, ...],
) -> None:
    """Write what is new in a Kafka topic to Parquet files in FOLDER, and end.

    Offsets are committed when a file is in its place. However often this is killed and run again,
    every row is in one file once.
    """
    from recd_plugin_recd.logs.kafka_consumer import KafkaConsumer

    consumer = KafkaConsumer(
        servers,
        topic,
        group,
        folder,
        partitions=partitions,
        rows_per_file=rows_per_file,
        config=_settings(config),
    )
    written = 0
    with progress_bars() as add_bar:
        advance = add_bar(f"reading {topic}", None)

        def count(num_rows: int) -> None:
            nonlocal written
            written += num_rows
            advance(num_rows)

        files = consumer.run(count)
    click.echo(f"{folder}: {written:,} rows in {len(files)} new files")


def _settings(config: tuple[str, ...]) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in config]
    for setting, (_, equals, _) in zip(config, pairs, strict=True):
        if not equals:
            raise click.BadParameter(f"{setting!r} is not KEY=VALUE", param_hint="--config")
    return {name: value for name, _, value in pairs}


class _Damages(list["Damage"]):
    """Gathers damage while a progress bar is on the screen."""

    def __call__(self, damage: Damage) -> None:
        self.append(damage)

    def show(self) -> None:
        for damage in self:
            click.secho(str(damage), fg="yellow", err=True)

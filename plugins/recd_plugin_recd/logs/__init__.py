"""The commands ``recd logs``: logs sharded by session, and exchange with Kafka topics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recd_plugin_recd import command_options
from recd_plugins.api import DataError, cli_options, progress_bars

if TYPE_CHECKING:
    import pyarrow as pa

    from recd_plugin_recd.logs.log import Damage
    from recd_plugin_recd.sessions import SessionTable

_path = click.Path(path_type=Path)
_servers = click.option("--servers", required=True, help="Kafka bootstrap servers: HOST:PORT,...")
_topic = click.option("--topic", required=True, help="Name of the Kafka topic.")
_config = click.option(
    "--config",
    multiple=True,
    metavar="KEY=VALUE",
    help="librdkafka configuration, such as credentials. Can be repeated.",
)


@click.group()
def logs() -> None:
    """Write and read logs sharded by session, and exchange rows with Kafka topics."""


@logs.command()
@click.argument("source", type=_path)
@click.argument("folder", type=cli_options.OUTPUT_FOLDER, callback=cli_options.new_place)
@command_options.session
@click.option(
    "--shards", type=click.IntRange(1, 99_999), help="Number of shards of the log.  [default: 16]"
)
@click.option("--append", is_flag=True, help="Append rows to the existing log in FOLDER.")
@click.pass_obj
def write(
    plugins_dir: Path | None,
    source: Path,
    folder: Path,
    session: str | None,
    shards: int | None,
    append: bool,
) -> None:
    """Write the rows of SOURCE to the log in FOLDER.

    SOURCE is a Parquet file, a folder of Parquet files, or a registry file, whose training data is
    read.
    """
    from recd_plugin_recd.logs.log import INDEX, LogSettings, LogWriter, read_index
    from recd_plugin_recd.sessions import plain_schema
    from recd_plugins.api import folders

    usual: Any = LogSettings()
    if append and (folder / INDEX).exists():
        usual = read_index(folder)
    elif not append and folder.exists() and any(folder.iterdir()):
        raise DataError(
            f"{folder} exists already. Use --append to add rows to the log, or use another folder."
        )
    rows = _open_rows(source, session, usual.session, plugins_dir)
    settings = LogSettings(rows.keys.session, shards or usual.num_shards)
    with ExitStack() as stack:
        place = folder
        if not append:
            scratch = stack.enter_context(folders.scratch_folder(folder))
            place = scratch / folder.name
        advance = stack.enter_context(progress_bars.progress_bars())(
            f"writing {folder.name}", rows.num_rows
        )
        with LogWriter(place, plain_schema(rows.schema), settings) as log:
            written = _each_batch(rows, log.write, advance)
        if not append:
            folders.put(place, folder, scratch)
    ratio = log.raw_bytes / max(1, log.stored_bytes)
    click.echo(
        f"{folder}: {written:,} rows in {settings.num_shards} shards, "
        f"{log.stored_bytes / 1e6:.1f} MB, compressed {ratio:.2f}x"
    )


def _open_rows(path: Path, given: str | None, usual: str, plugins_dir: Path | None) -> SessionTable:
    """Open a Parquet table, which only needs a session column, or the data of a registry file."""
    from recd_plugin_recd.sessions import open_source

    if path.suffix in (".yaml", ".yml"):
        return open_source(path, session=given, plugins_dir=plugins_dir)
    # A log needs no time column: its rows stay in input order.
    session = given or usual
    return open_source(path, session=session, timestamp=session, plugins_dir=plugins_dir)


def _each_batch(
    source: SessionTable,
    write: Callable[[pa.RecordBatch], None],
    progress: Callable[[int], None],
) -> int:
    """Call ``write`` with all rows of ``source``, batch by batch. Return the number of rows."""
    from recd_plugin_recd.sessions import check_no_nulls, plain_rows, plain_schema

    written, schema = 0, plain_schema(source.schema)
    for partition in source.partitions:
        for rows in source.read(partition):
            check_no_nulls(rows, source.keys.session)
            write(plain_rows(rows, schema))
            written += len(rows)
            progress(len(rows))
    return written


@logs.command()
@click.argument("source", type=_path)
@click.argument("destination", type=cli_options.OUTPUT_PATH)
@click.option(
    "--offsets",
    type=cli_options.OUTPUT_PATH,
    help="Read only the rows after the position stored in this file, then update the file.",
)
@click.option("--force", is_flag=True, help="Replace DESTINATION if it exists.")
def read(source: Path, destination: Path, offsets: Path | None, force: bool) -> None:
    """Write the rows of the log SOURCE to a Parquet file.

    Damaged blocks are skipped and reported on stderr. In this case, the exit code is 1.
    """
    from recd_plugin_recd.logs.log import Consumer, ParquetFile, provenance
    from recd_plugins.api import file_utils

    damages: list[Damage] = []
    consumer = Consumer(source, offsets, damages.append)
    if file_utils.real_path(source) in file_utils.real_path(destination).parents:
        raise DataError(
            f"{destination} is inside the log {source}. Use another path for DESTINATION."
        )
    if offsets is not None:
        file_utils.check_writable(offsets)
    start = consumer.state()
    if destination.exists():
        done = provenance(destination)
        # A run that was killed before it saved its offsets has already written this file.
        if offsets is not None and not force and done is not None and done.get("from") == start:
            consumer.load(done["to"])
            consumer.commit()
            click.echo(
                f"{destination}: an earlier run has already written {done['rows']:,} rows. Updated "
                f"{offsets}"
            )
            return
        if not force:
            raise DataError(
                f"{destination} exists already. Use another path, or replace the file with --force."
            )
        if done is None:
            raise DataError(
                f"--force cannot replace {destination}, because another program wrote this file. "
                "Use another path."
            )
    with (
        progress_bars.progress_bars() as add_bar,
        ParquetFile(destination, consumer.schema()) as file,
    ):
        advance = add_bar(f"reading {source.name}", None)
        for rows in consumer:
            file.write(rows)
            advance(rows.num_rows)
        if written := bool(file.num_rows or offsets is None):
            file.close({"from": start, "to": consumer.state(), "rows": file.num_rows})
    if offsets is not None:
        consumer.commit()
    if written:
        click.echo(f"{destination}: {file.num_rows:,} rows")
    else:
        click.echo(f"{source}: the log has no new rows, so no file was written")
    for damage in damages:
        click.secho(str(damage), fg="yellow", err=True)
    if damages:
        raise DataError(
            f"{source}: {len(damages)} blocks or files are damaged, as listed above. All other "
            "rows were written. To get the damaged rows, restore the log from a backup."
        )


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
    """Send the rows of SOURCE to a Kafka topic, with the session id as the key of each message.

    SOURCE is a Parquet file, a folder of Parquet files, or a registry file. If the command is
    killed and run again, it sends all rows again.
    """
    from recd_plugin_recd.logs.kafka import KafkaProducer

    rows = _open_rows(source, session, "session_id", plugins_dir)
    producer = KafkaProducer(servers, topic, rows.keys.session, _settings(config))
    with progress_bars.progress_bars() as add_bar:
        _each_batch(rows, producer.write, add_bar(f"sending to {topic}", rows.num_rows))
        producer.flush()
    click.echo(f"{topic}: {producer.delivered:,} rows delivered")


@logs.command()
@click.argument("folder", type=cli_options.OUTPUT_FOLDER)
@_servers
@_topic
@click.option("--group", required=True, help="Kafka consumer group that stores the offsets.")
@_config
def consume(
    folder: Path,
    servers: str,
    topic: str,
    group: str,
    config: tuple[str, ...],
) -> None:
    """Write new messages of a Kafka topic to Parquet files in FOLDER, then exit.

    Every row is written exactly once, even if the command is killed and run again.
    """
    from recd_plugin_recd.logs.kafka import KafkaConsumer

    consumer = KafkaConsumer(servers, topic, group, folder, config=_settings(config))
    written = 0
    with progress_bars.progress_bars() as add_bar:
        advance = add_bar(f"reading {topic}", None)

        def count(num_rows: int) -> None:
            nonlocal written
            written += num_rows
            advance(num_rows)

        files = consumer.run(count)
    click.echo(f"{folder}: {written:,} rows in {len(files)} new files")


def _settings(config: tuple[str, ...]) -> dict[str, str]:
    for context in config:
        if "=" not in context:
            raise click.BadParameter(
                f"{context!r} does not have the form KEY=VALUE.", param_hint="--config"
            )
    return {name: value for name, _, value in (each.partition("=") for each in config)}

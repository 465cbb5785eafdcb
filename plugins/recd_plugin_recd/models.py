"""The commands ``recd init rm1``, ``rm2``, ``rm3`` and ``papercal`` (RecD, section 6.1)."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from recd_plugin_recd.papercal_table import Layout, ShapeName
from recd_plugins.api import cli_options, file_utils

_TEXT = """\
# {title}
# docs/configuration.md describes every key; `recd validate` checks a file without a run.
version: 1

# A synthetic table of user sessions. The first run generates it.
dataset:
  use: recd.session_parquet
  options:
    path: {path}
    generate: {{{generate}}}

# Stores each value once. `auto` groups features that change together in the first rows. Features
# that hardly repeat stay plain.
converter: {{use: recd.ikjt, options: {{groups: auto, min_dedupe_factor: 1.5}}}}

# Hashes 63-bit ids to table rows, on unique values only.
preprocessing:
  - {{use: recd.sigrid_hash, features: ["seq_*"], options: {{buckets: {sequence_rows}}}}}
  - {{use: recd.sigrid_hash, features: ["usr_*", "item_*"], options: {{buckets: {other_rows}}}}}

# Sequence features are looked up and pooled once per unique row. Other features are averaged.
pooling:
  - {{use: {pooling}, features: ["seq_*"], options: {{{pooling_options}}}}}

# Placement of table rows. `auto` picks the plan with the shortest predicted step from what the
# installed plugins offer.
sharding:
  - {{use: auto, tables: ["t_*"]}}

cache: []

# A DLRM: dot products of all pairs of features, and MLPs.
model:
  architecture: dlrm # or dcn, with a cross network
  embedding_dim: {embedding_dim}
  tables:
    t_seq_*: {{num_embeddings: {sequence_rows}}}
    t_usr_*: {{num_embeddings: {other_rows}}}
    t_item_*: {{num_embeddings: {other_rows}}}
  bottom_mlp: {bottom_mlp}
  top_mlp: {top_mlp}
  bag_pooling: mean
  pool_rows: unique # unique, or all to expand duplicates before pooling

training:
  batch_size: {batch_size} # rows per batch and rank
  ranks: {ranks}
  optimizer: rowwise_adagrad
  # Gradients of a row are far below eps, so its effective rate is learning_rate / eps. A smaller
  # eps amplifies rounding errors, so losses of --compare differ more.
  learning_rate: {learning_rate}
  dense_learning_rate: {dense_learning_rate}
  eps: 1.0e-3
"""


def rm_registry(
    name: ShapeName,
    *,
    folder: Path,
    rows: int,
    scale: float = 1.0,
    layout: Layout = "clustered",
    batch_size: int = 256,
    ranks: int = 2,
) -> str:
    """Return the text of a registry file (YAML) that generates a table and trains a model on it.

    Args:
        name: ``rm1``, ``rm2`` or ``rm3`` of the RecD paper (section 6.1), or ``papercal``.
        folder: parent folder of the generated table.
        rows: number of rows of the table.
        scale: size of rm1, rm2 and rm3, in (0, 1]. Multiplies embedding_dim and the widths of
            layers, and its square multiplies the rows of embedding tables.
        layout: order of the rows: ``clustered``, ``interleaved`` or ``stream``.
        batch_size: rows per batch and rank.
        ranks: number of processes that train.
    """

    def scaled(size: int, factor: float = scale, multiple_of: int = 4) -> int:
        return multiple_of * max(1, round(size * factor / multiple_of))

    of_model: dict[str, Any]
    pooling = {"pooling": "recd.attention", "pooling_options": "heads: 2"}
    if name == "papercal":
        folder_scale = table_scale = ""
        of_model = {
            "title": "PAPERCAL's demo: a DLRM on a table with the duplication that the RecD paper "
            "measured.",
            "sequence_rows": 100_000,
            "other_rows": 100_000,
            "embedding_dim": 16,
            "bottom_mlp": [64],
            "top_mlp": [128, 64],
        }
    else:
        folder_scale, table_scale = f"-scale{scale:g}", f"scale: {float(scale)!r}, "
        of_model = {
            "title": f"{name} at scale {scale:g}, a model like the RecD paper's {name.upper()} "
            "(plugins/recd_plugin_recd/README.md).",
            "sequence_rows": scaled(4_000_000, scale**2, 100),
            "other_rows": scaled(2_000_000, scale**2, 100),
            "embedding_dim": scaled(128),
            "bottom_mlp": [scaled(width) for width in (512, 256)],
            "top_mlp": [scaled(width) for width in (512, 512, 256)],
        }
    if name == "rm1":
        feed_forward = 4 * of_model["embedding_dim"]
        options = f"layers: 1, heads: 2, feed_forward: {feed_forward}"
        pooling = {"pooling": "recd.transformer", "pooling_options": options}
    # Chosen by normalized entropy of rm1 and papercal, over 16,384 rows at the default scale.
    learning_rate, dense_learning_rate = (0.1, 0.01) if name == "papercal" else (20.0, 0.003)
    table = folder / f"{name}{folder_scale}-{layout}-{rows}"
    return _TEXT.format(
        path=json.dumps(str(table), ensure_ascii=False),
        generate=f"shape: {name}, {table_scale}rows: {rows}, layout: {layout}",
        batch_size=batch_size,
        ranks=ranks,
        learning_rate=learning_rate,
        dense_learning_rate=dense_learning_rate,
        **of_model,
        **pooling,
    )


_LAPTOP_SCALE = 0.125
_HELP = """Write a registry file for {what} to FILE.

The first run generates the data.

\b
recd init {name} {name}.yaml
recd run {name}.yaml --compare
"""


_PARAMETERS: list[click.Parameter] = [
    click.Argument(["file"], type=cli_options.OUTPUT_PATH),
    click.Option(
        ["--scale"],
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="Size of rm1, rm2 or rm3. 1 needs a cluster: embedding_dim is 128, and tables have "
        "millions of rows. "
        f" [default: {_LAPTOP_SCALE}, for a laptop]",
    ),
    click.Option(
        ["--rows"],
        type=cli_options.AT_LEAST_1,
        default=16_384,
        show_default=True,
        help="Number of rows in the table.",
    ),
    click.Option(
        ["--batch-size"],
        type=cli_options.AT_LEAST_1,
        default=256,
        show_default=True,
        help="Number of rows per batch on each rank.",
    ),
    click.Option(
        ["--ranks"],
        type=cli_options.AT_LEAST_1,
        default=2,
        show_default=True,
        help="Number of processes that train.",
    ),
    click.Option(
        ["--data", "folder"],
        type=cli_options.OUTPUT_FOLDER,
        default=Path(".data"),
        show_default=True,
        help="Folder of the data. The first run generates a table there.",
    ),
    click.Option(["--force"], is_flag=True, help="Replace FILE if it exists."),
]


def _write(name: ShapeName, file: Path, scale: float | None, force: bool, **options: Any) -> None:
    if name == "papercal" and scale not in (None, 1):
        raise click.UsageError(
            "--scale applies only to rm1, rm2 and rm3. Remove --scale for papercal."
        )
    rows, batch_size, ranks = (options[each] for each in ("rows", "batch_size", "ranks"))
    if rows < batch_size * ranks:
        raise click.UsageError(
            f"--rows {rows} is too small for one batch of {batch_size} rows on each of {ranks} "
            "ranks. Raise --rows, or lower --batch-size or --ranks."
        )
    text = rm_registry(name, scale=scale or _LAPTOP_SCALE, **options)
    cli_options.check_output(file, force, begins=rb"(?ms).*^dataset *:")
    file_utils.write_text(file, text)
    size = "" if name == "papercal" else f" at scale {scale or _LAPTOP_SCALE:g}"
    click.echo(
        f"{file}: wrote {name}{size}. To train, run: recd run {shlex.quote(str(file))} --compare"
    )


def _start(name: ShapeName) -> click.Command:
    paper = f"a model like {name.upper()} in the RecD paper"
    what = "the demo model" if name == "papercal" else paper
    help = _HELP.format(what=what, name=name)
    return click.Command(name, callback=partial(_write, name), params=_PARAMETERS, help=help)


#: Commands of ``recd init``, by the name of a model.
STARTS = tuple(_start(name) for name in get_args(ShapeName))

"""``recd init``: registry files of models similar to those of the RecD paper (section 6.1)."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import click

from recd_plugins.api import cli_options, file_utils

ModelName = Literal["papercal", "rm1", "rm2", "rm3"]


@dataclass(frozen=True)
class ModelSizes:
    """Embedding width, rows of sequence and other tables, and hidden layer sizes."""

    embedding_dim: int
    sequence_rows: int
    other_rows: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]


def sizes_of(name: ModelName, scale: float) -> ModelSizes:
    """Scale widths by ``scale`` and table rows by its square."""
    if name == "papercal":
        return ModelSizes(16, 100_000, 100_000, (64,), (128, 64))
    return ModelSizes(
        embedding_dim=_scaled(128, scale, multiple_of=4),
        sequence_rows=_scaled(4_000_000, scale**2, multiple_of=100),
        other_rows=_scaled(2_000_000, scale**2, multiple_of=100),
        bottom_mlp=tuple(_scaled(width, scale, multiple_of=4) for width in (512, 256)),
        top_mlp=tuple(_scaled(width, scale, multiple_of=4) for width in (512, 512, 256)),
    )


def _scaled(size: int, scale: float, *, multiple_of: int) -> int:
    return multiple_of * max(1, round(size * scale / multiple_of))


ConverterName = Literal["recd.kjt", "recd.ikjt", "recd.partial_ikjt"]
Layout = Literal["clustered", "interleaved", "stream"]
Architecture = Literal["dlrm", "dcn"]

_CONVERTERS: dict[ConverterName, tuple[str, str]] = {
    "recd.kjt": ("Repeats every value, as stock TorchRec does.", "{use: recd.kjt}"),
    "recd.ikjt": (
        "Keeps each value once. `auto` finds, in the first rows, the features that change\n"
        "# together; those that hardly repeat stay as they are.",
        "{use: recd.ikjt, options: {groups: auto, min_dedupe_factor: 1.5}}",
    ),
    "recd.partial_ikjt": (
        "Keeps each value once, and of a list that moved on by some ids the new ones only.",
        "{use: recd.partial_ikjt, options: {features: auto, min_dedupe_factor: 1.5}}",
    ),
}

_ARCHITECTURES: dict[Architecture, str] = {
    "dlrm": "A DLRM: dot products of all pairs of features, and MLPs.",
    "dcn": "A DCN: a cross network over all features, and MLPs.",
}

_TEXT = """\
# {title}
# docs/configuration.md describes every key; `recd validate` checks a file without a run.
version: 1

# {sequences}
# {others}
# The table is generated where it is missing.
dataset:
  use: recd.session_parquet
  options:
    path: {path}
    generate: {{{generate}}}

# {converter_comment}
converter: {converter}

# 63-bit ids to rows of tables, on what the converter left.
preprocessing:
  - {{use: recd.sigrid_hash, features: ["seq_*"], options: {{buckets: {sequence_rows}}}}}
  - {{use: recd.sigrid_hash, features: ["usr_*", "item_*"], options: {{buckets: {other_rows}}}}}

# Sequence features: looked up and pooled once a unique row. All others are pooled element-wise, in
# bags.
pooling:
  - {{use: {pooling}, features: ["seq_*"], options: {{{pooling_options}}}}}

# Where the rows of tables live, and what is sent: `auto` takes, of what installed plugins offer,
# what the shortest step is predicted for.
sharding:
  - {{use: auto, tables: ["t_*"]}}

cache: []

# {architecture_comment}
model:
  architecture: {architecture} # or {other_architecture}
  embedding_dim: {embedding_dim}
  tables:
    t_seq_*: {{num_embeddings: {sequence_rows}}}
    t_usr_*: {{num_embeddings: {other_rows}}}
    t_item_*: {{num_embeddings: {other_rows}}}
  bottom_mlp: {bottom_mlp}
  top_mlp: {top_mlp}
  bag_pooling: mean
  pool_rows: unique # unique, or all: duplicates are made again before pooling

training:
  batch_size: {batch_size} # rows in a batch of one rank
  ranks: {ranks}
{steps}  optimizer: rowwise_adagrad
  # A row's gradients are far below eps, so that it learns at about learning_rate / eps; an eps as
  # small as they are amplifies rounding, and losses of --compare drift apart.
  learning_rate: {learning_rate}
  dense_learning_rate: {dense_learning_rate}
  eps: 1.0e-3
"""


def rm_registry(
    name: ModelName,
    *,
    folder: Path,
    rows: int,
    scale: float = 1.0,
    layout: Layout = "clustered",
    converter: ConverterName = "recd.ikjt",
    batch_size: int = 256,
    ranks: int = 2,
    steps: int | None = None,
    architecture: Architecture = "dlrm",
) -> str:
    """Return the text of a registry file that trains a model on a table of its shape.

    Args:
        name: rm1, rm2 and rm3 of the RecD paper (section 6.1), or PAPERCAL's demo.
        folder: parent folder of the table. The table's own folder is named after its generation
            options.
        rows: rows of the table.
        scale: scale of the widths, in (0, 1], see ``sizes_of``. Feature groups and counts do not
            change.
        layout: order of the table's rows.
        converter: with ``recd.kjt`` nothing is deduplicated.
        batch_size: rows in a batch of one rank.
        ranks: processes.
        steps: number of training steps; None trains one epoch.
        architecture: how to combine the feature vectors.
    """
    sizes = sizes_of(name, scale)
    scaled = "" if name == "papercal" else f"-scale{scale:g}"
    table = folder / f"{name}{scaled}-{layout}-{rows}"
    sequences, others = _features(name)
    pooling = ("recd.attention", "heads: 2")
    if name == "rm1":
        feed_forward = 4 * sizes.embedding_dim  # four times as wide, as usual
        pooling = ("recd.transformer", f"layers: 1, heads: 2, feed_forward: {feed_forward}")
    converter_comment, converter_entry = _CONVERTERS[converter]
    # Chosen by normalized entropy of rm1 and papercal, over 16,384 rows at the default scale.
    learning_rate, dense_learning_rate = (0.1, 0.01) if name == "papercal" else (20.0, 0.003)
    (other_architecture,) = _ARCHITECTURES.keys() - {architecture}
    title = (
        f"{name} at scale {scale:g}, a model like the RecD paper's {name.upper()} "
        "(plugins/recd_plugin_recd/README.md)."
    )
    if name == "papercal":
        title = (
            f"PAPERCAL's demo: a {architecture.upper()} on a table with the duplication that the "
            "RecD paper measured."
        )
    return _TEXT.format(
        title=title,
        sequences=sequences,
        others=others,
        path=json.dumps(str(table), ensure_ascii=False),
        generate=f"shape: {name}, "
        + (f"scale: {float(scale)!r}, " if scaled else "")
        + f"rows: {rows}, layout: {layout}",
        converter_comment=converter_comment,
        converter=converter_entry,
        pooling=pooling[0],
        pooling_options=pooling[1],
        architecture=architecture,
        architecture_comment=_ARCHITECTURES[architecture],
        other_architecture=other_architecture,
        sequence_rows=sizes.sequence_rows,
        other_rows=sizes.other_rows,
        embedding_dim=sizes.embedding_dim,
        bottom_mlp=list(sizes.bottom_mlp),
        top_mlp=list(sizes.top_mlp),
        batch_size=batch_size,
        ranks=ranks,
        steps="" if steps is None else f"  steps: {steps}\n",
        learning_rate=learning_rate,
        dense_learning_rate=dense_learning_rate,
    )


def _features(name: ModelName) -> tuple[str, str]:
    """Describe the features of a model."""
    from recd_plugin_recd.papercal import shape_of

    shape = shape_of(name)
    sequences = [each for each in shape.features if each.name.startswith("seq_")]
    users = sum(each.name.startswith("usr_") for each in shape.features)
    items = len(shape.features) - len(sequences) - users
    groups = len({each.clock for each in sequences})
    grouped = f"{groups} groups" if groups > 1 else "1 group"
    return (
        f"{len(sequences)} sequence features in {grouped} that change together,",
        f"{users} other features of the user, {items} of the item, {shape.num_dense} dense ones.",
    )


_LAPTOP_SCALE = 0.125
_HELP = """Write the registry of {what} to FILE, ready to run.

Data is generated by the first run.

\b
recd init {name} {name}.yaml
recd run {name}.yaml --compare
"""


_PARAMETERS: list[click.Parameter] = [
    click.Argument(["file"], type=cli_options.OUTPUT_PATH),
    click.Option(
        ["--scale"],
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="Sizes of rm1, rm2 and rm3: 1 is a model for a cluster, with 128 scalars in an "
        "embedding and millions of rows in a table. "
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
        help="Number of rows in one rank's batch.",
    ),
    click.Option(
        ["--ranks"],
        type=cli_options.AT_LEAST_1,
        default=2,
        show_default=True,
        help="Number of processes that train.",
    ),
    click.Option(
        ["--layout"],
        type=click.Choice(["clustered", "interleaved", "stream"]),
        default="clustered",
        show_default=True,
        help="Order of the table's rows, as in `recd generate`.",
    ),
    click.Option(
        ["--converter"],
        type=click.Choice(["recd.ikjt", "recd.partial_ikjt", "recd.kjt"]),
        default="recd.ikjt",
        show_default=True,
        help="How to convert rows to tensors. recd.kjt does not deduplicate.",
    ),
    click.Option(
        ["--architecture"],
        type=click.Choice(["dlrm", "dcn"]),
        default="dlrm",
        show_default=True,
        help="How to combine the feature vectors: dot products or a cross network.",
    ),
    click.Option(
        ["--data", "folder"],
        type=cli_options.OUTPUT_FOLDER,
        default=Path(".data"),
        show_default=True,
        help="Folder of the table. The first run generates it.",
    ),
    click.Option(["--force"], is_flag=True, help="Replace FILE if it exists."),
]


def _write(name: ModelName, file: Path, scale: float | None, force: bool, **options: Any) -> None:
    if name == "papercal" and scale not in (None, 1):
        raise click.UsageError("papercal has one size; --scale is for rm1, rm2 and rm3")
    rows, batch_size, ranks = (options[each] for each in ("rows", "batch_size", "ranks"))
    if rows < batch_size * ranks:
        raise click.UsageError(
            f"{rows} rows are no batch of {batch_size} for each of {ranks} ranks; raise --rows, or "
            "lower --batch-size or --ranks"
        )
    scale = scale or (1.0 if name == "papercal" else _LAPTOP_SCALE)
    text = rm_registry(name, scale=scale, **options)
    cli_options.check_output(file, force, begins=rb"(?ms).*^dataset *:")
    file_utils.write_text(file, text)
    size = "" if name == "papercal" else f" at scale {scale:g}"
    click.echo(f"{file}: {name}{size}; train it with recd run {shlex.quote(str(file))} --compare")


def _start(name: ModelName) -> click.Command:
    paper = f"a model like RecD's {name.upper()}"
    what = "the demo's model" if name == "papercal" else paper
    help = _HELP.format(what=what, name=name)
    return click.Command(name, callback=partial(_write, name), params=_PARAMETERS, help=help)


#: Commands of ``recd init``, by the name of a model.
STARTS = tuple(_start(name) for name in get_args(ModelName))

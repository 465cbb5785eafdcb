"""Exports a trained model with its preprocessing as one torch.export program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recd_plugin_runs.signature import encodings, sample_request, signature, user_features
from recd_plugin_runs.split_program import split_program
from recd_plugins.api import (
    FeatureSchema,
    ModelInput,
    Preprocessing,
    RecdError,
    RequestRows,
    Rows,
    RunConfig,
    arrow,
    file_utils,
    from_columns,
    jagged,
    row_tables,
    tasks,
    trained_models,
    transforms,
)


class ServingModel(nn.Module):
    """Maps raw features to predictions, with fitted preprocessing and unsharded tables."""

    def __init__(
        self, model: nn.Module, schema: FeatureSchema, steps: Mapping[str, Sequence[Preprocessing]]
    ) -> None:
        super().__init__()
        self.model = model
        self.schema = schema
        self.label_shape = (len(schema.tasks),) if schema.tasks else ()
        self.steps = steps

    def forward(
        self,
        dense: Tensor,
        values: dict[str, Tensor],
        lengths: dict[str, Tensor],
        rows: dict[str, Tensor],
    ) -> Tensor:
        """Return probabilities, float32 ``[B]``, or predictions of T tasks, ``[B, T]``.

        ``signature.json`` describes the inputs.
        """
        columns = self.dense_columns(self.schema.dense, dense)
        dense = torch.cat([*columns.values()], dim=1) if columns else dense
        return self.predictions(dense.float(), values, lengths, rows)

    def dense_columns(self, names: Sequence[str], dense: Tensor) -> dict[str, Tensor]:
        """Preprocess dense features ``[B, num_dense]``. Return the columns of each feature."""
        torch._assert_async(
            dense.isfinite().all(),
            "dense: a number is NaN or infinite. Replace missing numbers as signature.json says.",
        )
        columns = {}
        for index, name in enumerate(names):
            numbers = dense[:, index]
            offsets = torch.arange(dense.shape[0] + 1)
            for step in self.steps.get(name, ()):
                numbers, offsets = step.transform(numbers, offsets)
            columns[name] = numbers.view(dense.shape[0], -1)
        return columns

    def predictions(
        self,
        dense: Tensor,
        values: Mapping[str, Tensor],
        lengths: Mapping[str, Tensor],
        rows: Mapping[str, Tensor],
        request: RequestRows | None = None,
    ) -> Tensor:
        """Return the result of ``forward`` for preprocessed dense features."""
        features = {}
        for name in self.schema.sparse:
            _check_lengths(name, lengths[name], values[name])
            _check_rows(name, rows[name], lengths[name])
            ids, offsets = values[name], F.pad(lengths[name].cumsum(0), (1, 0))
            for step in self.steps.get(name, ()):
                ids, offsets = step.transform(ids, offsets)
            features[name] = StoredRows(ids, offsets.diff(), rows[name])
        batch = ModelInput(
            dense_features=dense,
            sparse_features=features,
            labels=dense.new_zeros(dense.shape[0], *self.label_shape),
            replicated_features=features,
            sequence_features=features,
            num_unique={name: each.counts.shape[0] for name, each in features.items()},
            inverse_lookup={name: each.rows for name, each in features.items()},
            request=request,
        )
        _, (_, logits, _) = self.model(batch)
        return tasks.predictions(self.schema.tasks, logits)


Inputs = tuple[Tensor, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


class RequestServingModel(ServingModel):
    """A ``ServingModel`` with the user features of one request in inputs of their own.

    Args:
        whole: the model.
        user: names of the user features, sparse or dense.
    """

    def __init__(self, whole: ServingModel, user: Collection[str]) -> None:
        super().__init__(whole.model, whole.schema, whole.steps)
        self.user, self.candidates = (
            replace(
                whole.schema,
                sparse=tuple(name for name in whole.schema.sparse if (name in user) == of_user),
                dense=tuple(name for name in whole.schema.dense if (name in user) == of_user),
            )
            for of_user in (True, False)
        )

    def forward(self, user: Inputs, candidates: Inputs) -> Tensor:  # type: ignore[override]
        """Return the predictions of B candidates. Both inputs are as those of ``ServingModel``."""
        num_rows = candidates[0].shape[0]
        shared = {
            name: column.expand(num_rows, -1)
            for name, column in self.dense_columns(self.user.dense, user[0]).items()
        }
        columns = shared | self.dense_columns(self.candidates.dense, candidates[0])
        named = [(name, n) for name in self.schema.dense for n in range(columns[name].shape[1])]
        request = RequestRows(
            torch.zeros(num_rows, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
            self.user.sparse,
            tuple(position for position, (name, _) in enumerate(named) if name in shared),
        )
        in_order = [columns[name] for name in self.schema.dense]
        return self.predictions(
            (torch.cat(in_order, dim=1) if in_order else candidates[0]).float(),
            {**user[1], **candidates[1]},
            {**user[2], **candidates[2]},
            {**dict.fromkeys(self.user.sparse, request.inverse), **candidates[3]},
            request,
        )


def _check_lengths(name: str, lengths: Tensor, ids: Tensor) -> None:
    """Raise RuntimeError for negative lengths, and lengths that do not add up to the ids."""
    # This assertion stays in an exported program. The upper bound prevents an overflow of the sum.
    fits = ((lengths >= 0) & (lengths <= ids.shape[0])).all() & (lengths.sum() == ids.shape[0])
    torch._assert_async(
        fits,
        f"lengths[{name!r}]: a length is negative, or their sum is not the number of ids in "
        f"values[{name!r}]. Correct the lengths.",
    )


def _check_rows(name: str, rows: Tensor, lengths: Tensor) -> None:
    """Raise RuntimeError for an index of a stored row that does not exist."""
    torch._assert_async(
        ((rows >= 0) & (rows < lengths.shape[0])).all(),
        f"rows[{name!r}]: an index is negative, or is not below the number of lengths. Correct the "
        "indices.",
    )


@dataclass(frozen=True)
class StoredRows:
    """Deduplicated rows of one feature, with ``values`` and ``lengths`` like a JaggedTensor.

    Attributes:
        ids: int64 ``[num_ids]``, the ids of all stored rows.
        counts: int64 ``[num_stored]``, the number of ids in each stored row.
        rows: int64 ``[B]``, the stored row of each batch row.
    """

    ids: Tensor
    counts: Tensor
    rows: Tensor

    def values(self) -> Tensor:
        return self.ids

    def lengths(self) -> Tensor:
        return self.counts


class PlainSequences(nn.Module):
    """An exportable EmbeddingCollection. Its inputs are ``StoredRows``, keyed by feature."""

    def __init__(self, module: EmbeddingCollection | EmbeddingBagCollection, int8: bool) -> None:
        super().__init__()
        is_bags = isinstance(module, EmbeddingBagCollection)
        self.configs = module.embedding_bag_configs() if is_bags else module.embedding_configs()
        weights: Any = module.embedding_bags if is_bags else module.embeddings
        self.outputs = list(_outputs(self.configs))
        self.tables = nn.ModuleList(
            _table(module, config.name, weights[config.name].weight, int8)
            for config in self.configs
        )

    def forward(self, features: Mapping[str, StoredRows]) -> Any:
        return {
            name: JaggedTensor(
                self.tables[table](features[feature].ids), lengths=features[feature].counts
            )
            for table, feature, name in self.outputs
        }


class PlainBags(PlainSequences):
    """An exportable EmbeddingBagCollection. Its inputs are ``StoredRows``, keyed by feature."""

    def __init__(self, bags: EmbeddingBagCollection, int8: bool) -> None:
        if bags.is_weighted():
            raise RecdError(
                "an EmbeddingBagCollection with is_weighted=True cannot be exported. Use a model "
                "without per-id weights."
            )
        super().__init__(bags, int8)

    def forward(self, features: Mapping[str, StoredRows]) -> KeyedTensor:
        vectors = []
        for table, feature, _ in self.outputs:
            stored = features[feature]
            pooled = jagged.row_sums(self.tables[table](stored.ids), stored.counts)
            if self.configs[table].pooling == PoolingType.MEAN:
                pooled = pooled / stored.counts.clamp(min=1).unsqueeze(1)
            vectors.append(pooled.index_select(0, stored.rows))
        return KeyedTensor(
            keys=[name for *_, name in self.outputs],
            length_per_key=[self.configs[table].embedding_dim for table, *_ in self.outputs],
            values=torch.cat(vectors, dim=1),
        )


def with_plain_tables(model: nn.Module, *, int8: bool = False) -> nn.Module:
    """Replace TorchRec's embedding modules by exportable modules, in place. Return the model."""
    plain = {EmbeddingBagCollection: PlainBags, EmbeddingCollection: PlainSequences}
    for name, module in list(model.named_children()):
        kind = next((kind for kind in plain if isinstance(module, kind)), None)
        if kind is None:
            with_plain_tables(module, int8=int8)
        else:
            setattr(model, name, plain[kind](module, int8))
    return model


def _table(collection: Any, name: str, weight: Tensor, int8: bool) -> nn.Module:
    """Return a module from ids of a table, int64 ``[n]``, to embeddings ``[n, dim]``."""
    rows: nn.Module = (
        Int8Rows(weight) if int8 else nn.Embedding.from_pretrained(weight.detach())  # type: ignore[no-untyped-call]
    )
    if not hasattr(collection, "rows_of"):
        return rows
    return nn.Sequential(collection.rows_of(name), rows)


def _outputs(configs: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the table index, feature and TorchRec output name of each lookup."""
    seen = Counter(feature for config in configs for feature in config.feature_names)
    for index, config in enumerate(configs):
        for feature in config.feature_names:
            yield index, feature, feature if seen[feature] == 1 else f"{feature}@{config.name}"


class Int8Rows(nn.Module):
    """Embedding table quantized from float32 ``[rows, dim]`` to FBGEMM's fused 8-bit rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        import fbgemm_gpu  # noqa: F401

        # Each row stores its numbers, then scale and offset as two float32.
        packed = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight.detach().contiguous())
        dim = weight.shape[1]
        self.register_buffer("numbers", packed[:, :dim].contiguous())
        scales = packed[:, dim:].contiguous().view(torch.float32)
        self.register_buffer("scales", scales.contiguous())

    def forward(self, ids: Tensor) -> Tensor:
        """Look up and dequantize rows. Return float32 ``[num_ids, dim]``."""
        # Bracket indexing would read -1 as the last row.
        scale, offset = self.scales.index_select(0, ids).unbind(1)
        return self.numbers.index_select(0, ids).float() * scale.unsqueeze(1) + offset.unsqueeze(1)

    numbers: Tensor
    scales: Tensor


#: Files of an export.
PROGRAM, INT8_PROGRAM, SIGNATURE, ENCODE, SAMPLE = (
    "model.pt2",
    "model_int8.pt2",
    "signature.json",
    "encode.py",
    "sample_request.json",
)
#: The user and candidate parts of each program.
PARTS = {
    PROGRAM: ("user.pt2", "candidates.pt2"),
    INT8_PROGRAM: ("user_int8.pt2", "candidates_int8.pt2"),
}
# Number of rows that suffices to measure the error of 8-bit tables.
_ROWS_COMPARED = 4096


def serving_model(
    registry: RunConfig, checkpoint: Path | None, *, int8: bool = False
) -> ServingModel:
    """Build the ``ServingModel`` of a checkpoint; without one, that of a run without weights."""
    if checkpoint is None:
        model = trained_models.empty_model(registry)
    else:
        model = trained_models.unchecked_model(registry, checkpoint)
    schema = registry.dataset.schema()
    steps = transforms.fitted_steps(registry, schema)
    return ServingModel(with_plain_tables(model, int8=int8), schema, steps).eval()


def exported(model: ServingModel) -> ExportedProgram:
    """Export a model with torch.export, for any number of batch rows, stored rows and ids."""
    inputs = _example(model.schema)
    return _exported(model, inputs, tuple(_sizes(each) for each in inputs))


def exported_parts(
    whole: ServingModel, user: Collection[str]
) -> tuple[ExportedProgram, ExportedProgram]:
    """Export a model as a user program and a candidates program.

    The user program takes the inputs of the features ``user``, with one row, and returns a dict of
    tensors. The candidates program takes this dict and the inputs of the other features.
    """
    model = RequestServingModel(whole, user).eval()
    inputs = _example(model.user, of_user=True), _example(model.candidates)
    of_user = (None, _sizes(inputs[0][1]), *(dict.fromkeys(each) for each in inputs[0][2:]))
    sizes = of_user, tuple(_sizes(each) for each in inputs[1])
    # Creates the constants of split layers, which tracing would compute in each call.
    with patch("torch.compiler.is_exporting", return_value=True), torch.no_grad():
        model(*inputs)
    return split_program(_exported(model, inputs, sizes), inputs, sizes)


def _exported(model: nn.Module, inputs: tuple[Any, ...], sizes: tuple[Any, ...]) -> ExportedProgram:
    # As in a script, modules use plain torch operations instead of compiled kernels.
    with patch("torch.jit.is_scripting", return_value=True), torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=sizes, strict=False)


def _sizes(value: Tensor | dict[str, Tensor]) -> Any:
    dynamic = {0: Dim.DYNAMIC}
    return dict.fromkeys(value, dynamic) if isinstance(value, dict) else dynamic


def write_export(program: ExportedProgram, folder: Path, name: str) -> None:
    """Write a program to file ``name`` in ``folder``."""
    _detach_empty(program)
    with file_utils.new_file(folder / name) as temporary, temporary.open("wb") as file:
        torch.export.save(program, file)


def _detach_empty(program: ExportedProgram) -> None:
    """Copy empty constants to new storage, which torch.export.save (2.11 to 2.14) needs."""
    for constants in (program.constants, program.state_dict):
        for name, value in constants.items():
            if isinstance(value, Tensor) and not value.numel():
                constants[name] = value.new_empty(value.shape)


@dataclass(frozen=True)
class ScoreError:
    """Mean and maximum difference of probabilities between 8-bit and float32 tables."""

    rows: int
    mean: float
    largest: float


def export_model(registry: RunConfig, model: ServingModel, folder: Path) -> Collection[str]:
    """Write the programs of a model and the files for its inputs. Return the user features."""
    features = encodings(model.schema, registry.dataset)
    user = user_features(registry, features)
    if not _write_programs(model, user, folder, PROGRAM):
        user = frozenset()
    described = signature(model.schema, model.steps, features, user)
    file_utils.write_json(folder / SIGNATURE, described)
    file_utils.write_json(folder / SAMPLE, sample_request(registry, described["features"]))
    encode = Path(__file__).with_name(ENCODE).read_text(encoding="utf-8")
    file_utils.write_text(folder / ENCODE, encode)
    return user


def export_to(
    registry: RunConfig, checkpoint: Path, folder: Path, *, int8: bool
) -> ScoreError | None:
    """Export a checkpoint to a folder. With ``int8``, also export 8-bit tables and their error."""
    for name in (INT8_PROGRAM, *chain(*PARTS.values())):
        (folder / name).unlink(missing_ok=True)  # from a previous export
    model = serving_model(registry, checkpoint)
    user = export_model(registry, model, folder)
    if not int8:
        return None
    quantized = serving_model(registry, checkpoint, int8=True)
    _write_programs(quantized, user, folder, INT8_PROGRAM)
    if isinstance(registry.dataset, trained_models.AbsentData):
        return None
    differences = []
    with torch.no_grad():
        for rows in row_tables.training_rows(registry, _ROWS_COMPARED):
            inputs = inputs_of(model.schema, rows)
            differences.append((model(*inputs) - quantized(*inputs)).abs())
    difference = torch.cat(differences)
    return ScoreError(len(difference), float(difference.mean()), float(difference.max()))


def _write_programs(model: ServingModel, user: Collection[str], folder: Path, name: str) -> bool:
    """Export a model, and its two parts if there are user features. Return whether there are."""
    write_export(exported(model), folder, name)
    if not user:
        return False
    try:
        programs = exported_parts(model, user)
    except Exception as error:  # of any kind, from tracing a model plugin
        reason = str(error).partition("\n")[0]
        click.echo(f"{name} is not split into user and candidates programs: {reason}", err=True)
        return False
    for program, part in zip(programs, PARTS[name], strict=True):
        write_export(program, folder, part)
    return True


def inputs_of(schema: FeatureSchema, rows: Rows) -> tuple[Any, ...]:
    """Convert dataset rows to the inputs of an exported program, without deduplication."""
    kjt = from_columns.kjt_from_columns(
        {name: arrow.sparse_column(rows, name) for name in schema.sparse}, len(rows)
    ).to_dict()
    return (
        arrow.dense_features(rows, schema.dense).double(),
        {name: kjt[name].values() for name in schema.sparse},
        {name: kjt[name].lengths().long() for name in schema.sparse},
        {name: torch.arange(len(rows)) for name in schema.sparse},
    )


def _example(schema: FeatureSchema, *, of_user: bool = False) -> Inputs:
    """Return example inputs for tracing, in which all dynamic sizes differ.

    With ``of_user``, the inputs have one row.
    """
    values: dict[str, Tensor] = {}
    lengths: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    num_rows = 1 if of_user else 5
    for number, name in enumerate(schema.sparse, 1):
        num_stored, length = (1, 1_001 + 2 * number) if of_user else (num_rows + number, 2)
        lengths[name] = torch.full((num_stored,), length)
        values[name] = torch.zeros(num_stored * length, dtype=torch.int64)
        rows[name] = torch.arange(num_rows)
    dense = torch.zeros(num_rows, len(schema.dense), dtype=torch.float64)
    return dense, values, lengths, rows

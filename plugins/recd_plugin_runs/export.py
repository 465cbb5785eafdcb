"""Exports a trained model with its preprocessing as one torch.export program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recd_plugins.api import (
    Dataset,
    FeatureSchema,
    ModelInput,
    Preprocessing,
    RecdError,
    Rows,
    RunConfig,
    arrow,
    file_utils,
    from_columns,
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
        features = {}
        for name in self.schema.sparse:
            _check_lengths(name, lengths[name], values[name])
            _check_rows(name, rows[name], lengths[name])
            ids, offsets = values[name], F.pad(lengths[name].cumsum(0), (1, 0))
            for step in self.steps.get(name, ()):
                ids, offsets = step.transform(ids, offsets)
            features[name] = StoredRows(ids, offsets.diff(), rows[name])
        torch._assert_async(
            dense.isfinite().all(),
            "dense: a number is NaN or infinite. Replace missing numbers as signature.json says.",
        )
        dense = self._dense(dense).float()
        batch = ModelInput(
            dense_features=dense,
            sparse_features=features,
            labels=dense.new_zeros(dense.shape[0], *self.label_shape),
            replicated_features=features,
            sequence_features=features,
            num_unique={name: each.counts.shape[0] for name, each in features.items()},
            inverse_lookup={name: each.rows for name, each in features.items()},
        )
        _, (_, logits, _) = self.model(batch)
        return tasks.predictions(self.schema.tasks, logits)

    def _dense(self, dense: Tensor) -> Tensor:
        columns = []
        for index, name in enumerate(self.schema.dense):
            numbers = dense[:, index]
            offsets = torch.arange(dense.shape[0] + 1)
            for step in self.steps.get(name, ()):
                numbers, offsets = step.transform(numbers, offsets)
            columns.append(numbers.view(dense.shape[0], -1))
        return torch.cat(columns, dim=1) if columns else dense


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


class PlainBags(nn.Module):
    """An exportable EmbeddingBagCollection. Its inputs are ``StoredRows``, keyed by feature."""

    def __init__(self, bags: EmbeddingBagCollection, int8: bool) -> None:
        super().__init__()
        if bags.is_weighted():
            raise RecdError(
                "an EmbeddingBagCollection with is_weighted=True cannot be exported. Use a model "
                "without per-id weights."
            )
        self.modes = [config.pooling for config in bags.embedding_bag_configs()]
        self.outputs = list(_outputs(bags.embedding_bag_configs()))
        self.lengths = [config.embedding_dim for config in bags.embedding_bag_configs()]
        self.tables = nn.ModuleList(
            _table(bags.embedding_bags[config.name].weight, int8)
            for config in bags.embedding_bag_configs()
        )

    def forward(self, features: Mapping[str, StoredRows]) -> KeyedTensor:
        vectors = []
        for table, feature, _ in self.outputs:
            stored = features[feature]
            looked_up = self.tables[table](stored.ids)
            pooled = _sums(looked_up, stored.counts)
            if self.modes[table] == PoolingType.MEAN:
                pooled = pooled / stored.counts.clamp(min=1).unsqueeze(1)
            vectors.append(pooled.index_select(0, stored.rows))
        return KeyedTensor(
            keys=[name for *_, name in self.outputs],
            length_per_key=[self.lengths[table] for table, *_ in self.outputs],
            values=torch.cat(vectors, dim=1),
        )


class PlainSequences(nn.Module):
    """An exportable EmbeddingCollection. Its inputs are ``StoredRows``, keyed by feature."""

    def __init__(self, sequences: EmbeddingCollection, int8: bool) -> None:
        super().__init__()
        self.outputs = list(_outputs(sequences.embedding_configs()))
        self.tables = nn.ModuleList(
            _table(sequences.embeddings[config.name].weight, int8)
            for config in sequences.embedding_configs()
        )

    def forward(self, features: Mapping[str, StoredRows]) -> dict[str, JaggedTensor]:
        return {
            name: JaggedTensor(
                self.tables[table](features[feature].ids), lengths=features[feature].counts
            )
            for table, feature, name in self.outputs
        }


def with_plain_tables(model: nn.Module, *, int8: bool = False) -> nn.Module:
    """Replace TorchRec's embedding modules by exportable modules, in place. Return the model."""
    for name, module in list(model.named_children()):
        if isinstance(module, EmbeddingBagCollection):
            setattr(model, name, PlainBags(module, int8))
        elif isinstance(module, EmbeddingCollection):
            setattr(model, name, PlainSequences(module, int8))
        else:
            with_plain_tables(module, int8=int8)
    return model


def _table(weight: Tensor, int8: bool) -> nn.Module:
    if int8:
        return Int8Rows(weight)
    rows: nn.Module = nn.Embedding.from_pretrained(weight.detach())  # type: ignore[no-untyped-call]
    return rows


def _outputs(configs: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the table index, feature and TorchRec output name of each lookup."""
    seen = Counter(feature for config in configs for feature in config.feature_names)
    for index, config in enumerate(configs):
        for feature in config.feature_names:
            yield index, feature, feature if seen[feature] == 1 else f"{feature}@{config.name}"


def _sums(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of the vectors of each row, ``[num_rows, dim]``."""
    row = torch.repeat_interleave(lengths, output_size=vectors.shape[0])
    return vectors.new_zeros(lengths.shape[0], vectors.shape[1]).index_add(0, row, vectors)


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
# Number of rows that suffices to measure the error of 8-bit tables.
_ROWS_COMPARED = 4096


def serving_model(registry: RunConfig, checkpoint: Path, *, int8: bool = False) -> ServingModel:
    """Build the ``ServingModel`` of a checkpoint."""
    model = trained_models.unchecked_model(registry, checkpoint)
    schema = registry.dataset.schema()
    steps = transforms.fitted_steps(registry, schema)
    return ServingModel(with_plain_tables(model, int8=int8), schema, steps).eval()


def exported(model: ServingModel) -> ExportedProgram:
    """Export a model with torch.export, for any number of batch rows, stored rows and ids."""
    inputs = _example(model.schema)
    dynamic = tuple(
        {name: {0: Dim.DYNAMIC} for name in each} if isinstance(each, dict) else {0: Dim.DYNAMIC}
        for each in inputs
    )
    # As in a script, modules use plain torch operations instead of compiled kernels.
    with patch("torch.jit.is_scripting", return_value=True), torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=dynamic, strict=False)


def write_export(model: ServingModel, folder: Path, name: str) -> None:
    """Export a model to file ``name`` in ``folder``."""
    program = exported(model)
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


def export_to(
    registry: RunConfig, checkpoint: Path, folder: Path, *, int8: bool
) -> ScoreError | None:
    """Export a checkpoint to a folder. With ``int8``, also export 8-bit tables and their error."""
    model = serving_model(registry, checkpoint)
    write_export(model, folder, PROGRAM)
    described = signature(model, registry.dataset)
    file_utils.write_json(folder / SIGNATURE, described)
    file_utils.write_json(folder / SAMPLE, sample_request(registry, described["features"]))
    encode = Path(__file__).with_name(ENCODE).read_text(encoding="utf-8")
    file_utils.write_text(folder / ENCODE, encode)
    (folder / INT8_PROGRAM).unlink(missing_ok=True)  # from a previous export
    if not int8:
        return None
    quantized = serving_model(registry, checkpoint, int8=True)
    write_export(quantized, folder, INT8_PROGRAM)
    if isinstance(registry.dataset, trained_models.AbsentData):
        return None
    differences = []
    with torch.no_grad():
        for rows in row_tables.training_rows(registry, _ROWS_COMPARED):
            inputs = inputs_of(model.schema, rows)
            differences.append((model(*inputs) - quantized(*inputs)).abs())
    difference = torch.cat(differences)
    return ScoreError(len(difference), float(difference.mean()), float(difference.max()))


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


def signature(model: ServingModel, dataset: Dataset) -> dict[str, Any]:
    """Return a JSON description of the inputs of an exported program, and how to encode them."""
    schema = model.schema
    features = _encodings(schema, dataset)
    for one in features:
        is_sparse = one["feature"] in schema.sparse
        one["shared"] = "stored once" if is_sparse else "repeated for each row"
        names = (one["feature"], f"{one['feature']}_0")  # of a list, all numbers have equal steps
        steps = next((model.steps[name] for name in names if name in model.steps), ())
        one["preprocessing"] = [
            {"use": step.name, "options": step.options.model_dump(mode="json")} for step in steps
        ]
    return {
        "dense": list(schema.dense),
        "sparse": list(schema.sparse),
        "inputs": {
            "dense": "float64 [B, dense]: finite dense features, in the order of key dense",
            "values": "per sparse feature: int64 [num_values], the raw ids of all stored rows",
            "lengths": "per sparse feature: int64 [num_stored], the number of ids per stored row",
            "rows": "per sparse feature: int64 [B], the index of the stored row of each row",
        },
        **_output(schema),
        "features": features,
        "rules": _RULES,
    }


def _output(schema: FeatureSchema) -> dict[str, Any]:
    if not schema.tasks:
        return {"output": "float32 [B]: the probability of each row"}
    return {
        "output": "float32 [B, tasks]: the predictions of each row, in the order of key tasks",
        "tasks": [
            {"name": task.name, "type": task.type, "output": task.output} for task in schema.tasks
        ],
    }


_RULES = {
    "column": "column of a raw row; a dot separates a struct from its field",
    "kind": "id: one id. ids: a list of ids. number: one number. numbers: a list of width numbers",
    "value": {
        "integer": "a 64-bit integer, which is its own id",
        "digits": "an integer, or a text of its digits",
        "text": "BLAKE2b of the UTF-8 text with a digest of 8 bytes, as a little-endian integer, "
        "shifted right by 1 bit",
        "bytes": "hashed like the bytes of a text",
        "time": "part by of a time: hour (of the day), weekday (Monday is 0) or day (since 1970). "
        "ids are rounded down. A number is a time in unit",
        "number": "a number, rounded to float32 if float32 is true",
        "seconds": "a time of day or a duration in seconds",
    },
    "boolean": "also accepts the texts true and false",
    "single": "true if one id needs no list",
    "separator": "separates ids in a text. If it is a comma or space, brackets around the text and "
    "quotes around ids in brackets are removed",
    "missing": "replaces a missing value: an id or number, empty (no id) or error",
    "optional": "true if a missing value may be left out of the row",
    "empty_is_missing": "an empty text is a missing value, as in the CSV file of training",
    "infinite": "replaces a number that float32 cannot represent",
    "max_length": "only the last ids are used",
    "preprocessing": "steps inside the program, such as hashes and vocabularies",
    "shared": "what encode.py does with a value that all rows of a request share",
}


def sample_request(registry: RunConfig, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a request with one candidate, as in ``examples/serving``.

    The values are from the first training rows, or zeros if the rows cannot be read.
    """
    dataset = registry.dataset
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    try:
        if (sample := getattr(dataset, "sample_request", None)) is not None:
            shared, own = sample()
            return {"request": shared, "candidates": [own]}
        rows = next(row_tables.training_rows(registry, 1)).data.to_pylist()
    except (RecdError, StopIteration):
        rows = [{}]
    zeros: dict[str, Any] = {"text": "a", "bytes": "00", "time": "2024-01-01T00:00:00"}
    for one in features:
        value = zeros.get(one["value"], 0)
        if one["kind"] == "numbers":
            value = [0.0] * one["width"]
        elif one["kind"] == "ids":
            value = [value]
        value = rows[0].get(one["column"], value)
        (shared if one["kind"] == "ids" else own)[one["column"]] = value
    return {"request": shared, "candidates": [own]}


def _encodings(schema: FeatureSchema, dataset: Dataset) -> list[dict[str, Any]]:
    """Return how to encode each feature, from method ``encodings`` of a dataset that has one."""
    try:
        encodings = getattr(dataset.to_score(""), "encodings", None)
    except RecdError:  # this dataset cannot score other tables
        encodings = None
    if encodings is not None:
        found: list[dict[str, Any]] = encodings()
        return found
    ids: dict[str, Any] = {"kind": "ids", "value": "integer", "missing": "error", "single": True}
    number = {"kind": "number", "value": "number", "missing": "error", "infinite": "error"}
    columns = {**dict.fromkeys(schema.sparse, ids), **dict.fromkeys(schema.dense, number)}
    return [{"feature": name, "column": name, **rules} for name, rules in columns.items()]


def _example(schema: FeatureSchema) -> tuple[Any, ...]:
    """Return example inputs for tracing, in which all dynamic sizes differ."""
    values: dict[str, Tensor] = {}
    lengths: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    batch_size = 5
    for number, name in enumerate(schema.sparse, 1):
        num_stored = batch_size + number
        lengths[name] = torch.full((num_stored,), 2)
        values[name] = torch.arange(2 * num_stored) % 2
        rows[name] = torch.arange(batch_size)
    dense = torch.zeros(batch_size, len(schema.dense), dtype=torch.float64)
    return dense, values, lengths, rows

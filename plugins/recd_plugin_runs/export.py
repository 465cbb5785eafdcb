"""A trained model as one program of torch.export, with its preprocessing, from raw ids on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from recd_plugin_runs.serving_model import ServingModel, with_plain_tables
from recd_plugins.api import (
    AbsentData,
    FeatureSchema,
    RecdError,
    Rows,
    RunConfig,
    dense_features,
    fitted_steps,
    kjt_from_columns,
    new_file,
    sparse_column,
    training_rows,
    unchecked_model,
    write_json,
)

#: Files of an export.
PROGRAM, INT8_PROGRAM, SIGNATURE = "model.pt2", "model_int8.pt2", "signature.json"
# Enough to see what 8 bits do to scores.
_ROWS_COMPARED = 4096


def serving_model(registry: RunConfig, checkpoint: Path, *, int8: bool = False) -> ServingModel:
    """The model of a checkpoint in one piece, with preprocessing as it was fitted.

    Raises:
        RecdError: the checkpoint is damaged or of another model; or a module cannot be exported.
    """
    model = unchecked_model(registry, checkpoint)
    schema = registry.dataset.schema()
    steps = fitted_steps(registry, schema)
    return ServingModel(with_plain_tables(model, int8=int8), schema, steps).eval()


def exported(model: ServingModel) -> ExportedProgram:
    """The program of a model: any number of rows, of stored rows and of ids.

    Raises:
        RecdError: code of a plugin cannot be traced.
    """
    inputs = _example(model.schema)
    dynamic = tuple(
        {name: {0: Dim.DYNAMIC} for name in each} if isinstance(each, dict) else {0: Dim.DYNAMIC}
        for each in inputs
    )
    try:
        with _traceable(), torch.no_grad():
            return torch.export.export(model, inputs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecdError(
            f"torch.export cannot follow the model: {reason}. What a plugin computes has to be "
            "operations of torch whose order does not depend on values, as the built-in poolings "
            "are; score with recd predict instead"
        ) from error


def write_export(model: ServingModel, folder: Path, name: str) -> None:
    """Write the program of a model, and what its inputs are, into a folder."""
    program = exported(model)
    _detach_empty(program)
    with new_file(folder / name) as temporary, temporary.open("wb") as file:
        writer = _Writer(file)
        torch.export.save(program, writer)
        if writer.error is not None:
            raise writer.error
    write_json(folder / SIGNATURE, signature(model.schema))


def _detach_empty(program: ExportedProgram) -> None:
    """Give constants without values, as of a vocabulary of none, memory of their own.

    torch.export.save (torch 2.11 to 2.14) takes one whose memory is larger for a part of another.
    """
    for constants in (program.constants, program.state_dict):
        for name, value in constants.items():
            if isinstance(value, Tensor) and not value.numel():
                constants[name] = value.new_empty(value.shape)


class _Writer(BytesIO):
    """A file for torch's writer in C++, which ends the process where a write fails.

    A BytesIO as torch takes files that are ``io.IOBase`` and can be sought; it keeps nothing.

    Args:
        file: to write to.

    Attributes:
        error: the first that the file had; nothing is written after it.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """See ``BytesIO.write``; never fails."""
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


@dataclass(frozen=True)
class ScoreError:
    """How far scores of quantized tables are from those of float32.

    Attributes:
        rows: that were scored, the first of the training split.
        mean: absolute difference of probabilities.
        largest: likewise.
    """

    rows: int
    mean: float
    largest: float


def export_to(
    registry: RunConfig, checkpoint: Path, folder: Path, *, int8: bool
) -> ScoreError | None:
    """Write the programs of a checkpoint into a folder, and compare them where there are two, and
    training rows.

    Raises:
        RecdError: as ``serving_model`` and ``exported``.
    """
    model = serving_model(registry, checkpoint)
    write_export(model, folder, PROGRAM)
    (folder / INT8_PROGRAM).unlink(missing_ok=True)  # of a former export
    if not int8:
        return None
    quantized = serving_model(registry, checkpoint, int8=True)
    write_export(quantized, folder, INT8_PROGRAM)
    if isinstance(registry.dataset, AbsentData):
        return None
    differences = []
    with torch.no_grad():
        for rows in training_rows(registry, _ROWS_COMPARED):
            inputs = inputs_of(model.schema, rows)
            differences.append((model(*inputs) - quantized(*inputs)).abs())
    difference = torch.cat(differences)
    return ScoreError(len(difference), float(difference.mean()), float(difference.max()))


def inputs_of(schema: FeatureSchema, rows: Rows) -> tuple[Any, ...]:
    """Rows of a dataset as the inputs of a program; none is shared."""
    kjt = kjt_from_columns(
        {name: sparse_column(rows, name) for name in schema.sparse}, len(rows)
    ).to_dict()
    return (
        dense_features(rows, schema.dense).double(),
        {name: kjt[name].values() for name in schema.sparse},
        {name: kjt[name].lengths().long() for name in schema.sparse},
        {name: torch.arange(len(rows)) for name in schema.sparse},
    )


def signature(schema: FeatureSchema) -> dict[str, Any]:
    """What the inputs of a program are, JSON values."""
    return {
        "dense": list(schema.dense),
        "sparse": list(schema.sparse),
        "inputs": {
            "dense": "float64 [B, dense]: the numbers of each row, in the order of dense",
            "values": "by sparse feature: int64 [num_values], the raw ids of its stored rows",
            "lengths": "by sparse feature: int64 [num_stored], how many ids each of them has",
            "rows": "by sparse feature: int64 [B], the stored row of each row",
        },
        "output": "float32 [B]: the probability of each row",
    }


def _example(schema: FeatureSchema) -> tuple[Any, ...]:
    """Inputs whose sizes are all different, so that none is taken for another."""
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


@contextmanager
def _traceable() -> Iterator[None]:
    """A context in which modules leave their compiled kernels aside, as in a script."""
    with patch("torch.jit.is_scripting", return_value=True):
        yield

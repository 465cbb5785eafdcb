"""Description of the inputs of an exported program, for ``encode.py`` and other encoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from recd_plugins.api import (
    Dataset,
    FeatureSchema,
    Preprocessing,
    RecdError,
    RunConfig,
    row_pipelines,
    row_tables,
)


def signature(
    schema: FeatureSchema,
    steps: Mapping[str, Sequence[Preprocessing]],
    features: Sequence[Mapping[str, Any]],
    user: Set[str],
) -> dict[str, Any]:
    """Return a JSON description of the inputs of an exported program, and how to encode them.

    Args:
        schema: the features of the model.
        steps: the preprocessing of each feature.
        features: how to encode each feature, from ``encodings``.
        user: the features of the user program; empty if there is none.
    """
    described = [dict(one) for one in features]
    for one in described:
        one["user"] = user >= {*_names(one)}
        is_sparse = one["feature"] in schema.sparse
        one["shared"] = "stored once" if is_sparse else "repeated for each row"
        names = (one["feature"], f"{one['feature']}_0")  # of a list, all numbers have equal steps
        used = next((steps[name] for name in names if name in steps), ())
        one["preprocessing"] = [
            {"use": step.name, "options": step.options.model_dump(mode="json")} for step in used
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
        **(_PARTS if user else {}),
        "features": described,
        "rules": _RULES,
    }


_PARTS = {
    "user.pt2": "takes the inputs of one row with the features whose key user is true. Returns a "
    "dict of tensors",
    "candidates.pt2": "takes this dict and the inputs of the other features. Returns the output",
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
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    row: dict[str, Any] = {}
    try:
        if (sample := getattr(registry.dataset, "sample_request", None)) is not None:
            shared, own = sample()
        else:
            row = next(row_tables.training_rows(registry, 1)).data.to_pylist()[0]
    except (RecdError, StopIteration):
        pass
    zeros: dict[str, Any] = {"text": "a", "bytes": "00", "time": "2024-01-01T00:00:00"}
    has_user = any(one["user"] for one in features)
    for one in features:
        column, value = one["column"], zeros.get(one["value"], 0)
        if one["kind"] == "numbers":
            value = [0.0] * one["width"]
        elif one["kind"] == "ids":
            value = [value]
        if column not in shared:
            is_shared = one["user"] if has_user or column in own else one["kind"] == "ids"
            value = own.pop(column, row.get(column, value))
            (shared if is_shared else own)[column] = value
    return {"request": shared, "candidates": [own]}


def encodings(schema: FeatureSchema, dataset: Dataset) -> list[dict[str, Any]]:
    """Return how to encode each feature, from method ``encodings`` of a dataset that has one."""
    try:
        described = getattr(dataset.to_score(""), "encodings", None)
    except RecdError:  # this dataset cannot score other tables
        described = None
    if described is not None:
        found: list[dict[str, Any]] = described()
        return found
    ids: dict[str, Any] = {"kind": "ids", "value": "integer", "missing": "error", "single": True}
    number = {"kind": "number", "value": "number", "missing": "error", "infinite": "error"}
    columns = {**dict.fromkeys(schema.sparse, ids), **dict.fromkeys(schema.dense, number)}
    return [{"feature": name, "column": name, **rules} for name, rules in columns.items()]


def user_features(registry: RunConfig, features: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the user features that the converter chooses, sparse or dense.

    Features of a column that also has candidate features are left out, so that a column belongs
    either to the request or to the candidates.
    """
    chosen = set(_chosen_by_converter(registry))
    columns = {one["column"] for one in features if not chosen.issuperset(_names(one))}
    return frozenset(
        name for one in features if one["column"] not in columns for name in _names(one)
    )


def _chosen_by_converter(registry: RunConfig) -> Iterable[str]:
    option = getattr(registry.converter.options, "user_features", "auto")
    if option != "auto":
        return list(option)
    with suppress(RecdError):
        row_pipelines.fit_converter(registry)
    return registry.converter.user_features


def _names(one: Mapping[str, Any]) -> list[str]:
    """Return the names in the schema of a feature of ``signature.json``."""
    if one["kind"] != "numbers":
        return [one["feature"]]
    return [f"{one['feature']}_{n}" for n in range(one["width"])]

"""The identity of a run: a JSON document of its settings, stored in checkpoints.

When a run resumes, its identity is compared with the checkpoint's. The document has the fields of
the registry file. Options include defaults, and patterns are replaced by the names that they match.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from recd_plugins.config import Entry, RunConfig
from recd_plugins.config.run_config import plugin_versions
from recd_plugins.data.prepared import RegistryLookups
from recd_plugins.data.preprocess import fitted_steps, load_fitted_state
from recd_plugins.interfaces import (
    Dataset,
    DatasetWrapper,
    FeatureSchema,
    Plugin,
    Preprocessing,
    Table,
)
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.interfaces.tasks import Task
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.rank_agreement import check_agreement
from recd_plugins.runtime.versions import installed_set
from recd_plugins.training.checkpoint_files import (
    ALLOWABLE,
    FITTED,
    FREE,
    FURTHER,
    IDENTITY,
    MANIFEST,
    OBSERVERS,
    DamagedError,
    check_file,
    checkpoints_in,
    read_arrays,
)
from recd_plugins.training.run_folders import SETTINGS, read_settings

FORMAT = 1
#: Fields, other than the weights, that affect scores.
SCORES = (
    *("dataset.use", "dataset.options", "data.schema", "preprocessing", "pooling", "model"),
    f"{FURTHER}.model",
)
# Missing from early checkpoints: kinds of columns, and identities of dataset wrappers.
_KINDS = "kinds"
_OF_WRAPPER = re.compile(r"dataset\.wrap\[\d+\]\.identity")


def identity_of(registry: RunConfig, tables: Iterable[Table]) -> dict[str, Any]:
    """Return the identity of a run, its settings as JSON, to compare with that of a checkpoint.

    The overrides of ``registry`` must be applied and its data must be prepared.
    """
    schema = registry.dataset.schema()
    features = (*schema.sparse, *schema.dense)
    fitted_steps(registry, schema)
    tables = list(tables)
    names = [table.name for table in tables]
    training = registry.training.model_dump(mode="json")
    training["dense_learning_rate"] = training["dense_learning_rate"] or training["learning_rate"]
    # Missing from early checkpoints.
    if training["wire"] == "fp32":
        del training["wire"]
    if registry.training.dense_update == registry.training.default_dense_update:
        del training["dense_optimizer"]
    model = registry.model and registry.model.model_dump(
        mode="json", exclude={"tables", "num_embeddings"}
    )
    further: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for kind, entries in ((registry.kinds[name], of) for name, of in registry.further.items()):
        of_kind = {"feature": features, "table": names}.get(kind.claimed or "")
        further[kind.observes][kind.section] = [
            _plugin(entry.plugin) if of_kind is None else _entry(entry, f"{kind.claimed}s", of_kind)
            for entry in entries
        ]
    return {
        "format": FORMAT,
        "dataset": {**_plugin(registry.dataset), "wrap": _wrappers(registry)},
        "data": {
            "schema": {
                "sparse": list(schema.sparse),
                "dense": list(schema.dense),
                "label": schema.label,
                **({"tasks": [asdict(task) for task in schema.tasks]} if schema.tasks else {}),
            },
            **identity_of_data(registry.dataset),
        },
        _KINDS: {str(name): str(kind) for name, kind in registry.dataset.kinds().items()},
        "converter": _plugin(registry.converter),
        "preprocessing": [_entry(entry, "features", features) for entry in registry.preprocessing],
        "ingestion": registry.ingestion and _plugin(registry.ingestion.plugin),
        "pooling": [_entry(entry, "features", schema.sparse) for entry in registry.pooling],
        "sharding": sharding_identity(registry, names),
        "cache": [_entry(entry, "tables", names) for entry in registry.cache],
        "model": {
            **(model or {}),
            "tables": {
                table.name: {"rows": table.num_embeddings, "dim": table.embedding_dim}
                for table in tables
            },
        },
        "training": training,
        FURTHER: further[False],
        OBSERVERS: further[True],
        "versions": {"packages": installed_set(), **plugin_versions(registry)},
    }


def sharding_identity(registry: RunConfig, tables: Iterable[str]) -> list[dict[str, Any]]:
    """Return sharding entries and the names of their tables as JSON values, to compare runs."""
    names = list(tables)
    return [_entry(entry, "tables", names) for entry in registry.sharding]


def identity_of_data(dataset: Dataset) -> dict[str, Any]:
    """Return JSON values that change if the rows of a dataset change."""
    with plugin_call(dataset, "identity"):
        return dict(_own_identity(dataset))


def identity_text(identity: Mapping[str, Any]) -> str:
    """Return the text of the checkpoint file ``identity.json``."""
    return json.dumps(identity, indent=1) + "\n"


def read_identity(checkpoint: Path) -> dict[str, Any]:
    """Read a run's identity, a JSON document of its settings, from its checkpoint."""
    path = checkpoint / IDENTITY
    if (checkpoint / MANIFEST).exists():
        check_file(checkpoint, IDENTITY)
    try:
        identity: dict[str, Any] = json.loads(path.read_bytes())
        known = identity["format"] == FORMAT
    except FileNotFoundError:
        raise DamagedError(
            f"{path}: the file is missing, because recd run did not write this checkpoint. Use a "
            "checkpoint of recd run."
        ) from None
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise DamagedError(
            f"{path}: the file cannot be read ({error}). Use another checkpoint."
        ) from error
    if not known:
        raise DamagedError(
            f"{path}: the file does not have format {FORMAT}, the only format of this version. Use "
            "the version of recd-plugins that wrote the checkpoint."
        )
    return identity


def read_schema(checkpoint: Path) -> FeatureSchema:
    """Read the data columns that a checkpoint was trained on."""
    schema = read_identity(checkpoint)["data"]["schema"]
    tasks = tuple(Task(**task) for task in schema.get("tasks", ()))
    return FeatureSchema(tuple(schema["sparse"]), tuple(schema["dense"]), schema["label"], tasks)


def read_kinds(checkpoint: Path) -> dict[str, str] | None:
    """Return a dict from column to kind of values, such as "text"; None for early checkpoints."""
    kinds: dict[str, str] | None = read_identity(checkpoint).get(_KINDS)
    return kinds


def check_resumable(
    checkpoint: Path, identity: Mapping[str, Any], allowed: Collection[str]
) -> list[str]:
    """Return the allowed differences between a run and a checkpoint; raise RecdError for others."""
    before, now = _fields_of(checkpoint), _fields(identity)
    told, refused = list[str](), list[str]()
    remedies: list[set[str]] = []
    for field in _differing(before, now):
        if field not in before and _within(field, [_KINDS]):
            continue
        words = _words(field, before, now)
        if _within(field, (*FREE, *allowed)) or _unknown_before(field, before):
            told.append(words)
            continue
        refused.append(words)
        remedies.append({name for name in ALLOWABLE if _within(field, [name])})
    if not refused:
        return told
    remedy = "Restore the previous values, or set training.checkpoint.path to another folder."
    if (checkpoint.parent / SETTINGS).exists():
        remedy = "Restore the previous values, or start a new run without --resume."
    if all(remedies):
        options = " ".join(f"--allow {name}" for name in sorted(set().union(*remedies)))
        remedy += f" To allow the change, add {options}."
    raise RecdError(
        f"{checkpoint}: the checkpoint belongs to another run: {_first(refused)}. {remedy}"
    )


def check_scores(checkpoint: Path, registry: RunConfig, tables: Iterable[Table]) -> bool:
    """Raise ``RecdError`` if the checkpoint belongs to another model; the data may differ.

    Returns:
        True if the data is the training data of the checkpoint.
    """
    identity = identity_of(replace(registry, wrappers=()), tables)
    return check_same_model(checkpoint, identity, registry=registry)


def check_same_dataset(checkpoint: Path, registry: RunConfig) -> None:
    """Raise ``RecdError`` if the dataset options differ from training. Does not need the data."""
    said = {"dataset": _plugin(registry.dataset)}
    if (checkpoint / IDENTITY).exists():
        check_same_model(checkpoint, said, ["dataset.use", "dataset.options"], registry)


def check_same_model(
    checkpoint: Path,
    identity: Mapping[str, Any],
    fields: Collection[str] = SCORES,
    registry: RunConfig | None = None,
) -> bool:
    """Raise ``RecdError`` if the checkpoint belongs to another model.

    Return True if the data is the training data of the checkpoint. Identity fields in ``fields``
    must be equal, except the row options of the dataset, such as the split.
    """
    rows = registry.dataset.row_options if registry else ()
    free = (*FREE, *(f"dataset.options.{name}" for name in rows))
    before, now = _fields_of(checkpoint), _fields(identity)
    differing = _differing(before, now)
    wrong = [
        _words(field, before, now)
        for field in differing
        if (_within(field, fields) and not _within(field, free))
        or (_within(field, [_KINDS]) and field in before and field in now)  # both known
    ]
    if wrong:
        remedy = "Use the registry file that trained the checkpoint, or another --checkpoint."
        run = checkpoint.parent
        if registry and (run / SETTINGS).exists() and read_settings(run).text != registry.text:
            remedy = f"Pass {run} instead of {registry.path} to use the settings of that run."
        raise RecdError(
            f"{checkpoint}: the checkpoint belongs to another model: {_first(wrong)}. {remedy}"
        )
    return not any(_within(field, ["data"]) for field in differing)


def check_same_preprocessing(checkpoint: Path, registry: RunConfig) -> None:
    """Raise ``RecdError`` unless preprocessing maps ids to the same table rows as in training."""
    if not registry.preprocessing and not (checkpoint / IDENTITY).exists():
        return  # from a custom training loop, where ids of the data are row numbers
    schema = registry.dataset.schema()
    fitted_steps(registry, schema)
    features = (*schema.sparse, *schema.dense)
    said = [_entry(entry, "features", features) for entry in registry.preprocessing]
    check_same_model(checkpoint, {"preprocessing": said}, ["preprocessing"], registry)


# Resuming, before the model is built.


def load_fitted(registry: RunConfig, checkpoint: Path) -> None:
    """Restore the state of fitted preprocessing plugins from a checkpoint.

    Preprocessing entries that the checkpoint lacks, or whose options have changed, are fitted on
    first use.
    """
    if not registry.preprocessing or not (arrays := read_arrays(checkpoint, FITTED)):
        return
    before, same = _fields_of(checkpoint), set()
    for number, entry in enumerate(registry.preprocessing):
        field = f"preprocessing[{number}]"
        own = [f"{field}.use", f"{field}.options"]
        stored = {name: value for name, value in before.items() if _within(name, own)}
        if dict(_leaves(_options(entry.plugin), field)) == stored:
            same.add(number)
    load_fitted_state(registry, {name: torch.from_numpy(a) for name, a in arrays.items()}, same)


def resume_fitted(registry: RunConfig) -> None:
    """Restore the state of fitted preprocessing plugins from the newest undamaged checkpoint."""
    for checkpoint in newest_first(registry):
        try:
            load_fitted(registry, checkpoint)
        except DamagedError:  # reported when weights are loaded
            continue
        return


def check_fitted_alike(registry: RunConfig) -> None:
    """Fit preprocessing, and check that all ranks get the same result. All ranks must call this."""
    plugins = [entry.plugin for entry in registry.preprocessing]
    fits = [plugin for plugin in plugins if type(plugin).fit is not Preprocessing.fit]
    if not fits:
        return
    fitted_steps(registry, registry.dataset.schema())
    decided = {
        f"fit of {plugin.title} to {feature}": step.identity()
        for plugin in fits
        for feature, step in (plugin.fitted or {}).items()
    }
    check_agreement("fitting preprocessing", decided)


def newest_first(registry: RunConfig) -> Iterator[Path]:
    """Yield the checkpoints of a run, newest first."""
    folder = registry.training.checkpoint.path
    return reversed(checkpoints_in(Path(folder)) if folder is not None else [])


# Parts of an identity.


def _options(plugin: Plugin) -> dict[str, Any]:
    options = plugin.options.model_dump(mode="json", exclude=set(plugin.free_options))
    return {"use": plugin.name, "options": options}


def _plugin(plugin: Plugin) -> dict[str, Any]:
    said = _options(plugin)
    if not isinstance(plugin, Dataset):
        with plugin_call(plugin, "identity"):
            if identity := _own_identity(plugin):
                said["identity"] = identity
    return said


def _entry(entry: Entry[Plugin], what: str, names: Iterable[str]) -> dict[str, Any]:
    return {what: [name for name in names if entry.matches(name)], **_plugin(entry.plugin)}


def _wrappers(registry: RunConfig) -> list[dict[str, Any]]:
    dataset, found = registry.dataset, []
    for entry in registry.wrappers:
        said = _plugin(entry.plugin)
        dataset = entry.plugin.over(dataset, RegistryLookups(registry))
        if type(dataset).identity is not DatasetWrapper.identity:
            said["identity"] = identity_of_data(dataset) or None  # None: not an early one
        found.append(said)
    return found


def _own_identity(plugin: Plugin) -> Any:
    """Return a plugin's identity as JSON values; keyed by feature for fitted preprocessing."""
    if isinstance(plugin, Preprocessing) and plugin.fitted is not None:
        said: Any = {name: step.identity() for name, step in plugin.fitted.items()}
    else:
        said = plugin.identity()
    return json.loads(json.dumps(said, allow_nan=False))


# Comparison, field by field.


def _fields_of(checkpoint: Path) -> dict[str, Any]:
    return dict(_leaves(read_identity(checkpoint), ""))


def _fields(identity: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_leaves(json.loads(json.dumps(identity)), ""))


def _leaves(value: Any, field: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each field; a list of plain values is one field."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{field}[{index}]")
    elif value not in ({}, []):  # as if the field were missing
        yield field, value


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the fields that differ; last the table sizes, which follow from other settings."""
    found = [field for field in {**before, **now} if before.get(field) != now.get(field)]
    return sorted(found, key=lambda field: field.startswith("model.tables."))


def _unknown_before(field: str, before: Iterable[str]) -> bool:
    """Return True if ``field`` belongs to a dataset wrapper with no field in ``before``."""
    found = _OF_WRAPPER.match(field)
    return found is not None and not any(_within(name, [found[0]]) for name in before)


def _within(field: str, names: Collection[str]) -> bool:
    return any(field == name or field.startswith((f"{name}.", f"{name}[")) for name in names)


def _first(clauses: Sequence[str]) -> str:
    more = f"; and {len(clauses) - 3} more differences" if len(clauses) > 3 else ""
    return "; ".join(clauses[:3]) + more


def _short(text: str) -> str:
    cut = textwrap.shorten(text, 60, placeholder=" ...")
    return f"{text:.57}..." if cut == "..." else cut  # a single long word


def _words(field: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    shown = [
        _short(json.dumps(values[field])) if field in values else "not set"
        for values in (before, now)
    ]
    name = field.removeprefix(f"{FURTHER}.").removeprefix(f"{OBSERVERS}.")
    name = re.sub(rf"^{_KINDS}\.(.*)", r"the type of column '\1'", name)
    return f"{name} was {shown[0]} and is now {shown[1]}"

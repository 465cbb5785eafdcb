"""What a run trains on what: noted in its checkpoints, and compared when another goes on from one.

A document of JSON values, in the words of the registry file: options are those that plugins were
made with, defaults too, and patterns are the names that they match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recd_plugins.data.fitted_steps import fitted_steps
from recd_plugins.data.lookups import RegistryLookups
from recd_plugins.errors import RecdError
from recd_plugins.interfaces import (
    Dataset,
    DatasetWrapper,
    FeatureSchema,
    Plugin,
    Preprocessing,
    Table,
)
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, RunConfig
from recd_plugins.registry.plugin_versions import plugin_versions
from recd_plugins.training.checkpoint_files.errors import DamagedError
from recd_plugins.training.checkpoint_files.fields import (
    ALLOWABLE,
    FREE,
    FURTHER,
    IDENTITY,
    OBSERVERS,
    SCORES,
)
from recd_plugins.training.checkpoint_files.manifest import MANIFEST, check_file
from recd_plugins.versions import installed_set

FORMAT = 1
# Of the columns, and of wrappers of the dataset; checkpoints of older versions say nothing of it.
_KINDS = "kinds"
_OF_WRAPPER = re.compile(r"dataset\.wrap\[\d+\]\.identity")
# Of ``data``, beside what a dataset says of its rows.
_SCHEMA = "schema"


def identity_of(registry: RunConfig, tables: Iterable[Table]) -> dict[str, Any]:
    """What this run trains on what.

    Args:
        registry: with the training section that is in force; its data is prepared.
        tables: of the model.

    Raises:
        DataError: the data cannot be read.
        PluginError: a plugin's identity failed, or is no JSON value.
    """
    schema = registry.dataset.schema()
    features = (*schema.sparse, *schema.dense)
    fitted_steps(registry, schema)  # where nobody has asked for them yet
    tables = list(tables)
    names = [table.name for table in tables]
    training = registry.training.model_dump(mode="json")
    # Where it is null, the tables' counts.
    training["dense_learning_rate"] = training["dense_learning_rate"] or training["learning_rate"]
    if training["wire"] == "fp32":  # as runs have it that say nothing of it, older ones too
        del training["wire"]
    return {
        "format": FORMAT,
        "dataset": {
            **_plugin(registry.dataset),
            "wrap": _wrappers(registry),
        },
        "data": {_SCHEMA: _schema(schema), **identity_of_data(registry.dataset)},
        _KINDS: _kinds(registry.dataset),
        "converter": _plugin(registry.converter),
        "preprocessing": [_entry(entry, "features", features) for entry in registry.preprocessing],
        "ingestion": registry.ingestion and _plugin(registry.ingestion.plugin),
        "pooling": [_entry(entry, "features", schema.sparse) for entry in registry.pooling],
        "sharding": sharding_identity(registry, names),
        "cache": [_entry(entry, "tables", names) for entry in registry.cache],
        "model": {
            **(
                registry.model.model_dump(mode="json", exclude={"tables", "num_embeddings"})
                if registry.model is not None
                else {}
            ),
            "tables": {
                table.name: {"rows": table.num_embeddings, "dim": table.embedding_dim}
                for table in tables
            },
        },
        "training": training,
        # Sections of any name, apart from the fields above.
        FURTHER: _further(registry, {"feature": features, "table": names}, observes=False),
        OBSERVERS: _further(registry, {"feature": features, "table": names}, observes=True),
        "versions": {"packages": installed_set(), **plugin_versions(registry)},
    }


def sharding_identity(registry: RunConfig, tables: Iterable[str]) -> list[dict[str, Any]]:
    """What it says of sharding, entry by entry; ``tables`` are names of the model's."""
    names = list(tables)
    return [_entry(entry, "tables", names) for entry in registry.sharding]


def identity_of_data(dataset: Dataset) -> dict[str, Any]:
    """What it says of the rows of a dataset.

    Raises:
        DataError: the data cannot be read.
        PluginError: the dataset's identity failed, or is no mapping of JSON values.
    """
    with plugin_call(dataset, "identity"):
        said = _own_identity(dataset)
        if not isinstance(said, dict):
            raise TypeError(f"it returned {said!r:.200}; expected a mapping")
        if _SCHEMA in said:
            raise ValueError(f"the key {_SCHEMA} has the columns of each dataset; take another")
    return said


def identity_text(identity: Mapping[str, Any]) -> str:
    """The file of a checkpoint that says it."""
    return json.dumps(identity, indent=1) + "\n"


def read_fields(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it: values by field.

    Raises:
        DamagedError: it says nothing, or nothing that can be read.
    """
    path = checkpoint / IDENTITY
    if (checkpoint / MANIFEST).exists():
        check_file(checkpoint, IDENTITY)
    try:
        identity = json.loads(path.read_bytes())
        fields = dict(_leaves(identity, ""))
    except FileNotFoundError:
        raise DamagedError(
            f"{path}: is missing: no run of a registry file wrote this checkpoint, so nobody can "
            "tell whether it is of this one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: cannot be read ({error})") from error
    if not isinstance(identity, dict) or identity.get("format") != FORMAT:
        raise DamagedError(f"{path}: is not of format {FORMAT}, which this version reads")
    return fields


def read_sharding(checkpoint: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What a checkpoint says of the sharding of its run, and the names of the model's tables.

    Raises:
        DamagedError: it says nothing, or nothing that can be read.
    """
    read_fields(checkpoint)
    identity = json.loads((checkpoint / IDENTITY).read_bytes())
    return identity["sharding"], list(identity["model"]["tables"])


def read_schema(checkpoint: Path) -> FeatureSchema:
    """The columns of the data that a checkpoint was trained on.

    Raises:
        DamagedError: it does not say, or nothing that can be read.
    """
    read_fields(checkpoint)
    schema = json.loads((checkpoint / IDENTITY).read_bytes())["data"][_SCHEMA]
    return FeatureSchema(tuple(schema["sparse"]), tuple(schema["dense"]), schema["label"])


def read_kinds(checkpoint: Path) -> dict[str, str] | None:
    """What ``Dataset.kinds`` said of the data that a checkpoint was trained on; None: too old.

    Raises:
        DamagedError: nothing can be read.
    """
    read_fields(checkpoint)
    kinds: dict[str, str] | None = json.loads((checkpoint / IDENTITY).read_bytes()).get(_KINDS)
    return kinds


def check_resumable(
    checkpoint: Path, identity: Mapping[str, Any], allowed: Collection[str]
) -> list[str]:
    """Differences between a run and the one that wrote a checkpoint, in words; none matters.

    Args:
        checkpoint: whose files are as they were written.
        identity: of the run that goes on.
        allowed: fields of ``ALLOWABLE`` that may differ.

    Raises:
        RecdError: the run would be another one; says each field, with both values.
    """
    before = read_fields(checkpoint)
    now = dict(_leaves(json.loads(json.dumps(identity)), ""))
    told: list[str] = []
    refused: list[str] = []
    remedies: list[set[str]] = []
    for field in dict.fromkeys((*before, *now)):
        if before.get(field) == now.get(field) or (
            field not in before and _within(field, [_KINDS])
        ):
            continue
        shown = field.removeprefix(f"{FURTHER}.").removeprefix(f"{OBSERVERS}.")
        words = f"{shown} was {_shown(before, field)} and is {_shown(now, field)}"
        if (use := _use(field)) and (use in before) != (use in now):
            # The entry as a whole, once, by the name of its plugin.
            if field != use:
                continue
            plugin, is_now = (before[use], "gone") if use in before else (now[use], "new")
            words = f"{shown.removesuffix('.use')} {plugin} is {is_now}"
        if _within(field, FREE) or _within(field, allowed) or _unasked(field, before):
            told.append(words)
            continue
        refused.append(words)
        remedies.append({name for name in ALLOWABLE if _within(field, [name])})
    if not refused:
        return told
    more = f"; and {len(refused) - 8} fields more" if len(refused) > 8 else ""
    remedy = "go on with the former values, or start anew in another folder"
    if all(remedies):
        names = sorted(set().union(*remedies))
        options = " ".join(f"--allow {name}" for name in names)
        remedy += f"; {options} allows what may change on purpose"
    raise RecdError(f"{checkpoint}: is of another run: {'; '.join(refused[:8])}{more}; {remedy}")


def check_scores(checkpoint: Path, registry: RunConfig, tables: Iterable[Table]) -> bool:
    """Refuse a checkpoint by which a registry would not score as the run that wrote it.

    See ``check_same_model``. What wrappers depend on may be gone, and other rows may be read.
    """
    rows = (f"dataset.options.{name}" for name in registry.dataset.row_options)
    identity = identity_of(replace(registry, wrappers=()), tables)
    return check_same_model(checkpoint, identity, free=(*FREE, *rows))


def check_same_model(
    checkpoint: Path,
    identity: Mapping[str, Any],
    fields: Collection[str] = SCORES,
    free: Collection[str] = FREE,
) -> bool:
    """Refuse a checkpoint of a model that would score otherwise; data and training may differ.

    Args:
        checkpoint: whose files are as they were written.
        identity: of the registry that is to score by it.
        fields: that have to be alike.
        free: of these, that may differ.

    Returns:
        Whether the data is what the checkpoint was trained on.

    Raises:
        RecdError: says each field, with both values.
    """
    before, now = read_fields(checkpoint), dict(_leaves(json.loads(json.dumps(identity)), ""))
    wrong = [
        f"{field.removeprefix(f'{FURTHER}.')} was {_shown(before, field)} and is "
        f"{_shown(now, field)}"
        for field in dict.fromkeys((*before, *now))
        if (_within(field, fields) and not _within(field, free))
        # Where both are known: not of older checkpoints, nor of data that is not there.
        or (_within(field, [_KINDS]) and field in before and field in now)
        if before.get(field) != now.get(field)
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} fields more" if len(wrong) > 8 else ""
        raise RecdError(
            f"{checkpoint}: is of another model: {'; '.join(wrong[:8])}{more}; take the registry "
            "that it was trained by, or a checkpoint of this one (--checkpoint)"
        )
    return all(
        before.get(field) == now.get(field)
        for field in dict.fromkeys((*before, *now))
        if _within(field, ("data",))
    )


def check_same_preprocessing(checkpoint: Path, registry: RunConfig) -> None:
    """Refuse a checkpoint whose rows of tables are of other ids, whatever else it is of.

    Raises:
        RecdError: says each field, with both values.
    """
    if not registry.preprocessing and not (checkpoint / IDENTITY).exists():
        return  # of a trainer's own; rows are of the ids that data has
    schema = registry.dataset.schema()
    fitted_steps(registry, schema)
    features = (*schema.sparse, *schema.dense)
    said = [_entry(entry, "features", features) for entry in registry.preprocessing]
    check_same_model(checkpoint, {"preprocessing": said}, ["preprocessing"])


def same_preprocessing(checkpoint: Path, registry: RunConfig) -> set[int]:
    """Numbers of the entries that have the plugin and options that they had in a checkpoint.

    Raises:
        DamagedError: the checkpoint does not say.
    """
    before = read_fields(checkpoint)
    found = set()
    for number, entry in enumerate(registry.preprocessing):
        field, plugin = f"preprocessing[{number}]", entry.plugin
        options = plugin.options.model_dump(mode="json", exclude=set(plugin.free_options))
        now = dict(_leaves({"use": plugin.name, "options": options}, field))
        own = [f"{field}.use", f"{field}.options"]
        if now == {name: value for name, value in before.items() if _within(name, own)}:
            found.add(number)
    return found


def _plugin(plugin: Plugin) -> dict[str, Any]:
    options = plugin.options.model_dump(mode="json", exclude=set(plugin.free_options))
    said = {"use": plugin.name, "options": options}
    if not isinstance(plugin, Dataset):
        with plugin_call(plugin, "identity"):
            if identity := _own_identity(plugin):
                said["identity"] = identity
    return said


def _wrappers(registry: RunConfig) -> list[dict[str, Any]]:
    """Those of the dataset, and what one depends on that says more than what it wraps."""
    dataset, found = registry.dataset, []
    for entry in registry.wrappers:
        said = _plugin(entry.plugin)
        dataset = entry.plugin.over(dataset, RegistryLookups(registry))
        if type(dataset).identity is not DatasetWrapper.identity:
            # None: it was asked, as by older versions none was.
            said["identity"] = identity_of_data(dataset) or None
        found.append(said)
    return found


def _kinds(dataset: Dataset) -> dict[str, str]:
    with plugin_call(dataset, "kinds"):
        return {str(column): str(kind) for column, kind in dataset.kinds().items()}


def _own_identity(plugin: Plugin) -> Any:
    """What a plugin says of itself, as a checkpoint will have it; by feature where it is fitted."""
    if isinstance(plugin, Preprocessing) and plugin.fitted is not None:
        said: Any = {name: step.identity() for name, step in plugin.fitted.items()}
    else:
        said = plugin.identity()
    return json.loads(json.dumps(said, allow_nan=False))


def _further(
    registry: RunConfig, names: Mapping[str, Iterable[str]], *, observes: bool
) -> dict[str, Any]:
    """Entries by section of the kinds that registries have no attribute for."""
    return {
        kind.section: [
            _entry(entry, f"{kind.claimed}s", names[kind.claimed])
            if kind.claimed
            else _plugin(entry.plugin)
            for entry in entries
        ]
        for kind, entries in ((registry.kinds[name], of) for name, of in registry.further.items())
        if kind.observes == observes
    }


def _entry(entry: Entry[Plugin], what: str, names: Iterable[str]) -> dict[str, Any]:
    return {what: [name for name in names if entry.matches(name)], **_plugin(entry.plugin)}


def _schema(schema: FeatureSchema) -> dict[str, Any]:
    return {"sparse": list(schema.sparse), "dense": list(schema.dense), "label": schema.label}


def _leaves(value: Any, field: str) -> Iterator[tuple[str, Any]]:
    """Fields as the registry file has them, with their values; lists of plain values are one."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{field}[{index}]")
    elif value not in ({}, []):  # which is as if it were not there
        yield field, value


def _use(field: str) -> str | None:
    """The field with the plugin's name, of a field of an entry of a list."""
    entry, bracket, _ = field.partition("]")
    return f"{entry}].use" if bracket else None


def _unasked(field: str, before: Iterable[str]) -> bool:
    """Whether the version that wrote ``before`` asked no wrapper for what the field says."""
    found = _OF_WRAPPER.match(field)
    return found is not None and not any(_within(name, [found[0]]) for name in before)


def _within(field: str, names: Collection[str]) -> bool:
    return any(field == name or field.startswith((f"{name}.", f"{name}[")) for name in names)


def _shown(values: Mapping[str, Any], field: str) -> str:
    if field not in values:
        return "not there"
    text = json.dumps(values[field])
    return text if len(text) <= 60 else f"{text[:57]}..."

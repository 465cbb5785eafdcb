"""Which steps of preprocessing a registry gives to which feature, sparse or dense."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from numbers import Integral

from recd_plugins.errors import PluginError, Problem, RegistryError
from recd_plugins.interfaces import FeatureSchema, Preprocessing, Table
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import Entry, RunConfig
from recd_plugins.registry.patterns import matched
from recd_plugins.registry.step_values import wrong_value

_CALLED = {"ids": "sparse features", "numbers": "dense features"}

Steps = dict[str, tuple[Preprocessing, ...]]


def feature_steps(registry: RunConfig, schema: FeatureSchema) -> Steps:
    """The steps of each feature that has some, in the order of the file.

    A pattern chooses among the features that the step takes: ``*`` stands for all sparse features
    where a step takes ids.

    Raises:
        RegistryError: a pattern matches no feature, or none that the step takes; or a feature is
            numbered twice, as by two vocabularies.
    """
    of_kind = {"ids": schema.sparse, "numbers": schema.dense}
    names = dict.fromkeys((*schema.sparse, *schema.dense))
    claims = registry.claim("preprocessing", names)
    problems = []
    taken: dict[str, set[str]] = {}
    for entry in registry.preprocessing:
        if wrong := wrong_value(entry.plugin):  # of one that no file has
            raise PluginError(f"{entry.plugin.title}: {wrong}")
        takes = entry.plugin.takes
        taken[entry.field] = {name for kind in takes for name in of_kind[kind]}
        for pattern in entry.patterns:
            found = matched(pattern, names)
            if taken[entry.field].isdisjoint(found):
                problems.append(
                    Problem(
                        str(registry.path),
                        entry.line,
                        f"{entry.field}.features",
                        f"{entry.plugin.name} takes {' and '.join(_CALLED[k] for k in takes)}, and "
                        f"{_matched(pattern, found)} {_other(schema, found)}",
                    )
                )
    chains = {
        name: [entry for entry in entries if name in taken[entry.field]]
        for name, entries in claims.items()
    }
    problems += _numbered_twice(registry, chains)
    if problems:
        raise RegistryError(problems)
    return {name: tuple(entry.plugin for entry in chain) for name, chain in chains.items() if chain}


def num_ids_of(step: Preprocessing) -> int | None:
    """How many ids a step makes, which is asked before it is fitted.

    Raises:
        PluginError: it does not know then, or says no number.
    """
    with plugin_call(step, "num_ids, which is asked before fit,"):
        made: object = step.num_ids
    if made is None:
        return None
    if isinstance(made, Integral) and int(made) > 0:
        return int(made)
    raise PluginError(f"{step.title}: num_ids is {made!r:.80}; expected a number above 0, or None")


def refuse_ids_apart(registry: RunConfig, tables: Sequence[Table]) -> None:
    """Refuse to number what is looked up in one table by more than one numbering.

    An id would have another row by each of the features, and none says that it is the same.

    Raises:
        RegistryError: names the table, its features and the entry.
    """
    numbering = [
        entry
        for entry in registry.preprocessing
        if type(entry.plugin).fit is not Preprocessing.fit and num_ids_of(entry.plugin) is not None
    ]
    problems = []
    for table, entry in product(tables, numbering):
        those = [name for name in table.features if entry.matches(name)]
        together = entry.plugin.fits_together and len(those) == len(table.features)
        if not those or len(table.features) == 1 or together:
            continue
        message = (
            f"{' and '.join(table.features)} look up the rows of one table, {table.name}, and "
            f"{entry.plugin.name} numbers the ids of {' and of '.join(those)} by themselves: the "
            "same id would be another row. Name all of them in one entry that is fitted to them "
            "together, as a vocabulary with shared: true is"
        )
        problems.append(Problem(str(registry.path), entry.line, entry.field, message))
    if problems:
        raise RegistryError(problems)


def num_dense_inputs(registry: RunConfig, schema: FeatureSchema) -> int:
    """Columns of ``Batch.dense_features`` after preprocessing, which may widen features.

    Raises:
        RegistryError: as ``feature_steps``.
    """
    steps = feature_steps(registry, schema)
    return sum(math.prod(step.width for step in steps.get(name, ())) for name in schema.dense)


def _numbered_twice(
    registry: RunConfig, chains: Mapping[str, Sequence[Entry[Preprocessing]]]
) -> Iterator[Problem]:
    """What is wrong with entries that number what one of the same plugin has numbered before."""
    for name, chain in chains.items():
        first: dict[str, Entry[Preprocessing]] = {}
        for entry in chain:
            known = first.setdefault(entry.plugin.name, entry)
            if known is not entry and num_ids_of(entry.plugin) is not None:
                yield Problem(
                    str(registry.path),
                    entry.line,
                    f"{entry.field}.features",
                    f"{name} has its {entry.plugin.name} in {known.field} (line {known.line}), and "
                    "this one would number what that one made; leave the feature out of one",
                )


def _matched(pattern: str, names: list[str]) -> str:
    if names == [pattern]:
        return pattern
    return f"{pattern} matches {', '.join(names)}, which"


def _other(schema: FeatureSchema, names: list[str]) -> str:
    kind = "sparse (ids)" if names[0] in schema.sparse else "dense (numbers)"
    return f"{'is' if len(names) == 1 else 'are'} {kind}"

"""Notes of commands about missing training data and out-of-vocabulary ids."""

from __future__ import annotations

from pathlib import Path

import click
import torch.distributed as dist

from recd_plugins.api import (
    MOST_UNKNOWN,
    Preprocessing,
    RunConfig,
    rank_agreement,
    run_identity,
    trained_models,
    transforms,
)


def say_absent(registry: RunConfig, checkpoint: Path) -> None:
    """Print a note if the training data is missing, with the reason.

    Raises RecdError if the dataset options differ from training.
    """
    run_identity.check_same_dataset(checkpoint, registry)
    if isinstance(registry.dataset, trained_models.AbsentData):
        error = str(registry.dataset.error).rstrip(".")
        click.echo(
            f"The training data cannot be read ({error}). The command uses the "
            f"columns stored in {checkpoint}.",
            err=True,
        )


class UnknownIds:
    """Counts distinct out-of-vocabulary ids per feature, from the creation of this object on.

    Counts nothing if other processes preprocess the ids: ``training.workers`` must be 0, and an
    ingestion plugin disables the counts.
    """

    def __init__(self, registry: RunConfig) -> None:
        self._counted: dict[int, tuple[list[str], set[int]]] = {}
        if registry.ingestion is not None:
            return
        schema = registry.dataset.schema()
        for feature, steps in transforms.fitted_steps(registry, schema).items():
            for step in steps if feature in schema.sparse else ():  # numbers have no ids
                if type(step).fit is Preprocessing.fit:
                    continue
                if step.unknown_ids is None:  # features with the same vocabulary share the set
                    step.unknown_ids = set()
                names, _ = self._counted.setdefault(id(step.unknown_ids), ([], step.unknown_ids))
                names.append(feature)

    def say(self) -> None:
        """Sum the counts over all ranks and print them on rank 0. Collective: call on all ranks."""
        ranks = rank_agreement.together(lambda: [ids for _, ids in self._counted.values()])
        counts = [len(set[int]().union(*of_ranks)) for of_ranks in zip(*ranks, strict=True)]
        told = [
            f"{' and '.join(map(repr, names))} {min(count, MOST_UNKNOWN):,}"
            + " or more" * (count >= MOST_UNKNOWN)
            for (names, _), count in zip(self._counted.values(), counts, strict=True)
            if count
        ]
        if told and dist.get_rank() == 0:
            click.echo(
                "Distinct out-of-vocabulary ids per feature, scored as unknown ids: "
                f"{', '.join(told)}",
                err=True,
            )

"""How many readers there are while a Dataset runs: tasks at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

# Ray Data's interface for what bounds its tasks, and the key that names those in use: private by
# their path, and there is no public one that changes a bound while a Dataset runs. Ray 2.60.
from ray.data import DataContext
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.data._internal.execution.backpressure_policy.backpressure_policy import (
    BackpressurePolicy,
)
from ray.data._internal.execution.operators.map_operator import MapOperator

if TYPE_CHECKING:
    from ray.data._internal.execution.interfaces import PhysicalOperator


@dataclass
class _Limit:
    tasks: int


_LIMIT = _Limit(1)


class AtMost(BackpressurePolicy):
    """Lets each Dataset of this process run as many tasks as ``set_limit`` said last."""

    def can_add_input(self, op: PhysicalOperator) -> bool:
        return not isinstance(op, MapOperator) or op.num_active_tasks() < _LIMIT.tasks


def limit() -> int:
    """Tasks of a Dataset at a time."""
    return _LIMIT.tasks


def set_limit(tasks: int) -> None:
    """Takes effect at once, but that tasks which run are not ended."""
    _LIMIT.tasks = tasks


def install(context: DataContext) -> None:
    """Bound the Datasets that are made with ``context``, besides what Ray Data does."""
    policies = [*ENABLED_BACKPRESSURE_POLICIES, AtMost]
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, policies)

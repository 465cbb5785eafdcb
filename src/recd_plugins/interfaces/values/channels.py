"""Collectives of a process group, whose bytes are counted apart."""

from __future__ import annotations

from typing import Any, Literal, get_args

#: What a collective does with what ranks send.
CollectiveKind = Literal[
    "all_to_all", "reduce_scatter", "all_gather", "all_reduce", "broadcast", "other"
]
#: A process group by its name, and one kind of its collectives.
Channel = tuple[str, CollectiveKind]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


def is_group(name: object) -> bool:
    """Whether a process group of this process has that name."""
    try:
        resolve_group(name)
    except (RuntimeError, TypeError):
        return False
    return True


def resolve_group(name: object) -> Any:
    """The process group of that name; raises RuntimeError or TypeError where there is none."""
    from torch.distributed import distributed_c10d

    # Private, but how torch's functional collectives themselves find it (2.11 to 2.14).
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(name)

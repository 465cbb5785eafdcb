"""What steps of preprocessing say of themselves, which is by options of an entry."""

from __future__ import annotations

from typing import get_args

from recd_plugins.interfaces import Preprocessing
from recd_plugins.interfaces.preprocessing import Scope, Values


def wrong_value(step: Preprocessing) -> str | None:
    """What is none of what there is, in words; None where all is well."""
    kinds, scopes = get_args(Values), get_args(Scope)
    takes: object = step.takes
    if not isinstance(takes, tuple | list) or any(each not in kinds for each in takes):
        words = " and ".join(map(repr, kinds))
        return f"takes is {takes!r:.80}; expected a tuple of {words}"
    if step.scope not in scopes:
        words = " or ".join(map(repr, scopes))
        return f"scope is {step.scope!r:.80}; expected {words}"
    if type(step.width) is not int or step.width < 1:
        return f"width is {step.width!r:.80}; expected 1 or more"
    return None


def wrong_at_first(step: Preprocessing) -> str | None:
    """The same of one that was just made, which nobody has fitted."""
    if step.fitted is not None:
        return (
            f"fitted is {step.fitted!r:.80} before anybody has called fit; who calls it keeps "
            "there what it came to: take another name"
        )
    return wrong_value(step)

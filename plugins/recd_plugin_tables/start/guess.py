"""Guesses the role of each column from its name, type and sample, and explains why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow.types as pt

from recd_plugin_tables.kinds import (
    FEATURES,
    KEYS,
    Role,
    holds_nothing,
    is_list,
    is_span,
    plain,
    possible_roles,
)
from recd_plugin_tables.start.guesses import Guess, Guesses, shares_ids
from recd_plugin_tables.start.labels import WantedLabel
from recd_plugin_tables.start.names import (
    ENTITIES,
    HISTORY_WORDS,
    ID_WORDS,
    LABEL,
    NUMBER_WORDS,
    QUANTITY_WORDS,
    RATING,
    REQUEST,
    SESSION,
    USER,
    is_later_event,
    is_outcome,
    is_stored_time,
    is_timestamp,
    label_of,
    named_so,
    time_column,
    why_suspicious,
    words_of,
)
from recd_plugin_tables.start.survey import Seen, Survey
from recd_plugin_tables.values import WHOLE, largest_whole
from recd_plugins.api import DataError, text_utils

# A list with at least this many ids on average is a history and gets its own pooling.
_HISTORY = 8
# Maximum length of lists of numbers used as dense inputs. Longer lists are unused.
_MOST_NUMBERS = 512
# Texts with more characters are not ids.
_LONG_TEXT = 80
# Texts of a positive label.
_YES = {"yes", "y", "true", "t", "positive", "pos", "good", "click", "clicked", "1"}
# Integers with at most this many values, or this share of distinct values, are ids.
_FEW_VALUES = 50
_MANY_VALUES = 0.2
# Integers far above 0, compared with their range, are ids if they have at least this many values.
_NUMBERED = 200


@dataclass(frozen=True)
class Wanted:
    """Columns that the user assigned to roles. None means guess the column.

    With several ``labels``, ``label`` is the column of the first one.
    """

    label: str | None = None
    session: str | None = None
    time: str | None = None
    request: str | None = None
    implicit: bool = False
    unused: tuple[str, ...] = ()
    positive_from: float | None = None
    roles: Mapping[str, tuple[Role, ...]] = field(default_factory=dict)
    labels: tuple[WantedLabel, ...] = ()


def lists_to_explode(survey: Survey, label: str | None) -> tuple[str, ...]:
    """Return the columns to explode so that each row has one value of the label."""
    leaf = next((seen.leaf for seen in survey.seen if seen.leaf.name == label), None)
    if leaf is None or leaf.exploded:
        return survey.explode
    is_field = len(leaf.path) > 1 and is_list(plain(survey.sample.schema.field(leaf.path[0]).type))
    return leaf.path[:1] if is_field else ()


def guess(survey: Survey, wanted: Wanted) -> Guesses:
    """Guess the role of each column."""
    _check(survey, wanted)
    left_out = set(wanted.unused)
    free = [seen for seen in survey.seen if seen.leaf.name not in left_out]
    label = None if wanted.implicit else _label(survey, free, wanted)
    others = {each.column for each in wanted.labels} - {wanted.label}
    free = [seen for seen in free if seen.leaf.name not in others]
    free = [seen for seen in free if label is None or seen.leaf.name != label.name]
    suspicious = _suspicious(survey, free, label)
    outcomes = _outcomes(survey, free, suspicious)
    free = [seen for seen in free if seen.leaf.name not in outcomes]
    time = wanted.time or time_column(survey, free)
    joinable = [seen for seen in free if not seen.dominant_share]
    request = wanted.request or named_so(joinable, REQUEST, "request")
    session = (
        wanted.session
        or named_so(joinable, SESSION, "session")
        or named_so(joinable, USER, "session")
        or request
    )
    columns = []
    for seen in survey.seen:
        name = seen.leaf.name
        if name in left_out:
            columns.append(Guess(seen, ("unused",), "set by --unused"))
        elif label is not None and name == label.name:
            columns.append(label)
        elif name in others:
            columns.append(_as_label(survey, seen, wanted, "set by --label"))
        else:
            given = {"session": name == session, "request": name == request, "time": name == time}
            found = _with_dominant_value(_column(seen, given, outcomes.get(name, "")))
            if lists := _lists_of(survey, found):
                why = f"{seen.distinct:,} distinct integers, also in lists of {lists!r}"
                found = Guess(seen, (*found.roles[:-1], "id"), why)
            if name in wanted.roles:
                found = _with_role(survey, seen, wanted.roles[name], found)
            if name in suspicious and set(found.roles) & set(FEATURES):
                found = replace(found, suspicious=suspicious[name])
            columns.append(found)
    if not any(set(each.roles) & {"id", "ids", "number", "numbers"} for each in columns):
        raise DataError(
            f"{survey.location}: no column can be a feature: "
            f"{', '.join(f'{each.name!r} ({each.why})' for each in columns)}. Set --as COLUMN=ROLE."
        )
    guessed = {each.name: each.options for each in columns if each.roles == ("label",)}
    if wanted.labels:
        columns = [
            replace(each, why="set by --label") if each.roles == ("label",) else each
            for each in columns
        ]
    labels = [each.options(guessed[each.column], survey[each.column]) for each in wanted.labels]
    return Guesses(survey, tuple(columns), wanted.implicit, tuple(labels))


def _with_role(survey: Survey, seen: Seen, roles: tuple[Role, ...], guessed: Guess) -> Guess:
    """Return the guess for a column whose roles were set by ``--as``: one, or key and a feature."""
    *first, role = roles
    if role == guessed.roles[-1]:
        return replace(guessed, roles=(*first, *guessed.roles))
    if role in ("id", "ids") and seen.least is not None and not seen.whole:
        name = seen.leaf.name
        raise DataError(f"{survey.location}: --as: column {name!r} has fractions. {WHOLE}")
    keys = [each for each in guessed.roles if each in KEYS] if role in FEATURES else []
    options = _separated(seen) if role == "ids" else {}
    history = role == "ids" and seen.length >= _HISTORY
    return Guess(
        seen, (*first, *keys, role), "set by --as", options, history, _has_long_tail(seen, role)
    )


def _separated(seen: Seen) -> dict[str, Any]:
    """Return the options of a text with several ids."""
    if seen.separator is None:
        return {}
    return {"separator": seen.separator} | ({"integers": True} if seen.integers else {})


def _has_long_tail(seen: Seen, role: Role = "number") -> bool:
    return (
        role == "number"
        and seen.least is not None
        and seen.largest is not None
        and seen.least >= 0
        and seen.largest > 1000
    )


def _check(survey: Survey, wanted: Wanted) -> None:
    names = [seen.leaf.name for seen in survey.seen]
    given: list[tuple[str, str | None, Role]] = [
        ("label", wanted.label, "label"),
        ("session", wanted.session, "session"),
        ("time", wanted.time, "time"),
        ("request", wanted.request, "request"),
        *(("label", each.column, "label") for each in wanted.labels),
        *(("unused", name, "unused") for name in wanted.unused),
        *(("as", name, role) for name, roles in wanted.roles.items() for role in roles),
    ]
    for option, name, role in given:
        if name is None:
            continue
        if name not in names:
            meant = (
                text_utils.did_you_mean(name, names)
                or f". Use one of: {', '.join(map(repr, names))}."
            )
            raise DataError(
                f"{survey.location}: --{option}: the table has no column {name!r}{meant}"
            )
        kind = survey[name].leaf.type
        if role not in possible_roles(kind):
            raise DataError(
                f"{survey.location}: --{option}: column {name!r} has type {kind}, which role "
                f"{role!r} does not support. Use another column"
                + (", or make each list element a row with --explode." if is_list(kind) else ".")
            )
    if wanted.label is not None and (wanted.implicit or wanted.label in wanted.unused):
        other = "--implicit" if wanted.implicit else "--unused"
        raise DataError(
            f"{survey.location}: --label and {other} cannot be combined. Remove one of the options."
        )


def _lists_of(survey: Survey, found: Guess) -> str | None:
    """Return the column whose lists have the ids of a column that is guessed to be a number."""
    seen, name = found.seen, words_of(found.seen.leaf.path[-1])
    repeats = seen.least is not None and seen.least >= 0 and seen.distinct > _FEW_VALUES
    if found.roles[-1] != "number" or not seen.whole or not repeats or QUANTITY_WORDS.search(name):
        return None
    names = [each.leaf.name for each in survey.seen if each.is_list or each.integers]
    return next((each for each in names if shares_ids(survey, each, seen.leaf.name)), None)


def _label(survey: Survey, free: list[Seen], wanted: Wanted) -> Guess:
    if wanted.label is not None:
        return _as_label(survey, survey[wanted.label], wanted, "set by --label")
    binary = [seen for seen in free if seen.binary and not seen.is_list]
    named = named_so(binary, LABEL, "label")
    inside = [seen.leaf.exploded for seen in binary if named_so([seen], LABEL, "label")]
    rated = named_so(free, RATING, "label", lambda seen: seen.largest is not None)
    # A rating takes precedence over a name that only ends in a keyword, as verified_purchase does.
    is_rating = (
        rated is not None
        and _is_named(survey[rated], RATING)
        and (named is None or not _is_named(survey[named], LABEL))
    )
    if named is not None and len(set(inside)) < 2 and not is_rating:
        return _as_label(survey, survey[named], wanted, "known by its name and two values")
    if rated is not None and (not binary or (named is not None and is_rating)):
        return _as_label(survey, survey[rated], wanted, "known by its name")
    texts = [seen for seen in free if seen.is_text and seen.distinct == 2]
    likely = [*binary, *texts, *([survey[rated]] if rated else [])]
    if len(likely) == 1 and binary:
        return _as_label(survey, binary[0], wanted, "the only column with values 0 and 1")
    could = ""
    if likely:
        could = f" Candidates: {', '.join(repr(seen.leaf.name) for seen in likely)}."
    called = named_so(free, LABEL, "label")
    if called and survey[called].distinct == 1:
        could += f" Column {called!r} is always {survey[called].example}."
    raise DataError(
        f"{survey.location}: the label column cannot be guessed.{could} Set --label COLUMN, or "
        "--implicit if every row is a positive."
    )


def _is_named(seen: Seen, words: tuple[str, ...]) -> bool:
    return words_of(seen.leaf.path[-1]) in words


def _as_label(survey: Survey, seen: Seen, wanted: Wanted, why: str) -> Guess:
    if seen.binary or (seen.whole and {seen.least, seen.largest} <= {0, 1}):
        return Guess(seen, ("label",), why)  # the sample may contain only 0
    name = seen.leaf.name
    if seen.largest is None:
        if not seen.is_text or seen.distinct != 2:
            raise DataError(
                f"{survey.location}: label column {name!r} has {seen.distinct} distinct values, "
                f"such as {seen.example!r}. Replace the values by 0 and 1."
            )
        positive, other = _positive_text(survey, name)
        why = f"{why}; {positive!r} becomes 1, {other!r} becomes 0"
        return Guess(seen, ("label",), why, {"positive": [positive]})
    start = _upper_part(seen) if wanted.positive_from is None else wanted.positive_from
    meaning = f"positive from {start:g} (values are {seen.least:g} to {seen.largest:g})"
    if seen.distinct == 2 and seen.least is not None and seen.least < start <= seen.largest:
        meaning = f"{seen.least:g} becomes 0, {seen.largest:g} becomes 1"
    return Guess(seen, ("label",), f"{why}; {meaning}", {"positive_from": start})


def _positive_text(survey: Survey, name: str) -> tuple[str, str]:
    """Return the two texts of a label: first the positive one, a word like yes or the rarer."""
    counts = Counter(text for text in survey.values(name).to_pylist() if text is not None)
    first, second = sorted(
        counts, key=lambda text: (text.strip().lower() not in _YES, counts[text])
    )
    return first, second


def _upper_part(seen: Seen) -> float:
    """Return a threshold for positive labels: 4 for one to five stars, above 0 for counts."""
    assert seen.least is not None
    assert seen.largest is not None
    if seen.least == 0 and seen.largest > 10:
        return 1.0
    start = seen.least + 0.75 * (seen.largest - seen.least)
    return float(round(start)) if seen.whole else start


def _column(seen: Seen, given: Mapping[str, bool], outcome: str) -> Guess:
    order: tuple[Role, ...] = ("session", "request", "time")
    keys = [role for role in order if given[role]]
    by = "weekday" if seen.daily else "hour"
    part = "day of the week" if seen.daily else "hour of the day in UTC"
    if given["time"] and not (pt.is_date(plain(seen.leaf.type)) or is_timestamp(seen) or seen.unit):
        return Guess(seen, tuple(keys), "orders the rows; not a feature, as its unit is unknown")
    if given["time"]:
        options = {"unit": seen.unit, "by": by} if seen.unit else {"by": by}
        return Guess(seen, (*keys, "id"), f"time of the row; its {part} is a feature", options)
    why_unused = _why_unused(seen)
    feature = Guess(seen, ("unused",), why_unused) if why_unused else _feature(seen)
    (role,) = feature.roles
    if outcome and not why_unused:
        role = "number" if role == "id" and seen.largest is not None and seen.distinct > 2 else role
        why_unused = f"{outcome}; set `as: {role}` if it is known before the label"
    if why_unused:
        if keys:
            return Guess(seen, tuple(keys), " and ".join(keys))
        return Guess(seen, ("unused",), why_unused)
    if keys:
        if given["request"] and not given["session"]:
            return Guess(seen, tuple(keys), "groups the rows shown together")
        if seen.is_list or role not in ("id", "number"):
            return Guess(seen, tuple(keys), " and ".join(keys))
        why = "groups the rows of a session"
        if given["session"] and named_so([seen], SESSION, "session"):
            return Guess(seen, tuple(keys), why)
        return Guess(seen, (*keys, "id"), f"{why}, and is a feature", feature.options)
    stored = {"unit": seen.unit} if is_stored_time(seen) else {}
    if pt.is_date(plain(seen.leaf.type)) or is_timestamp(seen) or stored:
        what = f"a {'date' if seen.daily else 'time'}; its {part} is a feature"
        return Guess(seen, ("id",), what, {**stored, "by": by})
    return feature


def _with_dominant_value(found: Guess) -> Guess:
    """Extend the reason of a guess if one very frequent value makes the column a bad session id."""
    seen = found.seen
    grouping = bool({"session", "request"} & set(found.roles))
    named = named_so([seen], (*SESSION, *USER, *REQUEST), "session")
    if not seen.dominant_share or not (grouping or named):
        return found
    share = f"{seen.most_frequent[:24]!r} is in {seen.dominant_share:.0%} of the rows"
    meaning = (
        "which are grouped as one session" if grouping else "so the column cannot identify sessions"
    )
    return replace(found, why=f"{found.why}; {share}, {meaning}")


def _why_unused(seen: Seen) -> str:
    kind = plain(seen.leaf.type)
    if holds_nothing(kind) or seen.values == 0:
        return "no values in these rows"
    roles = possible_roles(kind)
    if roles == ("unused",) or not set(roles) - {"unused", "key"}:
        return f"type {seen.leaf.type} cannot be a feature"
    if seen.is_text and seen.example.startswith(("{", "[")) and seen.separator is None:
        return f"JSON text such as {seen.example!r}; write its fields as columns"
    if seen.characters > _LONG_TEXT:
        return f"text with {seen.characters:.0f} characters on average"
    if seen.distinct == 1 and not seen.nulls:
        return f"always {seen.example!r} in these rows"
    if _holds_numbers(seen) and seen.width is None:
        return "lists of numbers of different lengths"
    if seen.is_list and seen.width is not None and seen.width > _MOST_NUMBERS and not seen.whole:
        return f"{seen.width} numbers per row, more than {_MOST_NUMBERS}"
    return ""


def _outcomes(survey: Survey, free: list[Seen], suspicious: Mapping[str, str]) -> dict[str, str]:
    """Return, per outcome column, the reason why it is unknown at prediction time."""
    reasons = {}
    for seen in free:
        if seen.leaf.name in suspicious and is_later_event(seen):
            reasons[seen.leaf.name] = "named like an outcome, with values like one"
        elif is_outcome(survey, seen):
            reasons[seen.leaf.name] = "named like an outcome"
    return reasons


def _suspicious(survey: Survey, free: list[Seen], label: Guess | None) -> dict[str, str]:
    """Return, per suspicious column, why it may be known only after the label."""
    if label is None:
        return {}
    labels = label_of(survey, label.seen, label.options)
    reasons = {seen.leaf.name: why_suspicious(survey, seen, labels) for seen in free}
    return {name: why for name, why in reasons.items() if why}


def _feature(seen: Seen) -> Guess:
    """Guess the role of a column that is neither a key nor a time."""
    kind, name = plain(seen.leaf.type), words_of(seen.leaf.path[-1])
    is_history = seen.length >= _HISTORY or bool(HISTORY_WORDS.search(name))
    is_unique = seen.unique and seen.rows > _FEW_VALUES
    is_quantity = QUANTITY_WORDS.search(name) is not None

    def found(role: Role, why: str, **more: Any) -> Guess:
        return Guess(seen, (role,), why, **more)

    if seen.is_list:
        if _holds_numbers(seen):
            return found("numbers", f"{seen.width} numbers per row")
        return found("ids", f"lists of {seen.length:.1f} ids on average", history=is_history)
    if seen.is_text:
        if is_unique:
            return found("key", "a different value in every row")
        if seen.separator is not None:
            why = f"texts with {seen.length:.1f} ids on average"
            return found("ids", why, options=_separated(seen), history=is_history)
        return found("id", f"{seen.distinct:,} distinct texts")
    if pt.is_boolean(kind):
        return found("id", "true or false")
    if is_span(kind):
        return found("number", "a duration in seconds")
    if seen.largest is None or seen.least is None:
        return found("id", f"{seen.distinct:,} distinct values")
    span = f"{seen.least:g} to {seen.largest:g}"
    long_tail = _has_long_tail(seen)
    rounded = pt.is_floating(kind) and max(seen.largest, -seen.least) > largest_whole(kind)
    if not seen.whole or (rounded and not ID_WORDS.search(name)):
        return found("number", span, long_tail=long_tail)
    if is_unique and not (is_quantity or NUMBER_WORDS.search(name)):
        return found("key", "a different value in every row")
    if not is_quantity and (ID_WORDS.search(name) or ENTITIES.fullmatch(name)):
        return found("id", f"{seen.distinct:,} distinct values; named like an id")
    if is_quantity or NUMBER_WORDS.search(name):
        return found("number", f"{span}; named like a number", long_tail=long_tail)
    if seen.distinct <= _FEW_VALUES or seen.distinct > _MANY_VALUES * seen.values:
        return found("id", f"{seen.distinct:,} distinct integers")
    if seen.largest - seen.least <= 2 * seen.distinct and seen.least in (0, 1):
        return found("id", f"{seen.distinct:,} distinct integers without gaps")
    is_far = seen.unit is None and seen.least > 2 * (seen.largest - seen.least)
    if is_far and seen.distinct >= _NUMBERED:
        return found("id", f"{seen.distinct:,} distinct integers, numbered from {seen.least:g}")
    return found("number", span, long_tail=long_tail)


def _holds_numbers(seen: Seen) -> bool:
    kind = plain(seen.leaf.type)
    of = plain(kind.value_type) if seen.is_list else kind
    fractions = (pt.is_floating(of) or pt.is_decimal(of)) and not seen.whole
    return seen.is_list and (fractions or is_span(of))

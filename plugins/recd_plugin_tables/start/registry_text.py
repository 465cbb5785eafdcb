"""Writes a registry file for a table, with a comment for every column."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recd_plugin_tables.kinds import feature_name, holds_text
from recd_plugin_tables.start.dynamic import COMMENT, dynamic_tables
from recd_plugin_tables.start.guesses import (
    Guess,
    Guesses,
    ItemSequence,
    Shared,
    Towers,
    repeats_pay,
    sequence,
    shared,
    towers,
)

if TYPE_CHECKING:
    from recd_plugin_tables.start.histories import StoredHistory

_WIDTH = 100
# Minimum number of sessions in a test split.
_SESSIONS = 20
# Default fraction of rows in the validation split of a table with at least this many rows.
_VALIDATION, _FEWEST_ROWS = 0.1, 2_000
# Minimum number of distinct times that can be split into training, validation and test rows.
_FEWEST_TIMES = 10
# Negatives per row of a table without labels. The batch size is a multiple of one more.
_NEGATIVES = 4
# Maximum number of items in a history that is built.
_LAST = 20
# Maximum number of events in a history that is read from a store.
_LAST_EVENTS = 50
_INDENT = " " * 6

_TEXT = """\
{head}
version: 1

# The table. The first run imports it into the folder of option `cache` (default .recd/tables).
dataset:
  use: tables.table
  options:
{path}{source}{explode}{implicit}{labels}\
    # Role of each column, guessed from its name, its type and
    # {sample}. The roles are
    # id, ids, number, numbers, session, time, request, key, label and unused.
    # To change an id to a number or back, run recd init again with --as COLUMN=ROLE --force. By
    # hand, also change preprocessing, model.tables (t_COLUMN) and, for numbers, missing: VALUE.
    columns:
{columns}
{histories}{infinite}{order}{split}{negatives}
{converter}
{preprocessing}{pooling}{sharding}{model}training:
  batch_size: {batch_size} # rows per batch and rank
  ranks: 1 # number of processes; torchrun sets its own number
  epochs: 1
  optimizer: rowwise_adagrad
  learning_rate: 0.05
  dense_learning_rate: 0.01
  eps: 1.0e-6
{evaluate}{validation}  checkpoint: {{runs: {runs}}} # each run gets a numbered folder in it
"""

_AUTO = """\
# Placement of table rows. `auto` picks the plan with the shortest predicted step.
"""

_LIST_DICT = """\
# Deduplicates features. Rows of one user and time share a history, which is not compared again.
converter:
  use: recd.list_dict
  options: {{groups: auto, min_dedupe_factor: 1.5}}
"""

_IKJT = """\
# Deduplicates features, because rows of a {group} repeat lists.
converter:
  use: recd.ikjt
  options: {{groups: auto, min_dedupe_factor: 1.5}}
"""

_KJT = """\
# No deduplication (recd.ikjt), because rows repeat too little or lists are too short.
converter:
  use: recd.kjt
"""

_MODEL = """\
# num_embeddings is the number of distinct ids in these rows, plus room for new ids.
model:
  architecture: dlrm # or dcn
  embedding_dim: 16
  num_embeddings: 1000
{tables}  bottom_mlp: [64]
  top_mlp: [128, 64]
  bag_pooling: mean

"""

_EARLY_STOPPING = """\
  validation: {patience: 1} # after each epoch; stops at the first one without improvement
"""

_TWO_TOWER = """\
# Scores a row from a user tower and an item tower, so `recd rank` can rank all items. Features in
# neither tower are not used, because they could reveal the item.
model:
  use: ranking.two_tower
  options:
    item: {item}
    user: {user}
{dense}    embedding_dim: 32
    # Rows of each table: the number of distinct ids in these rows, plus room for new ids.
    tables:
{tables}    hidden: [64]
    loss: binary

"""

_SASREC = """\
# Predicts the next item of a session from the earlier ones. `recd rank` ranks all items. Other
# columns are not used.
model:
  use: ranking.sasrec
  options: {options}

"""


def registry_text(
    guesses: Guesses,
    *,
    location: str,
    file: Path,
    source: Mapping[str, Any],
    test: float,
    validation: float | None = None,
    history: StoredHistory | None = None,
    dynamic: bool = False,
) -> str:
    """Return the text of a registry file that trains on the table at ``location``.

    Args:
        guesses: guessed roles of the columns.
        location: path or URL of the table.
        file: path of the registry file.
        source: options to open the table.
        test: fraction of rows in the test split.
        validation: fraction of rows in the validation split; None chooses it.
        history: history to read from a store of events.
        dynamic: whether ids with many values get dynamic tables instead of vocabularies.
    """
    survey = guesses.survey
    items = sequence(guesses)
    sides = None if items else towers(guesses)
    alike = shared(guesses)
    rows = _table_rows(guesses, alike)
    if items:
        rows[items.history] = rows[feature_name(items.item)]
        alike = _with_history(alike, items.item, items.history, guesses)
    all_rows = survey.all_rows or survey.rows
    candidates = max((seen.rows for seen in survey.seen if seen.leaf.exploded), default=survey.rows)
    rows_of_batch = _batch_size(all_rows * candidates // survey.rows)
    if guesses.implicit:
        rows_of_batch = rows_of_batch // 16 * 20
    copies = 1 + _NEGATIVES if guesses.implicit and guesses.item and not items else 1
    deduplicates = repeats_pay(guesses, rows_of_batch, copies)
    group = (
        "session" if guesses.the("session") else "request" if guesses.the("request") else "batch"
    )
    ids = guesses.features("id", "ids")
    histories = [feature_name(each.name) for each in ids if each.history]
    if history is not None:
        histories.append(history.name)
        rows[history.name] = _room(history.distinct, True)
        if (item := history.shares) is not None:
            size = max(rows[history.name], rows[feature_name(item)])
            rows[history.name] = rows[feature_name(item)] = size
            alike = _with_history(alike, item, history.name, guesses)
    raw = dynamic_tables(guesses, alike, history) if dynamic else {}
    rows |= raw
    fixed = {name: size for name, size in rows.items() if name not in raw}
    if validation is None:
        time = guesses.the("time")
        is_rough = survey.is_whole and time is not None and time.seen.distinct < _FEWEST_TIMES
        is_small = all_rows * candidates // survey.rows < _FEWEST_ROWS
        unsuitable = not test or guesses.implicit or is_rough or is_small
        validation = 0 if unsuitable else _VALIDATION
    numbers = guesses.features("number", "numbers")
    return _TEXT.format(
        head=_head(guesses, items or sides, location, file),
        path=path_line(location),
        source=f"    source: {_flow(source)}\n" if source else "",
        explode=(
            f"    # Each element of these lists becomes a row. Other columns are stored once.\n"
            f"    explode: {_flow(survey.explode)}\n"
            if survey.explode
            else ""
        ),
        implicit=(
            "    # Every row is a positive interaction with label 1.\n    implicit: true\n"
            if guesses.implicit
            else ""
        ),
        sample="all rows" if survey.is_whole else f"the first {survey.rows:,} rows",
        labels=_labels(guesses),
        columns="\n".join(
            _columns(_not_labels(guesses), guesses.item if guesses.implicit else None)
        ),
        histories=_histories(items, guesses.the("time")) if items else _stored(history),
        infinite=_INFINITE if any(map(_is_infinite, guesses.columns)) else "",
        order=_ORDER if guesses.the("session") or guesses.the("request") else "",
        split=_split(guesses, test, validation, whole_sessions=items is not None),
        negatives=_negatives(guesses.item, sides) if guesses.implicit and not items else "",
        converter=_LIST_DICT.format()
        if history
        else _IKJT.format(group=group)
        if deduplicates
        else _KJT,
        preprocessing=_preprocessing(fixed, alike, numbers),
        pooling=_pooling(histories, " once per unique row" if deduplicates else ""),
        sharding=_sharding(fixed, raw),
        model=_sasrec(items, rows) if items else _model(rows, sides),
        evaluate="  evaluate: false # use recd rank instead\n" if items or sides else "",
        validation=_EARLY_STOPPING if validation and not (items or sides) else "",
        batch_size=rows_of_batch,
        runs=_word(f"runs/{file.stem}"),
    )


def path_line(location: str) -> str:
    """Return the line of a registry file that names its table."""
    return f"    path: {_word(location)}\n"


def _batch_size(samples: int) -> int:
    """Return a batch size from 16 to 1,024 that gives a few hundred steps per epoch."""
    return max(16, min(1024, 1 << max(0, math.floor(math.log2(max(1, samples) / 200)))))


def _table_rows(guesses: Guesses, alike: Sequence[Shared]) -> dict[str, int]:
    together = {name: each.distinct for each in alike for name in each.names}
    return {
        feature_name(each.name): 32
        if each.options.get("by") is not None
        else _room(together.get(each.name, each.seen.distinct), guesses.survey.is_whole)
        for each in guesses.features("id", "ids")
    }


def _room(distinct: int, whole: bool) -> int:
    wanted = distinct * (1.25 if whole else 2) + 8
    digits = 10 ** max(0, math.floor(math.log10(wanted)) - 1)
    return math.ceil(wanted / digits) * digits


def _head(guesses: Guesses, ranked: Towers | ItemSequence | None, location: str, file: Path) -> str:
    survey = guesses.survey
    rows = f"{survey.all_rows:,} rows" if survey.all_rows is not None else "a table"
    lines = [
        f"# {location}: {rows}, {len(guesses.columns)} columns.",
        f"#   recd run {file}",
        *([f"#   recd rank {file}{ranked.rank_options}"] if ranked else []),
        f"#   recd predict {file} TABLE -o scores.parquet",
        "# docs/configuration.md describes every key; `recd validate` checks a file without a run.",
    ]
    return "\n".join(map(_printable, lines))


def _labels(guesses: Guesses) -> str:
    """Return option ``label`` if there are several labels."""
    if not guesses.labels:
        return ""
    lines = "".join(f"{_INDENT}- {_flow(each)}\n" for each in guesses.labels)
    return (
        "    # What to predict. The loss is the sum of these losses times weight (default 1).\n"
        f"    label:\n{lines}"
    )


def _not_labels(guesses: Guesses) -> list[Guess]:
    return [each for each in guesses.columns if not guesses.labels or each.roles != ("label",)]


def _columns(columns: Iterable[Guess], chosen: Guess | None) -> Iterable[str]:
    """Yield a registry line per column. It says to drop rows without the item ``chosen``."""
    for each in columns:
        roles = each.roles[0] if len(each.roles) == 1 else list(each.roles)
        options = {"as": roles, **each.options}
        if (
            holds_text(each.seen.leaf.type)
            and not (each.seen.timed or "integers" in each.options)
            and {"id", "ids"} & set(each.roles)
        ):
            options["texts"] = True
        if each.seen.nulls and not each.unused:
            options |= {"missing": "drop"} if each is chosen else _missing(each)
        value = _flow(roles) if len(options) == 1 else _flow(options)
        line = f"{_INDENT}{_word(each.name)}: {value}"
        why = each.why
        if each.seen.nulls:
            why += f"; {each.seen.nulls / each.seen.rows:.1%} missing"
            why += ", replaced by the median" if _is_number(each) else ""
        if each.suspicious:
            yield f"{_INDENT}# May leak the label ({each.suspicious})."
            yield f"{_INDENT}# Mark it unused if it is known only after the label."
        if _is_infinite(each):
            why += f"; {each.seen.infinite:,} infinite"
        comment = f"  # {_printable(' '.join(why.split()))}"
        if len(line) + len(comment) > _WIDTH:
            yield f"{_INDENT}#{comment[3:]}"[:_WIDTH]
            yield line
        else:
            yield line + comment


def _histories(items: ItemSequence, time: Guess | None) -> str:
    options: dict[str, Any] = {"of": items.item, "last": _LAST}
    order = "sorted by time" if time else "in the order of the table"
    if items.ties == "stored":
        options["ties"] = "stored"
        order = "sorted by time, then by the order of the table"
    return (
        f"    # Earlier items of the session, {order}.\n"
        f"    histories:\n      {items.history}: {_flow(options)}\n"
    )


def _stored(history: StoredHistory | None) -> str:
    if history is None:
        return ""
    options = {**history.options, "last": _LAST_EVENTS}
    return (
        "    # Events of the user strictly before the time of the row.\n"
        f"    histories:\n      {history.name}: {_flow(options)}\n"
    )


def _with_history(
    alike: Sequence[Shared], item: str, history: str, guesses: Guesses
) -> list[Shared]:
    """Add a history feature to the group of columns that share the item's vocabulary."""
    own = Shared((item,), guesses.survey[item].distinct)
    same = next((each for each in alike if item in each.names), own)
    longer = Shared((*same.names, history), same.distinct)
    return [*(each for each in alike if each is not same), longer]


def _sasrec(items: ItemSequence, rows: Mapping[str, int]) -> str:
    item = feature_name(items.item)
    options = {"history": items.history, "item": item, "num_embeddings": rows[item]}
    return _SASREC.format(options=_flow({**options, "embedding_dim": 32, "max_length": _LAST}))


_INFINITE = """\
    # Drop rows with infinite numbers.
    on_nan: drop
"""


_ORDER = """\
    # Groups the rows of each session, so training does not follow the order of the table.
    order: session # or stored: the order of the table
"""


def _is_number(each: Guess) -> bool:
    return bool({"number", "numbers"} & set(each.roles))


def _is_infinite(each: Guess) -> bool:
    return _is_number(each) and each.seen.infinite > 0


def _missing(each: Guess) -> dict[str, Any]:
    if _is_number(each):
        return {"missing": _rounded(each.seen.median or 0)}
    if {"label", "time"} & set(each.roles):
        return {"missing": "drop"}
    return {}


def _rounded(number: float) -> float:
    short = float(f"{number:.3g}")
    return int(short) if short.is_integer() else short


def _split(guesses: Guesses, test: float, validation: float, *, whole_sessions: bool) -> str:
    if not test + validation:
        return ""
    session = guesses.the("session")
    share = min(test or 1, validation or 1)
    # With fewer sessions, a hash may put none into the test split.
    whole = whole_sessions or (session is not None and session.seen.distinct * share >= _SESSIONS)
    by = "time" if guesses.the("time") else "session" if whole else "row"
    what = {
        "time": "The latest rows",
        "session": "Randomly chosen sessions",
        "row": "Randomly chosen rows",
    }[by]
    shares = {name: each for name, each in (("validation", validation), ("test", test)) if each}
    of = " are the test split"
    if validation:
        of = ": the validation split, which selects the best checkpoint"
        of += ", then the test split" if test else ""
    return f"    # {what}{of}.\n    split: {_flow({'by': by, **shares})}\n"


def _negatives(item: Guess | None, sides: Towers | None) -> str:
    if item is None:
        return ""
    options: dict[str, Any] = {"item": feature_name(item.name)}
    if sides is not None and (with_item := [*sides.item[1:], *sides.item_numbers]):
        options["with_item"] = with_item
    options |= {"negatives": _NEGATIVES, "by": "popularity"}
    return (
        "  # Adds negatives after each row: copies with other items and label 0.\n"
        f"  wrap:\n    - use: ranking.negatives\n      options: {_flow(options)}\n"
    )


def _model(rows: Mapping[str, int], sides: Towers | None) -> str:
    if sides is None:
        lines = [f"    t_{name}: {_flow({'num_embeddings': of})}\n" for name, of in rows.items()]
        return _MODEL.format(tables="".join(["  tables:\n", *lines] if lines else []))
    dense = {"item_dense": sides.item_dense, "user_dense": sides.user_dense}
    return _TWO_TOWER.format(
        item=_flow(sides.item),
        user=_flow(sides.user),
        dense="".join(f"    {name}: {_flow(of)}\n" for name, of in dense.items() if of),
        tables="".join(f"      t_{name}: {rows[name]}\n" for name in sides.item + sides.user),
    )


def _preprocessing(
    rows: Mapping[str, int], alike: Sequence[Shared], numbers: Sequence[Guess]
) -> str:
    if not rows and not numbers:
        return ""
    lines = []
    if rows:
        lines = ["# Maps ids to table rows. Ids that are not in the training data share rows."]
    lines.append("preprocessing:")
    by_rows: dict[int, list[str]] = {}
    together = [[n for n in map(feature_name, each.names) if n in rows] for each in alike]
    together = [names for names in together if len(names) > 1]
    for name, size in rows.items():
        if not any(name in names for names in together):
            by_rows.setdefault(size, []).append(name)
    for size, names in by_rows.items():
        lines += _entry("tables.vocabulary", names, {"rows": size})
    for names in together:
        lines.append("  # These features have the same ids, so they share a vocabulary.")
        lines += _entry("tables.vocabulary", names, {"rows": rows[names[0]], "shared": True})
    tails = [each for each in numbers if each.long_tail]
    for use, of in (("tables.log1p", tails), ("tables.standardise", numbers)):
        if of:
            lines += _entry(use, [_dense_name(each) for each in of], {})
    return "\n".join(lines) + "\n\n"


def _sharding(fixed: Collection[str], raw: Collection[str]) -> str:
    if not fixed and not raw:
        return ""
    lines = ["sharding:"]
    if raw:
        lines += _entry("dynamic.table", [f"t_{name}" for name in raw], {}, "tables")
    if fixed:
        lines += _entry("auto", ["t_*"], {}, "tables")
    comments = (_AUTO if fixed else "") + (COMMENT if raw else "")
    return comments + "\n".join(lines) + "\n\n"


def _dense_name(each: Guess) -> str:
    return feature_name(each.name) + ("_*" if "numbers" in each.roles else "")


def _pooling(histories: Sequence[str], once: str) -> str:
    if not histories:
        return ""
    lines = [
        f"# Histories are averaged{once}. Alternatives: recd.attention, recd.target_attention.",
        "pooling:",
        *_entry("recd.mean", histories, {}),
    ]
    return "\n".join(lines) + "\n\n"


def _entry(
    name: str, patterns: Sequence[str], options: Mapping[str, Any], key: str = "features"
) -> list[str]:
    given = {"use": name, key: patterns} | ({"options": options} if options else {})
    if len(line := f"  - {_flow(given)}") <= _WIDTH:
        return [line]
    return [
        f"  - use: {name}",
        f"    {key}:",
        *(f"      - {_word(pattern)}" for pattern in patterns),
        *([f"    options: {_flow(options)}"] if options else []),
    ]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_word(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return _word(value) if isinstance(value, str) else repr(value)


# Words that YAML parses as something other than text.
_NOT_TEXT = re.compile(r"(?i)(y|n|yes|no|on|off|true|false|null|nan|inf|[-+.\d].*)$")


def _word(text: str) -> str:
    bare = re.fullmatch(r"[A-Za-z_/][\w./\-]*", text) and not _NOT_TEXT.match(text)
    return text if bare else _printable(json.dumps(text, ensure_ascii=False))


def _printable(text: str) -> str:
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )

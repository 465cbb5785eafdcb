"""Rules that infer the meaning of a column from its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from recd_plugin_tables.kinds import Role, plain, possible_roles
from recd_plugin_tables.start.survey import Seen, Survey
from recd_plugin_tables.values import is_plausible

# Keywords in names, in order of preference.
LABEL = (
    "label", "click", "clicked", "is_click", "is_clicked", "target", "y", "converted",
    "conversion", "purchased", "purchase", "bought", "liked", "like", "response", "outcome",
)  # fmt: skip
RATING = ("rating", "stars", "score")
_UNITS = r"m?s|us|ns|(milli|micro|nano)?s(ec(ond)?s?)?|(milli|micro|nano)s|epoch|unix|utc"
# Words before "time" that make it a duration.
_NO_DURATION = r"\w*(?<!life|play|down|over)(?<!dwell)(?<!run|air)(?<!up)"
TIME = tuple(
    rf"{word}(_?(in_)?({_UNITS}))?"
    for word in (
        "timestamp", "ts", "time", "datetime", "event_time", "created_at", "date", "at", "when",
        "epoch", "unix", "utc", r"\w*time_?stamp", rf"{_NO_DURATION}time", "dt", "t", "created",
        "logged",
    )
)  # fmt: skip
SESSION = ("session_id", "session", "visit_id", "visit", "user_session", "sid")
USER = (
    "user_id", "user", "uid", "userid", "customer_id", "customer", "visitor_id", "visitor",
    "member_id", "account_id", "client_id", "device_id", "person",
)  # fmt: skip
REQUEST = (
    "request_id", "request", "impression_id", "query_id", "search_id", "slate_id", "page_view_id",
)  # fmt: skip
ITEM = (
    "item_id", "item", "product_id", "product", "article_id", "article", "news_id", "movie_id",
    "movie", "video_id", "video", "track_id", "song_id", "ad_id", "doc_id", "listing_id", "sku",
)  # fmt: skip
ID_WORDS = re.compile(
    r"(^|_)(id|ids|code|type|category|brand|kind|class|group|zip|country|city|region|lang|device|os|"
    r"gender|sex|weekday|month|hour|bucket|flag|status|channel|source|segment)s?(_|$)"
    r"|^(c|cat|sparse)_?\d+$"  # anonymous categories, such as C14
)
# Names of ids and codes. Such columns are never times, whatever their values.
KEY_WORDS = re.compile(
    r"(^|_)(id|ids|code|key|hash|no|number|sku|zip|phone|mobile|cell|tel|fax|index|"
    r"barcode|ean|upc|gtin|isbn|iban|merchant|account|card)$|[a-z]id$"
)
NUMBER_WORDS = re.compile(
    r"(^|_)(count|num|n|number|amount|age|price|cost|qty|quantity|duration|seconds|minutes|days|"
    r"length|size|score|rating|rate|ratio|share|position|rank|total|avg|mean|sum|views|visits|"
    r"balance|income|distance|height|weight|temperature|year)s?(_|$)"
)
# Last words of names that are quantities whatever the other words, such as device_age_days.
QUANTITY_WORDS = re.compile(
    r"(^|_)(counts?|amount|age|price|cost|qty|quantity|score|rating|rate|ratio|share|duration|"
    r"length|distance|income|balance|total|avg|mean|sum|ms|seconds|minutes|hours|days|weeks|months|"
    r"years|bytes|pct|percent)$"
)
HISTORY_WORDS = re.compile(
    r"(^|_)(hist|history|seq|sequence|recent|last|past|previous|clicked)(_|s|$)"
)


def named_so(
    found: list[Seen],
    words: tuple[str, ...],
    role: Role,
    allowed: Callable[[Seen], bool] = lambda _: True,
) -> str | None:
    """Return the column whose name ends with one of ``words``, or None. Earlier words win."""
    usable = [seen for seen in found if role in possible_roles(seen.leaf.type) and allowed(seen)]
    for start in ("", ".*_"):
        for word in words:
            for seen in usable:
                if re.fullmatch(start + word, words_of(seen.leaf.path[-1])):
                    return seen.leaf.name
    return None


def words_of(name: str) -> str:
    """Convert a column name to snake case, without a type suffix: userId:token becomes user_id."""
    name = name.partition(":")[0]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_")


ENTITIES = re.compile("|".join((*SESSION, *USER, *ITEM)))


def time_column(survey: Survey, found: list[Seen]) -> str | None:
    """Return the time column, by name or as the first column with times or dates, or None."""
    hourly = [seen for seen in found if not seen.daily]
    return (
        named_so(hourly, TIME, "time", _is_time)
        or named_so(found, TIME, "time", _is_time)
        or next((seen.leaf.name for seen in hourly if is_timestamp(seen)), None)
        or next((seen.leaf.name for seen in found if seen.rising and is_time_by_value(seen)), None)
        or next((seen.leaf.name for seen in found if _is_date_of_row(survey, seen)), None)
    )


def _is_date_of_row(survey: Survey, seen: Seen) -> bool:
    """Return whether a column has dates that vary within users and items, unlike birthdays."""
    if not (seen.daily and (is_timestamp(seen) or pt.is_date(plain(seen.leaf.type)))):
        return False
    return not any(survey.determines(key, seen.leaf.name) for key in _items_and_users(survey))


def _items_and_users(survey: Survey) -> set[str]:
    found = [named_so(list(survey.seen), words, "id") for words in (ITEM, USER)]
    return {name for name in found if name is not None}


def is_timestamp(seen: Seen) -> bool:
    """Return whether a column has a time type, or texts that are times."""
    return seen.timed or bool(pt.is_timestamp(plain(seen.leaf.type)))


def is_stored_time(seen: Seen) -> bool:
    """Return whether a number column stores times, judged by name and values."""
    return (named_so([seen], TIME, "time", _has_unit) is not None) or is_time_by_value(seen)


def is_time_by_value(seen: Seen) -> bool:
    """Return whether numbers look like times of a log, which rise and seldom repeat."""
    name = words_of(seen.leaf.path[-1])
    if seen.unit is None or KEY_WORDS.search(name) or ENTITIES.fullmatch(name):
        return False
    if seen.least is None or seen.largest is None:
        return False
    if seen.unit.startswith("Y"):
        return seen.distinct > 2
    if not is_plausible(seen.least, seen.largest, seen.unit):
        return False
    rare = seen.unit in ("ms", "us") and seen.distinct > seen.values / 2
    return seen.distinct > 2 and (seen.rising or rare)


def _has_unit(seen: Seen) -> bool:
    return seen.unit is not None


def _is_time(seen: Seen) -> bool:
    kind = plain(seen.leaf.type)
    return bool(pt.is_timestamp(kind) or pt.is_date(kind)) or seen.timed or _has_unit(seen)


# Maximum rows to compare with the label, and minimum rows of each label.
_COMPARED = 20_000
_LEAST_ROWS = 20
# Columns with at most this many values are compared by the mean label per value.
_FEW_VALUES = 50
_SUSPICIOUS_AUC = 0.99
# A column is suspicious if the log-probability that all its non-empty rows are positive by chance
# is below this.
_UNLIKELY = -14.0

# Events in names of label columns such as label_finish, in tables with several labels.
_EVENTS = (
    "click|like|buy|purchase|order|pay|conversion|convert|play|view|watch|finish|follow|share|"
    "comment|install|ctr|cvr|ctcvr|target"
)
# User actions on an item that are stored as flags.
_ACTIONS = (
    r"click(ed)?", r"(dis|un)?liked?", r"loved?", r"(un)?follow", r"comment(ed)?", r"shared?",
    r"forward(ed)?", r"repost(ed)?", r"retweet(ed)?", r"repl(y|ied)", r"hated?", r"fav",
    r"favou?rited?", r"collect(ed)?", r"bookmark(ed)?", r"saved?", r"wishlist(ed)?", r"subscribe",
    r"install", r"download(ed)?", r"purchased?", r"buy", r"bought", r"order(ed)?", r"pay",
    r"checkout", r"convert(ed)?", r"conversion", r"book(ed|ing)?", r"cart", r"add(ed)?_(to_)?cart",
    r"atc", r"refund(ed)?", r"returned", r"churn(ed)?", r"attributed", r"engage(d|ment)?",
    r"finish(ed)?(_play)?", r"completed?", r"completion", r"skip(ped)?(_\d)?", r"watched",
    r"viewed",    r"(long|short|effective|valid|full)_?(view|play|read|watch)", r"play(ed)?",
    r"(profile|comment|author|shop)_(enter|click|visit)", r"bounced?", r"report(ed)?",
    r"negative_feedback", r"not_interested", r"label_?\d*", r"y_?\d+",
rf"({_EVENTS})_label", rf"label_({_EVENTS})",
)  # fmt: skip
_FLAG = re.compile(
    rf"((is|has|did|was|if)_)?({'|'.join(_ACTIONS)})(_(flag|bool|ind|yn|binary|or_not))?"
)
_UNIT = r"(_(m?s|us|m?secs?|seconds?|min(ute)?s?|millis))?"
_WATCHED = r"(play|watch|view|dwell|stay|read|listen|engage|linger)(ed|d|ing|ment)?"
_MONEY = r"(amount|amt|value|money|total|usd|eur|cny|revenue)"
_AMOUNT = re.compile(
    rf"(\w+_)?{_WATCHED}_?(time|times|duration|dur|length|seconds|secs?|ms){_UNIT}"
    rf"|(\w+_)?(play|watch|read|view)(ed)?_(ratio|percent|percentage|pct|progress|fraction)"
    rf"|(time|seconds|ms|minutes)_(spent|on_(page|site|item)|watched|played|read|stayed)"
    rf"|dwell|(scroll|read)_depth|\w+_after"
    rf"|(\w+_)?(pay|paid|payment|order|purchase|sales?|transaction|conversion|booking)_{_MONEY}"
    rf"|(pay|paid|purchase)_price|(\w+_)?(revenue|gmv|payout|profit|spent)(_(usd|eur|cny))?"
    rf"|gross_bookings?(_\w+)?|(amount|money)_(paid|spent)|tip_amount"
)
_RATING = re.compile(r"(user_|my_|review_|item_)?(ratings?|stars)(_given)?|review_score")
# Statistics of earlier rows and predictions are known beforehand.
_KNOWN_BEFORE = re.compile(
    r"(^|_)(avg|average|mean|median|std|var|total|sum|cum\w*|hist|history|historical|past|prev|"
    r"previous|last|prior|recent|first|max|min|num|n|count|cnt|expected|est|estimated|pred|"
    r"predicted|annual|yearly|company|\d+[dhmw]|[dhmw]\d+|before|daily|weekly|monthly|lifetime)(_|$)"
)


# The time or id of a consequence of a positive row, if it is missing in other rows.
_LATER_EVENT = re.compile(
    r"(\w+_)?(click|conver(t|sion)|purchase|order|pay|paid|attribut(ed|ion)|install|finish|end|exit|"
    rf"leave|checkout|return|refund|book|booking)(ed)?_?(time|timestamp|ts|at|date|dt|id){_UNIT}"
)


def is_outcome(survey: Survey, seen: Seen) -> bool:
    """Return whether a column is named like an outcome, and not constant per item or user."""
    name = words_of(seen.leaf.path[-1])
    if _holds_flags(seen):
        return name in LABEL or _FLAG.fullmatch(name) is not None
    if seen.is_list or seen.is_text or seen.largest is None or _KNOWN_BEFORE.search(name):
        return False
    rating = _RATING.fullmatch(name) is not None and seen.distinct <= _FEW_VALUES
    if not (rating or _AMOUNT.fullmatch(name)):
        return False
    named = _items_and_users(survey)
    keys = [
        key.leaf.name
        for key in survey.seen
        if key.leaf.name in named
        # Any other id of several rows, such as hotel_id.
        or ((key.is_text or key.whole) and seen.distinct < key.distinct < key.values / 2)
    ]
    return not any(survey.determines(key, seen.leaf.name) for key in keys)


def is_later_event(seen: Seen) -> bool:
    """Return whether a column is named like a later event, such as conversion_time."""
    return _LATER_EVENT.fullmatch(words_of(seen.leaf.path[-1])) is not None


def _holds_flags(seen: Seen) -> bool:
    if seen.binary:
        return True
    if seen.is_list:
        element = plain(plain(seen.leaf.type).value_type)
        bits = seen.distinct == 2 and seen.least == 0 and seen.largest == 1
        return bits or bool(pt.is_boolean(element))
    return seen.distinct <= 2 and (seen.is_text or seen.largest == 1)


def label_of(survey: Survey, label: Seen, options: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the label of each row of the sample, float64 ``[rows]``: 0, 1 or NaN."""
    values = survey.values(label.leaf.name)
    if "positive" in options:
        values = pc.equal(values.cast(pa.string()), options["positive"][0]).cast(pa.int8())
    numbers = _numbers(values)
    return np.where(np.isneginf(numbers), np.nan, numbers >= options.get("positive_from", 1))


def why_suspicious(survey: Survey, seen: Seen, label: NDArray[np.float64]) -> str:
    """Return why a column may be known only after the label, or "". ``label`` has 0, 1 or NaN."""
    kind = plain(seen.leaf.type)
    timed = pt.is_timestamp(kind) or pt.is_date(kind)
    comparable = seen.largest is not None or pt.is_boolean(kind) or timed or seen.is_text
    if seen.is_list or seen.separator is not None or not comparable:
        return ""
    values = survey.values(seen.leaf.name)
    if len(values) != len(label):
        return ""  # either the column or the label is exploded, so rows do not match
    rows = np.flatnonzero(~np.isnan(label))
    rows = rows[:: max(1, len(rows) // _COMPARED)]
    values, positive = values.take(pa.array(rows)), label[rows] > 0
    if min(positive.sum(), (~positive).sum()) < _LEAST_ROWS:
        return ""
    if seen.is_text:
        values = values.fill_null("")
        given = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
        scores = np.asarray(values.dictionary_encode().indices)
    else:
        scores = _numbers(values)
        given = ~(np.isneginf(scores) | (scores == 0) | (scores == -1))
    unlikely = given.sum() * np.log(positive.mean()) < _UNLIKELY
    if not given.all() and positive[given].all() and unlikely:
        return "always missing or 0 if the label is 0"
    if seen.distinct <= _FEW_VALUES:
        codes = np.unique(scores, return_inverse=True)[1]
        scores = (np.bincount(codes, positive) / np.bincount(codes))[codes]
    elif seen.is_text:
        return ""
    area = _auc(scores, positive)
    found = max(area, 1 - area)
    return f"AUC {found:.3f} as the only feature" if found > _SUSPICIOUS_AUC else ""


def _numbers(values: pa.Array) -> NDArray[np.float64]:
    """Convert numbers, bools or times to float64, with minus infinity for missing values."""
    if pt.is_date32(values.type) or pt.is_boolean(values.type):
        values = values.cast(pa.int32())
    elif pt.is_timestamp(values.type) or pt.is_date(values.type):
        values = values.cast(pa.int64())
    numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.nan_to_num(numbers, nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def _auc(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    _, codes, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[codes]
    num = int(positive.sum())
    below = ranks[positive].sum() - num * num / 2
    return float(below / (num * (len(positive) - num)))

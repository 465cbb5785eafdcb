"""Names of columns, and what they say of a column."""

from __future__ import annotations

import re
from collections.abc import Callable

from recd_plugin_tables.columns import Role
from recd_plugin_tables.kinds import possible_roles
from recd_plugin_tables.start.survey import Seen

# Words of names, best first: a column whose name has an earlier one wins.
LABEL = (
    "label", "click", "clicked", "is_click", "is_clicked", "target", "y", "converted",
    "conversion", "purchased", "purchase", "bought", "liked", "like", "response", "outcome",
)  # fmt: skip
RATING = ("rating", "stars", "score")
_UNITS = r"m?s|us|ns|(milli|micro|nano)?s(ec(ond)?s?)?|(milli|micro|nano)s|epoch|unix|utc"
# Words in front of "time" that make it a duration.
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
    r"|^(c|cat|sparse)_?\d+$"  # anonymous categories, as C14
)
# Names of ids and codes, which are no times whatever their values are.
KEY_WORDS = re.compile(
    r"(^|_)(id|ids|code|key|hash|no|number|sku|zip|phone|mobile|cell|tel|fax|index|"
    r"barcode|ean|upc|gtin|isbn|iban|merchant|account|card)$|[a-z]id$"
)
NUMBER_WORDS = re.compile(
    r"(^|_)(count|num|n|number|amount|age|price|cost|qty|quantity|duration|seconds|minutes|days|"
    r"length|size|score|rating|rate|ratio|share|position|rank|total|avg|mean|sum|views|visits|"
    r"balance|income|distance|height|weight|temperature|year)s?(_|$)"
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
    """The column whose name is the first of ``words``, or has it as its last words."""
    usable = [seen for seen in found if role in possible_roles(seen.leaf.type) and allowed(seen)]
    for start in ("", ".*_"):
        for word in words:
            for seen in usable:
                if re.fullmatch(start + word, words_of(seen.leaf.path[-1])):
                    return seen.leaf.name
    return None


def words_of(name: str) -> str:
    """A name in lower case with underscores, without a type: userId:token is user_id."""
    name = name.partition(":")[0]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_")

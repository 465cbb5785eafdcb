"""What a chooser tries and chooses, looked at before it is planned."""

from __future__ import annotations

from collections.abc import Sequence

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Chooser, Offer, Offered, Table
from recd_plugins.planning.choosing.entries import wrong_options
from recd_plugins.registry import Entry, RunConfig
from recd_plugins.words import did_you_mean, shortened


def check_offers(
    registry: RunConfig,
    chooser: Entry[Chooser],
    offered: Offered,
    tables: Sequence[Table],
    did: str,
) -> None:
    """Refuse what are no offers, or nobody's, and tables that are not the chooser's, or come twice.

    Args:
        registry: with the chooser.
        chooser: its entry.
        offered: by the chooser, which may be anything.
        tables: to choose for.
        did: what it did with them, as ``chose``.

    Raises:
        PluginError: names the chooser, the offer and the table.
    """
    title = chooser.plugin.title
    if not _are_offers(offered):
        raise PluginError(
            f"{title}: {did} {offered!r:.200}; expected pairs of an Offer and names of tables"
        )
    plugins = {cls.name: cls for cls in registry.offering}
    known = [table.name for table in tables]
    taken: set[str] = set()
    for offer, names in offered:
        if offer.use not in plugins:
            raise PluginError(f"{title}: {did} {offer.use}, which offers nothing")
        if wrong := wrong_options(plugins[offer.use], offer.options):
            raise PluginError(
                f"{title}: {did} {offer.use} with {offer.options!r:.200}, which are no options of "
                f"it: {wrong}"
            )
        if not names:
            raise PluginError(f"{title}: {did} {offer} for no table")
        for name in names:
            check_table(chooser, f"{did} {offer} for", name, known)
            if name in taken:
                raise PluginError(f"{title}: {did} twice for table {name}")
            taken.add(name)


def check_table(chooser: Entry[Chooser], did: str, name: str, known: Sequence[str]) -> None:
    """Refuse a name that is none of the known tables.

    Raises:
        PluginError: names the chooser, and tables of a like name.
    """
    if name not in known:
        raise PluginError(
            f"{chooser.plugin.title}: {did} {name}, which is none of its tables"
            + (did_you_mean(name, known) or f"; its tables: {shortened(known)}")
        )


def _are_offers(offered: object) -> bool:
    return isinstance(offered, Sequence) and all(
        isinstance(each, Sequence)
        and len(each) == 2
        and isinstance(each[0], Offer)
        and isinstance(each[1], Sequence)
        and not isinstance(each[1], str)
        and all(isinstance(name, str) for name in each[1])
        for each in offered
    )

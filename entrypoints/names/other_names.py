"""Names of TRL's, verl's and OpenRLHF's settings, each with our name of the same meaning, or a sentence why there is
none.

OpenRLHF's come from the table that translates its commands (`names_of_openrlhf`). Names are in small letters, with
underscores.
"""

from collections.abc import Collection, Mapping

from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT
from rollgrad.entrypoints.names.names_of_trl import TRL
from rollgrad.entrypoints.names.names_of_verl import VERL

OTHER_NAMES: Mapping[str, str] = {**TRL, **VERL}
"""A name of another tool: the setting here, or a sentence, which has spaces."""


def openrlhf_name(name: str, known: Collection[str]) -> str | None:
    """Returns our setting, or a sentence, for a name of OpenRLHF, flat or dotted; None if OpenRLHF has no such name."""
    for dotted in FLAT.get(name, (name,)):
        flag = FLAGS.get(dotted)
        if flag is None:
            continue
        if flag.reason is not None:
            return f"{flag.reason}."
        same = flag.to or dotted
        if same in known:
            return same
        if same == name:
            return "other commands have it, and this one does not read it: leave it out."
        return "rollgrad openrlhf translates it, with the whole command."
    return None

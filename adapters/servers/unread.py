"""Fields of clients' requests that change nothing here, which are said once: a client may count on them."""

from collections.abc import Iterable

import structlog

log = structlog.get_logger(__name__)

ASIDE = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "cache_salt", "priority", "request_id"),
    }
)
"""Fields that are about a client, its bill, its cache or its place in a queue, and not about replies."""
MOST = 64
"""Names that are said at most: a client can make up any number of them."""


class UnreadFields:
    """Says each name of a field once that a client sets, and that the server does not read."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Says those of `names` that were not said before."""
        for name in names:
            if name not in self._said and name not in ASIDE and len(self._said) < MOST:
                self._said.add(name)
                log.warning(
                    f"a client sets {name[:60]!r}, which this server does not read: its replies are as without it"
                )

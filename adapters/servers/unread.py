"""Says once what clients ask for that changes nothing here: a client may count on it."""

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
            if name not in ASIDE:
                self._say(f"sets {name[:60]!r}, which this server does not read: its replies are as without it")

    def note_model(self, name: str) -> None:
        """Says that an agent asks for a model of another `name` than the policy's, if it was not said before."""
        self._say(
            f"asks for the model {name[:60]!r}, but the policy answers, and learns from its reply: what another model "
            "should answer (a judge, a simulated user, an opponent) belongs to another server"
        )

    def _say(self, words: str) -> None:
        if words not in self._said and len(self._said) < MOST:
            self._said.add(words)
            log.warning(f"a client {words}")

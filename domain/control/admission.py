"""A limit of the episodes in flight that follows what the engines keep of them. Pure.

A later turn of an episode begins with the tokens of the earlier ones, whose keys and values the engine has kept, unless
it needed their memory for others: it then computes all of them again. With too many long episodes each turn does, and
the engines read histories instead of sampling. The limit falls by a quarter after a round of answers in which much was
lost. It rises by an eighth after a round in which little was lost, if episodes waited. So it falls fast and rises
slowly, as networks avoid congestion (Chiu and Jain 1989). Episodes that have begun go on. Does not own: who waits
(`EpisodeSlots`).
"""

from attrs import define, field

LEAST = 8
"""Lowest limit: fewer episodes leave an engine idle while tools run. Also the fewest answers of a round."""
START = 64
"""Limit with which a run begins: of episodes that have begun none can be taken back."""
MUCH, LITTLE = 0.1, 0.05
"""Shares of the tokens of earlier turns that were computed again in a round, from which on the limit falls, and up to
which it rises."""
WHOLE = 0.9
"""Share from which on, at the lowest limit, the engine keeps nothing however few episodes there are."""
BLOCK = 128
"""Tokens of a turn that count as kept in any case: vLLM keeps whole blocks of tokens, of 16 on a GPU and 128 on a
CPU."""


@define
class Admission:
    """Records answers to later turns, and says how many episodes may be in flight.

    Args:
        most: the limit's upper bound.
        adapts: whether the limit follows the answers, beginning at `START`; otherwise it is `most`, and answers are
            only counted.
    """

    most: int
    adapts: bool = False
    limit: int = field(init=False)
    running: int = field(default=0, init=False)
    """Episodes in flight."""
    useless: bool = field(default=False, init=False)
    """Whether the engine kept nothing even at the lowest limit, so that the limit is `most` for good."""
    _answers: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    _lost: int = field(default=0, init=False)
    _waited: bool = field(default=False, init=False)
    """Whether an episode has waited in this round."""
    _told: tuple[int, int] = field(default=(0, 0), init=False)
    """Tokens, and lost ones, since the metrics were taken."""

    def __attrs_post_init__(self) -> None:
        self.limit = min(START, self.most) if self.adapts else self.most

    def began(self) -> None:
        """An episode has begun."""
        self.running += 1

    def ended(self) -> None:
        """An episode has ended."""
        self.running -= 1

    def waited(self) -> None:
        """An episode waits because of the limit."""
        self._waited = True

    def answered(self, continued: int, kept: int) -> None:
        """Records the answer to a later turn: tokens that an earlier turn had computed with the same weights, and those
        of them that the engine had kept."""
        lost = max(0, continued - kept - BLOCK)
        self._tokens += continued
        self._lost += lost
        self._told = self._told[0] + continued, self._told[1] + lost
        self._answers += 1
        if self._answers >= max(LEAST, self.running):
            if self.adapts and not self.useless:
                self._adapt(self._lost / self._tokens)
            self._answers = self._tokens = self._lost = 0
            self._waited = False

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call: the limit, and the share of earlier turns' tokens that were computed
        again; nothing if there was no later turn of which the engine says it."""
        (tokens, lost), self._told = self._told, (0, 0)
        if not tokens:
            return {}
        return {"rollout/recomputed_share": lost / tokens, "rollout/concurrency_limit": float(self.limit)}

    def _adapt(self, share: float) -> None:
        if share > MUCH:
            if self.running > self.limit:
                return  # the limit has fallen, and the episodes that were too many have not ended yet
            if share > WHOLE and self.running <= LEAST:
                self.useless, self.limit = True, self.most
                return
            # A quarter of those in flight: a limit far above them would have to fall many times.
            self.limit = min(self.most, max(LEAST, self.running * 3 // 4))
        elif share <= LITTLE and self._waited:
            self.limit = min(self.most, self.limit + max(1, self.limit // 8))

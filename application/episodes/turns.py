"""Values of a `TokenLedger`: the prompt for a reply, a turn as it is recorded, the latest reply."""

from collections.abc import Iterable
from itertools import chain

from attrs import define, frozen

from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.ports.chat_codec import RenderedPrompt, ToolSchema


@frozen(kw_only=True, eq=False)
class Prepared:
    """A prompt for the engine."""

    token_ids: tuple[int, ...]
    images: PlacedImages = ()
    """Images that some of the tokens stand for."""
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSchema, ...] = ()
    parent: int | None = None
    """Turn whose tokens the prompt continues; None opens a branch."""
    role: str = ""
    """Who replies (`Trajectory.role`)."""
    continues: int = 0
    """As in `GenerationRequest`, and so are the next two."""
    continues_version: int | None = None
    known_experts: int = 0
    conversation: bytes = b""
    """Digest of role, tools and messages; empty where it is not known."""

    def room(self, wanted: int, max_tokens: int | None) -> int:
        """Returns how many of `wanted` more tokens fit into `max_tokens` (None: no limit); below 1 none do."""
        return wanted if max_tokens is None else min(wanted, max_tokens - len(self.token_ids))


@define(kw_only=True, eq=False)
class Turn:
    """One reply. Of its prompt it keeps what its parent has not: an episode of many turns would otherwise hold its
    first tokens as often as it has turns."""

    parent: int | None
    role: str
    added: tuple[int, ...]
    """Tokens of the prompt behind those of the parent."""
    generation: Generation
    length: int
    """Number of tokens from the beginning of the branch to the reply's end."""
    images: PlacedImages
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    conversation: bytes
    """Digest of role, tools and messages."""
    state: int
    known_experts: int
    """Number of the first of its tokens whose experts this turn and those before it have."""
    reward: float = 0.0
    dropped: bool = False

    @property
    def own(self) -> Iterable[int]:
        """Tokens that it adds to its parent's: the rest of the prompt, and the reply."""
        return chain(self.added, self.generation.token_ids)

    @property
    def begin(self) -> int:
        """Number of tokens of its parent."""
        return self.length - len(self.added) - len(self.generation.token_ids)

    @property
    def version(self) -> int:
        """Version of the policy that sampled the last token."""
        return int(self.generation.versions[-1])

    def followed_by(self, added: RenderedPrompt) -> PlacedImages:
        """Returns the images of the turn's tokens and those of the tokens added to them."""
        return (*self.images, *(placed.moved(self.length) for placed in added.images))

    def shows(self, images: PlacedImages) -> bool:
        """Returns whether the turn's tokens have the first of `images`, and no others."""
        return self.images == tuple(placed for placed in images if placed.start < self.length)


@frozen(kw_only=True, eq=False)
class LatestReply:
    """The latest reply."""

    message: Message
    token_ids: tuple[int, ...]
    """Tokens from the beginning of its branch to its end."""
    opening: int
    """Number of tokens before the branch's first reply."""
    version: int
    """Version of the policy that sampled its last token."""
    stop_reason: StopReason
    """Why it ended."""
    images: PlacedImages = ()
    """Images that some of the tokens stand for."""

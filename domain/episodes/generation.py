"""Values that go to and come from a rollout engine: sampling parameters, one request, one generation."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from attrs import field, frozen, validators

from rollgrad.domain.episodes.images import PlacedImages

if TYPE_CHECKING:  # torch is not needed to ask for replies
    from rollgrad.domain.episodes.routed import RoutedTokens


class StopReason(StrEnum):
    """Reason for the end of a generation, and with it of a turn or an episode."""

    STOP = "stop"
    """The model emitted a stop token, or a stop string appeared."""
    LENGTH = "length"
    """The token budget ran out: the text is cut off (truncated)."""
    ENVIRONMENT = "environment"
    """The environment ended the episode."""
    TURN_LIMIT = "turn_limit"
    """The episode used up its turns (truncated)."""
    TIMEOUT = "timeout"
    """The episode used up its wall clock (truncated)."""
    ABORTED = "aborted"
    """The engine was told to stop; the tokens so far are valid."""

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut off rather than finished."""
        return self in (StopReason.LENGTH, StopReason.TURN_LIMIT, StopReason.TIMEOUT, StopReason.ABORTED)


@frozen(kw_only=True)
class SamplingParams:
    """Settings of the sampling distribution and of the length of a reply.

    Log-probs that an engine reports are of the distribution that these settings define; greedy ones are of temperature
    1.
    """

    temperature: float = field(default=1.0, validator=validators.ge(0.0))
    """0 is greedy."""
    top_p: float = field(default=1.0, validator=[validators.gt(0.0), validators.le(1.0)])
    """1 is the full distribution."""
    top_k: int = field(default=0, validator=validators.ge(0))
    """0 is the full distribution."""
    max_new_tokens: int = field(default=256, validator=validators.ge(1))
    """Most tokens to sample, the stop token included."""
    min_new_tokens: int = field(default=0, validator=validators.ge(0))
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    grammar: str | None = None
    """Grammar of llguidance (Lark) that the text of the reply follows; None for any text. Tokens that leave it have the
    probability 0, and so has a stop token where the text is not complete."""
    top_logprobs: int = field(default=0, validator=validators.ge(0))
    """Number of most likely tokens to report at each place."""


@frozen(kw_only=True)
class GenerationRequest:
    """A request for one reply. Requests with equal `prompt_token_ids` and `images` that wait together share one
    prefill."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """Lengths in it count only tokens that are still to be sampled."""
    keep: bool = False
    """Whether a later request will probably continue these tokens, so that the engine should keep their keys and
    values."""
    begun: int = field(default=0, validator=validators.ge(0))
    """Number of tokens at the end of the prompt that are the beginning of this reply, sampled by an earlier request
    with the same seed: random draws continue after theirs, and a stop string may begin in them."""
    images: PlacedImages = ()
    continues: int = field(default=0, validator=validators.ge(0))
    """Number of tokens at the beginning of the prompt that are prompt and reply of an earlier request, whose engine has
    probably kept their keys and values; 0 where there is none."""
    continues_version: int | None = None
    """Version of the last token of that earlier request."""
    known_experts: int = field(default=0, validator=validators.ge(0))
    """Number of tokens at the beginning of the prompt whose experts earlier answers have: the engine need not report
    them again."""


@frozen(kw_only=True, eq=False)
class Generation:
    """Sampled tokens, with what the engine reports of each."""

    token_ids: Sequence[int]
    """The sampled tokens; a stop token is one of them."""
    logprobs: Sequence[float]
    """Log-prob of each token under the sampling distribution."""
    versions: Sequence[int]
    """Version of the policy that sampled each token."""
    stop_reason: StopReason
    """STOP, LENGTH or ABORTED."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    """The most likely tokens at the place of each token as (token id, log-prob), the likeliest first; empty where the
    request asked for none."""
    grammar: str | None = None
    """Grammar of the request, which says among which tokens each was sampled."""
    routed: "tuple[RoutedTokens, ...]" = ()
    """Experts of the tokens of prompt and reply together that the engine computed: all but the last, those that it had
    kept of an earlier request, and those that the request knows. Empty where it does not report them."""
    kept: int | None = None
    """Number of prompt tokens whose keys and values the engine had kept; None where it does not report it."""

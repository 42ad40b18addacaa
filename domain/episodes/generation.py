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

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 mean the full distribution. `max_new_tokens` counts sampled
    tokens, the stop token included. Log-probs that an engine reports are of the distribution these settings define;
    greedy ones are of temperature 1.

    `grammar` is a grammar of llguidance (Lark) that the text of the reply follows, None for any text: tokens that leave
    it have the probability 0, and a stop token has any other only where the text is complete. `top_logprobs` is the
    number of most likely tokens to report at each place.
    """

    temperature: float = field(default=1.0, validator=validators.ge(0.0))
    top_p: float = field(default=1.0, validator=[validators.gt(0.0), validators.le(1.0)])
    top_k: int = field(default=0, validator=validators.ge(0))
    max_new_tokens: int = field(default=256, validator=validators.ge(1))
    min_new_tokens: int = field(default=0, validator=validators.ge(0))
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    grammar: str | None = None
    top_logprobs: int = field(default=0, validator=validators.ge(0))


@frozen(kw_only=True)
class GenerationRequest:
    """A request for one reply. Requests with equal `prompt_token_ids` and `images` that wait together share one
    prefill.

    `keep`: a later request will probably continue these tokens, so the engine should keep their keys and values.
    `begun`: number of prompt tokens at the end that are the beginning of this reply, sampled by an earlier request with
    the same seed: random draws continue after theirs, and a stop string may begin in them. Lengths in `params` count
    only tokens still to be sampled.
    `continues`: number of prompt tokens at the beginning that are prompt and reply of an earlier request, whose engine
    has probably kept their keys and values; 0 where there is none. `continues_version`: version of that one's last
    token.
    `known_experts`: number of prompt tokens at the beginning whose experts earlier answers have: the engine need not
    say them again.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    keep: bool = False
    begun: int = field(default=0, validator=validators.ge(0))
    images: PlacedImages = ()
    continues: int = field(default=0, validator=validators.ge(0))
    continues_version: int | None = None
    known_experts: int = field(default=0, validator=validators.ge(0))


@frozen(kw_only=True, eq=False)
class Generation:
    """Sampled token ids, each with its log-prob under the sampling distribution and the policy version that sampled it.

    `stop_reason` is STOP, LENGTH or ABORTED. A stop token is part of `token_ids`: it was sampled. `top_logprobs` has
    for each token the most likely ones at its place as (token id, log-prob), the likeliest first; it is empty where the
    request asked for none. `grammar` is that of the request, which says among which tokens each was sampled.
    `routed` has the experts of tokens of prompt and reply together that the engine computed for it: all but the last,
    those that it had kept of an earlier request, and those that the request knows; empty where it does not say.
    `kept`: number of prompt tokens whose keys and values the engine had kept; None where it does not say.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    stop_reason: StopReason
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    grammar: str | None = None
    routed: "tuple[RoutedTokens, ...]" = ()
    kept: int | None = None

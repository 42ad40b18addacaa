"""A sequence of the embedded engine, from its request to its generation."""

import asyncio
from collections.abc import Callable

import torch
from attrs import define, field

from rollgrad.adapters.engines.embedded.grammars import Matcher
from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, Place, blocks_of
from rollgrad.application.foreign import harmless
from rollgrad.domain.control.request_flow import ArrivedRequest
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.routed import RoutedTokens
from rollgrad.domain.episodes.top_logprobs import TopLogprobs, end_to_end
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError, RollgradError

PromptKey = tuple[tuple[int, ...], PlacedImages]
"""Tokens of a prompt and the images among them."""


@define(eq=False)
class Row:
    """A sequence in flight."""

    request: GenerationRequest
    future: "asyncio.Future[Generation]"
    on_token: Callable[[int], None] | None = None
    matcher: Matcher | None = None
    """Its place in its grammar, if it has one."""
    arrived: ArrivedRequest = field(init=False)
    heard: int = 0
    """Number of tokens for which `on_token` has been called."""
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    versions: list[int] = field(factory=list)
    top_logprobs: list[TopLogprobs] = field(factory=list)
    experts: list[torch.Tensor] = field(factory=list)
    """Experts [R, L, K] of the tokens that were computed for it, pass by pass, where they are recorded."""
    kept: int = 0
    """Number of its first tokens that were computed for an earlier request."""
    stop_reason: StopReason | None = None
    refusal: RollgradError | None = None
    """The reason why it can never begin, or go on."""
    place: Place = field(factory=Place)
    """Place of its keys and values."""
    shift: int = 0
    """Number to add to the length for the position of the next token (`Decoder.shift`)."""
    uniforms: torch.Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        begun, rest = self.request.begun, self.request.params.max_new_tokens
        generator = torch.Generator().manual_seed(self.request.params.seed)
        self.uniforms = torch.rand(begun + rest, dtype=torch.float64, generator=generator)[begun:]

    @property
    def prompt(self) -> PromptKey:
        """Its prompt; rows with equal ones share a prefill."""
        return self.request.prompt_token_ids, self.request.images

    @property
    def length(self) -> int:
        """Tokens whose keys are stored before the next step: all but the latest sampled one."""
        return len(self.request.prompt_token_ids) + len(self.tokens) - 1

    @property
    def blocks(self) -> int:
        """Blocks of the cache that it takes at most; the last token that it samples is not stored."""
        return blocks_of(len(self.request.prompt_token_ids) + self.request.params.max_new_tokens - 1)

    def too_early(self, eos: frozenset[int]) -> frozenset[int]:
        """Returns the tokens that would end it, where it is too early for an end."""
        if len(self.tokens) >= self.request.params.min_new_tokens:
            return frozenset()
        return eos.union(self.request.params.stop_token_ids)

    def restrict(self, logits_V: torch.Tensor) -> None:
        """Takes all that its grammar forbids out of the logits of the next token."""
        if self.matcher is not None:
            try:
                self.matcher.restrict(logits_V)
            except DataError as error:  # the other replies go on
                self.refusal = error

    def too_long(self, held: int, block_bytes: int) -> ConfigurationError:
        """Returns the reason why it never begins in a cache of `held` blocks of `block_bytes` each."""
        return ConfigurationError(
            f"A prompt of {len(self.request.prompt_token_ids)} tokens plus {self.request.params.max_new_tokens} new "
            f"ones takes {self.blocks * block_bytes / 2**30:.2f} GiB of keys and values, but the engine's share of the "
            f"free memory is {held * block_bytes / 2**30:.2f} GiB ({held * BLOCK} tokens): shorten the prompt, lower "
            "--rollout.max_new_tokens, or free memory."
        )

    @property
    def stored_tokens(self) -> tuple[int, ...]:
        """The tokens whose keys are stored."""
        return (*self.request.prompt_token_ids, *self.tokens[:-1])

    def tell(self) -> None:
        """Calls `on_token` for new tokens."""
        if self.on_token is None or self.future.done():
            return
        try:
            while self.heard < len(self.tokens):
                self.heard += 1
                self.on_token(self.tokens[self.heard - 1])
        except BaseException as error:  # an error of one caller's `on_token` must not stop other replies
            self.on_token = None
            self.future.set_exception(harmless(error))

    def answer(self) -> None:
        """Gives the caller the generation, or the reason why there is none."""
        if self.future.done():
            return
        if self.refusal is not None:
            self.future.set_exception(self.refusal)
            return
        reason = self.stop_reason or StopReason.ABORTED
        self.future.set_result(
            Generation(
                token_ids=self.tokens,
                logprobs=self.logprobs,
                versions=self.versions,
                stop_reason=reason,
                top_logprobs=end_to_end(self.top_logprobs),
                routed=(RoutedTokens(start=self.kept, experts_RLK=torch.cat(self.experts)),) if self.experts else (),
            )
        )


def check_request(request: GenerationRequest, most: int | None, vocabulary: int) -> None:
    """Checks that a model can begin a request: it has `most` positions, None for no limit, and so large a vocabulary.

    Raises:
        EngineError, ConfigurationError, DataError: it cannot.
    """
    total = len(request.prompt_token_ids) + request.params.max_new_tokens
    if not request.prompt_token_ids:
        raise EngineError("The request has no prompt tokens: generation starts from at least one.")
    if most is not None and total > most:
        raise ConfigurationError(
            f"A prompt of {len(request.prompt_token_ids)} tokens plus {request.params.max_new_tokens} new ones is "
            f"{total} tokens, but the model has {most} positions: shorten the prompt, or lower "
            "--rollout.max_new_tokens."
        )
    token_ids = (*request.prompt_token_ids, *request.params.stop_token_ids)
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocabulary:
            raise DataError(f"The request has the token id {token}, but those of the model are 0 to {vocabulary - 1}.")

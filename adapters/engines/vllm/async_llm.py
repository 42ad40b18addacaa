"""vLLM in processes of its own on this machine, over an `AsyncLLM`.

Only `AsyncLLM.generate` notices dead processes, so all other calls are watched.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import structlog
import torch

from rollgrad.adapters.engines.vllm.core import LIVENESS_SECONDS, Core
from rollgrad.adapters.engines.vllm.images import engine_input
from rollgrad.adapters.engines.vllm.last_words import last_words
from rollgrad.adapters.engines.vllm.sampling_params import ALL, parameters
from rollgrad.adapters.weights.receiver_port import EngineModel
from rollgrad.application.settings.quantized import quantized_by
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.routed import RoutedTokens, experts_type
from rollgrad.domain.episodes.top_logprobs import TopLogprobs, end_to_end
from rollgrad.domain.errors import EngineError, RollgradError
from rollgrad.domain.ports.rollout_engine import tell

log = structlog.get_logger(__name__)

T = TypeVar("T")

GIVES_UP_WEIGHTS = 2
"""vLLM's level of sleep that keeps nothing."""

STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}
"""Stop reasons by vLLM's names."""


def cache_salt(part: int) -> str:
    """Returns vLLM's name of a part of its prefix cache: only requests with the same salt share blocks."""
    return f"rollgrad-{part}"


class LocalCore(Core):
    """A `Core` in processes of this machine.

    Args:
        llm: an `AsyncLLM` from `launch.start`.
        sleep_level: vLLM's: 1 keeps the weights in the CPU's memory while it sleeps, 2 gives them up, 0 frees nothing.
    """

    _lora_request: Any = None
    """vLLM's request for the adapter, part of every generation; None without an adapter."""
    _part = 0
    """Part of the prefix cache that requests read and write."""
    _version = 0
    """Version that was announced last, of tokens that are told as they come; when a reply ends, vLLM says it itself."""

    _guesses = _guessed_right = 0
    """Numbers of tokens that were guessed ahead since the version before, and of those that stood."""

    _at_work = 0
    """Number of calls in which vLLM answers nothing else."""

    def __init__(self, llm: Any, *, sleep_level: int = 1) -> None:
        self._llm = llm
        self._sleep_level = sleep_level
        self.keeps_weights = sleep_level < GIVES_UP_WEIGHTS
        config = llm.model_config
        self._guesses_ahead = llm.vllm_config.speculative_config is not None
        self._keeps = bool(llm.vllm_config.cache_config.enable_prefix_caching)
        self.max_tokens = config.max_model_len
        quantized = quantized_by(config.quantization, llm.vllm_config.cache_config.cache_dtype)
        self.model = EngineModel(config.dtype, config.get_vocab_size(), quantized)

    async def sample(
        self,
        name: str,
        request: GenerationRequest,
        eos_token_ids: frozenset[int],
        on_token: Callable[[int], None] | None,
    ) -> Generation:
        """Implements `Core.sample`."""
        tokens: list[int] = []
        logprobs: list[float] = []
        top_logprobs: list[TopLogprobs] = []

        def take(output: Any) -> None:
            part = output.outputs[0]
            given = part.logprobs
            drawn = [given.logprobs[start] for start in given.start_indices]  # the sampled token comes first
            tokens.extend(part.token_ids)
            logprobs.extend(drawn)
            if request.params.top_logprobs and drawn:
                top_logprobs.append(_top_logprobs(given, min(request.params.top_logprobs, self.model.vocabulary)))
            if on_token is None:
                return
            for place, (token, logprob) in enumerate(zip(part.token_ids, drawn, strict=True), start=1):
                last = part.finish_reason is not None and place == len(drawn)
                tell(on_token, token, logprob, self._version, last=last)

        params = parameters(request, eos_token_ids, self.model.vocabulary, streamed=on_token is not None)
        output = await self._last_output(name, request.prompt_token_ids, params, take, request.images)
        last = output.outputs[0]
        if last.finish_reason not in STOP_REASONS:
            raise EngineError(f"Generation failed: vLLM ended the request with {last.finish_reason!r}.")
        if last.spec_decode_metrics is not None:
            self._guesses += last.spec_decode_metrics.num_draft_tokens
            self._guessed_right += sum(n * steps for n, steps in enumerate(last.spec_decode_metrics.histogram))
        versions = [int(span.version) for span in last.weight_versions or () for _ in range(span.start, span.end)]
        return Generation(
            token_ids=tokens,
            logprobs=logprobs,
            versions=versions,
            stop_reason=STOP_REASONS[last.finish_reason],
            top_logprobs=end_to_end(top_logprobs),
            routed=() if last.routed_experts is None else (self._routed(request.known_experts, last.routed_experts),),
            kept=output.num_cached_tokens if self._keeps else None,
        )

    def _routed(self, start: int, experts_RLK: np.ndarray) -> RoutedTokens:
        """Returns what vLLM says of the tokens of prompt and reply from `start` on but the last, in the type that holds
        its experts."""
        kind = experts_type(self._llm.model_config.get_num_experts())
        return RoutedTokens(start=start, experts_RLK=torch.from_numpy(experts_RLK.astype(np.int32)).to(kind))

    async def next_logprob(self, name: str, prompt: Sequence[int], token: int, temperature: float) -> float:
        """Implements `Core.next_logprob`."""
        from vllm import SamplingParams as Params

        # Where other requests guess ahead, vLLM's core would end with a request for the log-probs of given tokens.
        asked = {"logprobs": ALL} if self._guesses_ahead else {"logprobs": 1, "logprob_token_ids": [token]}
        params = Params(
            temperature=temperature, max_tokens=1, skip_reading_prefix_cache=True, detokenize=False, **asked
        )
        output = await self._last_output(name, prompt, params)
        return float(output.outputs[0].logprobs[0][token].logprob)

    async def abort(self, names: Sequence[str]) -> None:
        """Implements `Core.abort`."""
        await self._call(self._llm.abort(list(names)))

    async def freeze(self) -> None:
        """Implements `Core.freeze`."""
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def thaw(self) -> None:
        """Implements `Core.thaw`."""
        await self._call(self._llm.resume_generation())

    async def announce(self, version: int) -> None:
        """Implements `Core.announce`."""
        if self._guesses:
            share = f"{self._guessed_right / self._guesses:.0%}"
            log.info("tokens that vLLM guessed ahead", version=self._version, tokens=self._guesses, right=share)
            self._guesses = self._guessed_right = 0
        await self._call(self._llm.update_weight_version(str(version)))
        self._version = version

    async def forget(self) -> None:
        """Implements `Core.forget`; the features of images are left to vLLM, which knows them by their part."""
        await self._call(self._llm.reset_prefix_cache(reset_running_requests=True))
        self.set_apart()

    def set_apart(self) -> None:
        """Implements `Core.set_apart`."""
        self._part += 1

    async def sleep(self) -> None:
        """Implements `Core.sleep`."""
        await self._alone(self._llm.sleep(level=self._sleep_level))

    async def wake(self, part: str) -> None:
        """Implements `Core.wake`."""
        await self._alone(self._llm.wake_up(tags=[part]))

    async def ping(self) -> None:
        """Implements `Core.ping`. While vLLM does what it does alone, living processes are enough."""
        if self._at_work:
            if self._llm.errored:
                raise _died()
            return
        answer = asyncio.ensure_future(self._call(self._llm.is_sleeping()))
        try:
            while not answer.done() and not self._at_work:
                await asyncio.wait([answer], timeout=LIVENESS_SECONDS)
            if answer.done():
                answer.result()
        finally:
            answer.cancel()

    async def begin_update(self, info: Mapping[str, Any] | None) -> None:
        """Implements `Core.begin_update`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if info is not None:
            await self._alone(self._llm.shutdown_weight_transfer_engine())  # leaves the group of an earlier transfer
            await self._alone(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(info))))
        await self._alone(self._llm.start_weight_update())

    async def take_update(self, update: Mapping[str, Any]) -> None:
        """Implements `Core.take_update`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._alone(self._llm.update_weights(WeightTransferUpdateRequest(dict(update))))

    async def finish_update(self) -> None:
        """Implements `Core.finish_update`."""
        try:
            await self._alone(self._llm.finish_weight_update())
        except EngineError:
            # It has ended without all weights, but vLLM's worker refuses the next until it hears of a good end.
            with suppress(EngineError):
                await self._alone(self._llm.finish_weight_update())
            raise

    async def in_workers(self, method: str) -> list[Any]:
        """Returns the results of a method of vLLM's workers, by rank.

        Raises:
            EngineError: it failed, or vLLM's processes died.
        """
        found: list[Any] = await self._call(self._llm.collective_rpc(method))
        return found

    async def _alone(self, work: Awaitable[None]) -> None:
        """Waits for a call in which vLLM answers nothing else, for up to minutes: it joins a group of NCCL, or pins
        memory. Who asked has a deadline."""
        self._at_work += 1
        try:
            await self._call(work)
        finally:
            self._at_work -= 1

    async def _call(self, work: Awaitable[T]) -> T:
        """Returns the result of a call to vLLM.

        Raises:
            EngineError: it failed, or vLLM's processes died.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LIVENESS_SECONDS)
                if not task.done() and self._llm.errored:
                    raise _died()
            return task.result()
        except EngineError:
            raise
        except Exception as error:
            if self._llm.errored:
                raise _died() from error
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error
        finally:
            task.cancel()

    async def _last_output(
        self,
        name: str,
        prompt: Sequence[int],
        params: Any,
        take: Callable[[Any], None] = lambda output: None,
        images: PlacedImages = (),
    ) -> Any:
        last = None
        try:
            given = await engine_input(self._llm, prompt, images, cache_salt(self._part))
            asked = self._llm.generate(given, params, name, lora_request=self._lora_request)
            async for output in asked:
                take(output)
                last = output
        except RollgradError:
            raise
        except Exception as error:
            if self._llm.errored:
                raise _died() from error
            raise EngineError(f"Generation failed: {type(error).__name__}: {error}") from error
        return last


def _died() -> EngineError:
    return EngineError(f"vLLM's processes have died: {last_words()}.")


def _top_logprobs(given: Any, count: int) -> TopLogprobs:
    """Returns the `count` most likely tokens at each place of vLLM's flat log-probs. They follow the sampled token; but
    where vLLM has put several outputs together, for nobody had taken the first yet, one of them that was sampled is
    there once, in front."""
    ids, logprobs = np.array(given.token_ids, np.int32), np.array(given.logprobs, np.float32)
    rows = []
    for begin, end in pairwise((*given.start_indices, len(ids))):
        row = np.arange(begin, end)
        rows.append(row[1:] if len(row) > count else row[np.argsort(-logprobs[row], kind="stable")])
    return TopLogprobs(*(torch.from_numpy(each[np.stack(rows)]) for each in (ids, logprobs)))

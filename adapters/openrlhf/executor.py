"""Executors that play a whole episode by themselves (`AgentExecutorBase.execute`), behind the `AgentExecutor` port."""

import asyncio
import inspect
from collections.abc import Sequence
from itertools import count
from typing import Any

from attrs import evolve

from rollgrad.adapters.openrlhf.environment import from_agent, to_agent
from rollgrad.adapters.openrlhf.segments import (
    EngineCall,
    EpisodeSegment,
    read_segments,
    rewarded,
    to_trajectories,
    version_of,
)
from rollgrad.adapters.openrlhf.shim import CompletionOutput, Logprob, RequestOutput
from rollgrad.application.episodes.judging import judge_request, judged
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.rewards import FailureKind, Reward, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import (
    ConfigurationError,
    EngineError,
    ForeignError,
    RewardError,
    RollgradError,
    TrajectoryError,
)
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine

FINISH_REASONS = {StopReason.ABORTED: "abort"}
"""vLLM's names of stop reasons, where they differ."""


class CustomAgentExecutor(AgentExecutor):
    """Plays `agent.execute(...)`, and makes a trajectory of the token ids and ranges that it returns.

    Args:
        agent: an instance of the file's `AgentExecutor`.
        engine: samples for it, in vLLM's shapes.
        codec: decodes its text.
        tokenizer: passed to it.
        max_length: tokens of an episode, prompt included.
        rewards: judges the episodes for which the agent returns no reward.
    """

    def __init__(
        self,
        agent: Any,
        engine: RolloutEngine,
        codec: ChatCodec,
        tokenizer: Any,
        *,
        max_length: int,
        rewards: RewardSource | None = None,
    ) -> None:
        self._rewards = rewards
        self._agent = agent
        self._engine = engine
        self._codec = codec
        self._tokenizer = tokenizer
        self._max_length = max_length
        parameters = inspect.signature(agent.execute).parameters
        keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._extra = {"images": None} if keywords or "images" in parameters else {}

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """Implements `AgentExecutor.run`."""
        if request.prompt.images:
            raise ConfigurationError(
                "The prompt has images, which an agent's own execute() is not given: write its turns as an agent "
                "instance (reset and step), or leave out --data.image_key."
            )
        engine = _EngineFacade(self._engine, self._codec, request.params)
        try:
            with foreign_code(lambda words: ForeignError(f"The agent raised {words}"), located=True):
                answer = await self._agent.execute(
                    prompt=request.prompt.text,
                    label=request.prompt.label,
                    sampling_params=to_agent(request.params),
                    max_length=self._max_length,
                    hf_tokenizer=self._tokenizer,
                    llm_engine=engine,
                    **self._extra,
                )
                segments = read_segments(answer, max_length=self._max_length)
        except EngineError as error:
            return request.failure(FailureKind.INFRASTRUCTURE, str(error))
        except RollgradError as error:
            return request.failure(FailureKind.ENVIRONMENT, str(error))
        try:
            if all(segment.reward is None for segment in segments):
                segments = rewarded(segments, await self._judge(segments[-1], engine.calls, request))
            return to_trajectories(segments, engine.calls, request)
        except RewardError as error:
            return request.unjudged(error)
        except TrajectoryError as error:
            return request.failure(FailureKind.ENVIRONMENT, str(error))

    async def _judge(self, last: EpisodeSegment, calls: Sequence[EngineCall], request: EpisodeRequest) -> Reward:
        """Returns the reward of an episode that ends with `last`."""
        begin, end = (last.ranges[0][0], last.ranges[-1]) if last.ranges else (len(last.token_ids), (0, 0))
        question = judge_request(
            self._codec,
            request.prompt,
            last.token_ids,
            opening=begin,
            response=self._codec.decode(last.token_ids[end[0] : end[1]]),
            stop_reason=StopReason.LENGTH if last.truncated else StopReason.ENVIRONMENT,
            step=version_of(calls),
        )
        return await judged(self._rewards, question)


class _EngineFacade:
    """An engine with vLLM's `generate(token_ids, sampling_params)`; it records the generations. Any thread's event loop
    may call it; the engine itself is only used in the loop that this object was made in."""

    def __init__(self, engine: RolloutEngine, codec: ChatCodec, params: SamplingParams) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._codec = codec
        self._params = params
        self._seeds = count(params.seed)
        self.calls: list[EngineCall] = []

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        if multi_modal_data:
            raise ConfigurationError(
                "The agent passed multi_modal_data, which this run cannot show to its model: leave it out of the call."
            )
        work = self._generate(prompt_token_ids, sampling_params)
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _generate(self, prompt_token_ids: Sequence[int], sampling_params: Any) -> RequestOutput:
        params = from_agent(sampling_params, self._params)
        params = evolve(params, seed=next(self._seeds) % 2**63)
        prompt = tuple(map(int, prompt_token_ids))
        earlier = ((*call.prompt, *call.generation.token_ids) for call in self.calls)
        continues = max((len(tokens) for tokens in earlier if prompt[: len(tokens)] == tokens), default=0)
        request = GenerationRequest(prompt_token_ids=prompt, params=params, keep=True, continues=continues)
        generation = await self._engine.generate(request)
        self.calls.append(EngineCall(prompt=prompt, generation=generation))
        pairs = zip(generation.token_ids, generation.logprobs, strict=True)
        output = CompletionOutput(
            token_ids=list(generation.token_ids),
            text=self._codec.decode(generation.token_ids),
            logprobs=[{token: Logprob(logprob)} for token, logprob in pairs],
            finish_reason=FINISH_REASONS.get(generation.stop_reason, generation.stop_reason.value),
        )
        return RequestOutput(prompt_token_ids=list(prompt_token_ids), outputs=[output])

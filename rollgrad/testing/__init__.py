"""Fakes of the ports, for tests of your own rewards, environments, agents and tools: exact, in memory, without a model.

Each fake passes the same contract suite as the real adapters of its port.

>>> import asyncio
>>> from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
>>> engine = FakeRolloutEngine()
>>> request = GenerationRequest(prompt_token_ids=(65, 66), params=SamplingParams(max_new_tokens=3, seed=0))
>>> len(asyncio.run(engine.generate(request)).token_ids)
3
"""

from rollgrad.testing.agent_executor import FakeAgentExecutor, make_trajectory
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.checkpoint_store import FakeCheckpointStore
from rollgrad.testing.clock import FakeClock
from rollgrad.testing.environment import FakeEnvironment
from rollgrad.testing.metric_sink import FakeMetricSink
from rollgrad.testing.models import FakePolicy, FakeReference, FakeValue
from rollgrad.testing.prompt_source import FakePromptSource
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from rollgrad.testing.tool import FakeTool
from rollgrad.testing.weight_channel import FakeWeightChannel

__all__ = [
    "FakeAgentExecutor",
    "FakeChatCodec",
    "FakeCheckpointStore",
    "FakeClock",
    "FakeEnvironment",
    "FakeMetricSink",
    "FakePolicy",
    "FakePromptSource",
    "FakeReference",
    "FakeRewardSource",
    "FakeRolloutEngine",
    "FakeTool",
    "FakeValue",
    "FakeWeightChannel",
    "make_trajectory",
]

"""Cost of the driver between the last token of a step and the processes that train on it.

`python benchmarks/data_plane.py` plays groups of eight rollouts on simulated engines, as `controller.py` does, and
takes the update that they feed: packing, advantages, loss weights, division over 64 ranks, and the message to each rank
as Ray would pickle it. `ns idle` is the driver's processor time per token while no GPU has work, from the last reply to
the last message: the median of `STEPS` updates. `ns first` is that of the first update, in memory that the process has
not used before. `ns sampling` is its time per token before, while engines sample. `bytes` are those of the messages,
per token. Likewise for a forward pass that scores the step (`score`: the messages there and back).
The last line is `idle I ns, B bytes`, of the largest step.
"""

import argparse
import asyncio
import pickle
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from attrs import define
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.controller import PING_SECONDS, SAMPLES, SimulatedEngine
from benchmarks.results import keep
from rollgrad.adapters.models.ray.sharded import ShardedPolicy
from rollgrad.adapters.models.ray.wire import SentBatch
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.microbatch import split
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.application.settings.sections.reward import RewardConfig
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.algorithms.settings import AdvantageSettings, Aggregation
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.reward_source import FakeRewardSource

SIZES = ((16, 64), (128, 512), (1_024, 610))
"""(engines, groups)."""
SMOKE_SIZES = ((2, 2),)
RANKS, TOKENS_PER_PASS = 64, 16_384
STEPS = 3
PROMPT, REPLY = 1_024, 1_024
"""Tokens of a prompt, and of a reply on average."""
VOCABULARY = 256
"""Token ids of the simulated engines, which the test double of the codec can read."""


class DrawingEngine(SimulatedEngine):
    """Answers each request with a reply of its own."""

    drawn = tuple(random.Random(0).choices(range(65, 91), k=10 * REPLY))
    chances = tuple(-number for number in torch.rand(len(drawn)).tolist())

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        await super().generate(request, on_token=on_token)
        start, count = request.params.seed % (8 * REPLY), REPLY // 2 + request.params.seed % REPLY
        return Generation(
            token_ids=list(self.drawn[start : start + count]),
            logprobs=list(self.chances[start : start + count]),
            versions=[0] * count,
            stop_reason=StopReason.STOP,
        )


@define
class Messages:
    """A group of processes that only counts what is sent to it."""

    size: int
    sent: int = 0
    received: int = 0
    seconds_of_answers: float = 0.0

    def put(self, argument: Any) -> Any:
        return argument

    def all(self, method: str) -> list[bool]:
        """Answers that no process pads sequences."""
        return [False] * self.size

    def each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Pickles each message as Ray does, with arrays out of band, and answers."""
        for message in arguments:
            buffers: list[pickle.PickleBuffer] = []
            data = pickle.dumps(message[:1], protocol=5, buffer_callback=buffers.append)
            self.sent += len(data) + sum(len(bytes(buffer)) for buffer in buffers)
        began = time.process_time()
        answers = [
            ({}, self._told(message[0])) if method == "update" else self._scored(message[0][0]) for message in arguments
        ]
        self.seconds_of_answers += time.process_time() - began
        return answers

    def _scored(self, part: SentBatch) -> dict[str, Any]:
        column = part.own([each.action_mask_N.float()[each.action_mask_N] for each in part.passes()])
        self.received += column.nbytes
        return {"logprobs_N": np.array(column)}

    def _told(self, batches: Sequence[SentBatch]) -> list[dict[str, Any]]:
        """Returns what an objective with ratios is told of each action token, which a run keeps with its rollouts."""
        scored = [self._scored(batch)["logprobs_N"] for batch in batches]
        told = [
            {"logprobs_N": column, "entropy_N": column.astype(np.float16), "clipped_N": column > 0} for column in scored
        ]
        self.received += sum(each["entropy_N"].nbytes + each["clipped_N"].nbytes for each in told)
        return told


async def played(engines: int, groups: int) -> tuple[list[RolloutGroup], float]:
    """Returns the groups of a step, and the seconds of the processor that it took to play them."""
    told = asyncio.Event()
    members = [DrawingEngine(told, lambda: None) for _ in range(engines)]
    fleet = EngineFleet(members, ping_seconds=PING_SECONDS)
    numbers = random.Random(2)
    executor = SingleTurnExecutor(fleet, FakeChatCodec(), FakeRewardSource(lambda request: numbers.random()))
    service = RolloutService(executor, max_concurrent=groups * SAMPLES, max_failures=0, seed=0)
    params = SamplingParams(max_new_tokens=2 * REPLY)
    prompts = [Prompt(token_ids=tuple(numbers.choices(range(VOCABULARY), k=PROMPT)), text="") for _ in range(groups)]
    slots = service.slots()
    began = time.process_time()
    tasks = [
        asyncio.create_task(
            service.play(prompt, params, samples=SAMPLES, group_id=index, slots=slots, greedy_baseline=False)
        )
        for index, prompt in enumerate(prompts)
    ]
    await asyncio.sleep(0)
    told.set()
    found = await asyncio.gather(*tasks)
    seconds = time.process_time() - began
    await fleet.aclose()
    return list(found), seconds


def measure(engines: int, groups: int, ranks: int) -> dict[str, float]:
    """Returns the figures of one step."""
    rollouts, sampling = asyncio.run(played(engines, groups))
    trajectories = [trajectory for group in rollouts for trajectory in group.trajectories]
    tokens = sum(map(len, trajectories))
    messages = Messages(ranks)
    policy = ShardedPolicy(cast("WorkerGroup", messages))
    experience = ExperienceService(
        policy,
        reference=None,
        critic=None,
        algo=AlgoConfig(advantage=AdvantageSettings(estimator="group_norm")),
        reward=RewardConfig(),
        max_length=None,
        max_tokens=TOKENS_PER_PASS * ranks,
        steps_per_rollout=1,
        shares=ranks,
    )
    update = UpdateService(
        policy,
        None,
        aggregation=Aggregation.TOKEN_MEAN,
        max_length=REPLY,
        batch_size=None,
        epochs=1,
        max_tokens=TOKENS_PER_PASS * ranks,
        shares=ranks,
        seed=0,
        skip_idle=True,
    )
    made, updated = list[float](), list[float]()
    for _ in range(STEPS):
        messages.sent = messages.received = 0
        messages.seconds_of_answers = 0.0
        began = time.process_time()
        batch = experience.make(trajectories, 0.0).batch
        made.append(time.process_time() - began)
        update.run(batch, PolicyLossObjective())
        updated.append(time.process_time() - began - messages.seconds_of_answers)
    both_ways, messages.sent, messages.received = messages.sent + messages.received, 0, 0
    messages.seconds_of_answers = 0.0
    scoring = time.process_time()
    policy.logprobs(split(batch, TOKENS_PER_PASS * ranks, ranks))
    scored = time.process_time() - scoring - messages.seconds_of_answers
    return {
        "engines": engines,
        "tokens": tokens,
        "ns sampling": sampling * 1e9 / tokens,
        "ns idle": statistics.median(updated) * 1e9 / tokens,
        "of it experience": statistics.median(made) * 1e9 / tokens,
        "ns first": updated[0] * 1e9 / tokens,
        "bytes": both_ways / tokens,
        "ns score": scored * 1e9 / tokens,
        "bytes score": (messages.sent + messages.received) / tokens,
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, to see that the script runs")
    smoke = parser.parse_args().smoke
    torch.set_num_threads(1)
    measured = [measure(*size, 2 if smoke else RANKS) for size in (SMOKE_SIZES if smoke else SIZES)]
    table = Table(*measured[0])
    for found in measured:
        table.add_row(*(f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in found.values()))
    Console(highlight=False, width=140).print(table)
    if not smoke:
        keep("data_plane", {"steps": measured})
    print(f"idle {measured[-1]['ns idle']:.0f} ns, {measured[-1]['bytes']:.1f} bytes")


if __name__ == "__main__":
    main()

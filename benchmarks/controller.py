"""Cost of the controller itself: whole rollouts over simulated engines that answer all at once.

`python benchmarks/controller.py` plays groups of eight episodes through the services of a real run (rollout service,
single-turn executor, fleet of engines with its pings) and holds every request in flight until all have been placed. For
each size it prints the processor time per rollout, split into the way to the engine and the way back, and the memory
per rollout in flight. The last line is `growth G`: the cost per rollout at the largest size over that at the smallest.
"""

import argparse
import asyncio
import gc
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.engines.fleet_member import FleetMember
from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.application.rollouts.groups import RolloutGroup, RolloutService
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.reward_source import FakeRewardSource

SIZES = ((10, 1_000), (100, 10_000), (1_000, 100_000))
"""(engines, rollouts in flight)."""
SMOKE_SIZES = ((1, 8), (2, 16))

SAMPLES = 8
PROMPT_TOKENS, REPLY_TOKENS = 256, 256
PING_SECONDS = 2.0


class SimulatedEngine(FleetMember):
    """Answers with the same tokens once it is told to."""

    reply = Generation(
        token_ids=[65 + index % 26 for index in range(REPLY_TOKENS)],
        logprobs=[-math.log(26)] * REPLY_TOKENS,
        versions=[0] * REPLY_TOKENS,
        stop_reason=StopReason.STOP,
    )

    def __init__(self, told: asyncio.Event, placed: Callable[[], None]) -> None:
        self._told, self._placed = told, placed

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        self._placed()
        await self._told.wait()
        return self.reply

    async def ping(self) -> None: ...
    async def restart(self) -> None: ...
    async def close(self) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


@frozen
class Cost:
    """Microseconds of processor time per rollout on the way there and back, KiB per rollout in flight."""

    there_us: float
    back_us: float
    kib: float

    @property
    def us(self) -> float:
        return self.there_us + self.back_us


async def measure(engines: int, rollouts: int) -> Cost:
    told, all_placed = asyncio.Event(), asyncio.Event()
    left = rollouts

    def placed() -> None:
        nonlocal left
        left -= 1
        if not left:
            all_placed.set()

    members = [SimulatedEngine(told, placed) for _ in range(engines)]
    fleet = EngineFleet(members, ping_seconds=PING_SECONDS)
    rewards = FakeRewardSource(lambda request: 1.0)
    executor = SingleTurnExecutor(fleet, FakeChatCodec(), rewards)
    service = RolloutService(executor, max_concurrent=rollouts, max_failures=0, seed=0)
    slots = service.slots()
    params = SamplingParams(max_new_tokens=REPLY_TOKENS)
    gc.collect()
    held, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    groups = [
        asyncio.create_task(
            service.play(_prompt(index), params, samples=SAMPLES, group_id=index, slots=slots, greedy_baseline=False)
        )
        for index in range(rollouts // SAMPLES)
    ]
    await all_placed.wait()
    there = time.process_time() - began
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
    told.set()
    played: list[RolloutGroup] = await asyncio.gather(*groups)
    back = time.process_time() - began - there
    assert sum(len(group.trajectories) for group in played) == rollouts
    await fleet.aclose()
    return Cost(there * 1e6 / rollouts, back * 1e6 / rollouts, kib / rollouts)


def _prompt(index: int) -> Prompt:
    return Prompt(token_ids=tuple((index + t) % 256 for t in range(PROMPT_TOKENS)), text="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, to see that the script runs")
    sizes = SMOKE_SIZES if parser.parse_args().smoke else SIZES
    table = Table("engines", "rollouts in flight", "us there", "us back", "us in all", "KiB in flight")
    costs = []
    for engines, rollouts in sizes:
        cost = asyncio.run(measure(engines, rollouts - rollouts % SAMPLES))
        costs.append(cost)
        table.add_row(
            f"{engines:,}",
            f"{rollouts:,}",
            *(f"{x:.0f}" for x in (cost.there_us, cost.back_us, cost.us)),
            f"{cost.kib:.1f}",
        )
    Console(highlight=False).print(table)
    print(f"growth {costs[-1].us / costs[0].us:.2f}")


if __name__ == "__main__":
    main()

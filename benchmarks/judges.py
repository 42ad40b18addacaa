"""Verdicts a second of the judges that run in the sandbox, against the same judges without walls.

Ordinary replies, all asked for at once as a rollout does, in rounds that take turns; the first round, in which the
processes start, is left out. A line a judge: the median of each, and their ratio.

    python benchmarks/judges.py --replies 400 --rounds 5

`--smoke` is one round of ten replies, whose figures mean nothing.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable

import tyro

from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymReward
from rollgrad.adapters.rewards.verifiers import VerifierReward
from rollgrad.application.settings.sections.reward import JudgeIsolation, Verifier
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest

TIMEOUT = 30.0
"""Seconds of one verdict at most: none of these takes as many milliseconds."""
TASK = "chain_sum"

Judge = VerifierReward | ReasoningGymReward


def verifier(kind: Verifier) -> Callable[[JudgeIsolation], Judge]:
    """Makes a verifier."""
    pattern = ".*42.*" if kind is Verifier.FORMAT else None
    return lambda isolation: VerifierReward(kind, timeout=TIMEOUT, format_pattern=pattern, isolation=isolation)


JUDGES: dict[str, Callable[[JudgeIsolation], Judge]] = {
    "math": verifier(Verifier.MATH),
    "format": verifier(Verifier.FORMAT),
    "reasoning-gym": lambda isolation: ReasoningGymReward(
        f"reasoning_gym:{TASK}", timeout=TIMEOUT, isolation=isolation
    ),
}


def requests(count: int) -> list[RewardRequest]:
    """Replies of a paragraph, half of them right."""
    entry = {"question": "40 + 2", "answer": "42", "metadata": {"source_dataset": TASK}}
    prompt = Prompt(token_ids=(1,), text="?", label="42", datasource=TASK, metadata=entry)
    text = "We add the tens, then the ones. " * 20
    return [
        RewardRequest(
            prompt=prompt,
            response=f"{text}<answer>{42 - n % 2}</answer> $\\boxed{{{42 - n % 2}}}$",
            stop_reason=StopReason.STOP,
        )
        for n in range(count)
    ]


def rate(judge: Judge, asked: list[RewardRequest]) -> float:
    """Verdicts a second."""
    began = time.perf_counter()
    rewards = asyncio.run(judge.score(asked))
    seconds = time.perf_counter() - began
    assert not any(reward.metrics.get("judge_failed") for reward in rewards)
    assert max(reward.value for reward in rewards) == 1.0
    return len(asked) / seconds


def main(replies: int = 400, rounds: int = 5, smoke: bool = False) -> None:
    """Prints the medians."""
    if smoke:
        replies, rounds = 10, 1
    asked = requests(replies)
    for name, make in JUDGES.items():
        judges = {isolation: make(isolation) for isolation in (JudgeIsolation.SANDBOX, JudgeIsolation.NONE)}
        found: dict[JudgeIsolation, list[float]] = {isolation: [] for isolation in judges}
        for number in range(rounds + 1):
            for isolation, judge in judges.items():
                measured = rate(judge, asked)
                if number:
                    found[isolation].append(measured)
        for judge in judges.values():
            judge.close()
        shut_in, free = (statistics.median(values) for values in found.values())
        print(f"{name}: {shut_in:.0f} verdicts/s, without walls {free:.0f}: {shut_in / free:.2f} times", flush=True)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

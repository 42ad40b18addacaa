"""Work over what prompt sharing allows, when the rollouts of a step are divided over processes and forward passes.

`python benchmarks/prompt_sharing.py` divides 32 groups of 8 rollouts, whose replies have a third to five thirds of the
mean length, over 1, 8 and 64 ranks with 16,384 tokens a pass. `work` is the distinct tokens of all passes, each of
which computes a shared prompt once, over the least possible: every prompt once, and once more for each rank beyond the
groups. `slowest` is the rank with most, times the ranks, over the same. `repeated` is what it would be without sharing.
The last line is `work W`, the largest of all.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.results import keep
from rollgrad.application.learning.microbatch import split
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.batches.partition import least_possible, pieces
from rollgrad.domain.batches.prefixes import shared_prefixes
from rollgrad.domain.batches.sharding import sequences_of_shares
from rollgrad.testing.agent_executor import make_trajectory

GROUPS, SAMPLES = 32, 8
SHAPES = ((2048, 512), (1024, 1024), (512, 2048))
"""(tokens of a prompt, mean tokens of a reply)."""
RANKS = (1, 8, 64)
TOKENS_PER_PASS = 16_384
VOCABULARY = 150_000


def rollouts(groups: int, prompt: int, reply: int) -> RolloutBatch:
    """Returns groups of samples, with the prompts and replies of nobody."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
        return drawn

    trajectories = []
    for group in range(groups):
        asked = tokens(prompt)
        for sample in range(SAMPLES):
            length = int(torch.randint(reply // 3, reply * 5 // 3, (), generator=generator))
            trajectories.append(make_trajectory(asked, tokens(length), group_id=group, sample_id=sample))
    return pack(trajectories)


def distinct(batch: RolloutBatch) -> int:
    """Returns the number of tokens that a forward pass of `batch` computes."""
    return shared_prefixes(batch).distinct(batch.lengths_S.tolist())


def measure(batch: RolloutBatch, ranks: int, tokens_per_pass: int) -> dict[str, float]:
    """Returns the figures of a division over so many ranks."""
    passes = split(batch, tokens_per_pass * ranks, ranks)
    loads = [0] * ranks
    for each in passes:
        for rank, sequences in enumerate(sequences_of_shares(each, ranks)):
            if len(sequences):
                loads[rank] += distinct(each.select(sequences))
    least = least_possible(pieces(batch, tokens_per_pass, shared_prefixes(batch)), ranks)
    return {
        "work": sum(loads) / ranks / least,
        "slowest": max(loads) / least,
        "repeated": batch.token_count / ranks / least,
        "passes": len(passes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, to see that the script runs")
    smoke = parser.parse_args().smoke
    groups, shapes, per_pass = (2, ((20, 6),), 64) if smoke else (GROUPS, SHAPES, TOKENS_PER_PASS)
    figures: dict[str, dict[str, float]] = {}
    names = ("work", "slowest", "repeated", "passes")
    table = Table("prompt", "reply", "ranks", *names)
    for prompt, reply in shapes:
        batch = rollouts(groups, prompt, reply)
        for ranks in RANKS[:2] if smoke else RANKS:
            found = figures[f"{prompt} + {reply}, {ranks} ranks"] = measure(batch, ranks, per_pass)
            table.add_row(f"{prompt:,}", f"{reply:,}", str(ranks), *(f"{found[name]:.2f}" for name in names))
    Console(highlight=False).print(table)
    if not smoke:
        keep("prompt_sharing", figures)
    print(f"work {max(found['work'] for found in figures.values()):.2f}")


if __name__ == "__main__":
    main()

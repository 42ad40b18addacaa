"""Gains by packing and by a cache, of models whose tokens meet in more than plain attention, on this machine.

`python benchmarks/states.py` makes a model of Qwen3.5's kind with random weights (6 layers, of which every third
attends). It measures the forward and backward pass of 8 replies to a long prompt, packed and padded; then the embedded
engine, with the states that it keeps of its sequences, and computing each sequence anew. `--kind gpt_oss` and `--kind
gemma2` do the same with attention sinks and with capped scores. It prints medians of the processor's time. The last
line is `packed P times, kept S times`, the gain of each.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.results import keep
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.layers.padded import mark_padded, use_exact_attention
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.testing.agent_executor import make_trajectory

SAMPLES, PROMPT, REPLY, NEW_TOKENS, HIDDEN, ROUNDS = 8, 512, 64, 16, 256, 3
VOCABULARY = 4096


def config(kind: str, hidden: int) -> Any:
    """Returns the settings of a small model."""
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    if kind == "gpt_oss":
        return transformers.GptOssConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    if kind == "gemma2":
        return transformers.Gemma2Config(**common)
    return transformers.Qwen3_5TextConfig(
        **common,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )


def model(kind: str, hidden: int, *, pads: bool) -> Any:
    """Returns a packed or padded model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(kind, hidden)).eval()
    install_and_compare(made)
    if pads:
        use_exact_attention(made)
        mark_padded(made, "a benchmark says so")
    return made


def tokens(count: int, seed: int) -> tuple[int, ...]:
    """Returns tokens of nobody."""
    drawn = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def group(prompt: int, reply: int) -> PackedBatch:
    """Returns replies of half to three halves of the mean length, after one prompt."""
    lengths = torch.linspace(reply / 2, reply * 3 / 2, SAMPLES).int().tolist()
    return pack([make_trajectory(tokens(prompt, 0), tokens(n, i + 1), sample_id=i) for i, n in enumerate(lengths)])


def learned(made: Any, batch: PackedBatch) -> Callable[[], None]:
    """Returns a forward and backward pass."""
    module = PackedLM(made)

    def step() -> None:
        module.zero_grad()
        logprobs_A, _ = module(batch)
        logprobs_A.mean().backward()

    return step


def sampled(made: Any, prompt: int, count: int) -> Callable[[], None]:
    """Returns the generation of a group."""
    made.requires_grad_(False)
    engine = EmbeddedEngine(made, eos_token_ids=[])

    async def generate() -> None:
        params = [SamplingParams(max_new_tokens=count, seed=seed) for seed in range(SAMPLES)]
        asked = [GenerationRequest(prompt_token_ids=tokens(prompt, 0), params=each) for each in params]
        await asyncio.gather(*(engine.generate(request) for request in asked))

    return lambda: asyncio.run(generate())


def seconds(work: Callable[[], None], rounds: int) -> float:
    """Returns the median time of a round, after one that is not counted, on the processor, which others use too."""
    taken = []
    for _ in range(rounds + 1):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, to see that the script runs")
    parser.add_argument("--kind", choices=("qwen3_5", "gpt_oss", "gemma2"), default="qwen3_5")
    given = parser.parse_args()
    smoke = given.smoke
    prompt, reply, count, hidden, rounds = (24, 8, 4, 32, 1) if smoke else (PROMPT, REPLY, NEW_TOKENS, HIDDEN, ROUNDS)
    found: dict[bool, tuple[float, float]] = {}
    for pads in (True, False):
        made = model(given.kind, hidden, pads=pads)
        learning = seconds(learned(made, group(prompt, reply)), rounds)
        found[pads] = learning, seconds(sampled(made, prompt, count), 1 if pads else rounds)
    table = Table("", "training pass, s", "sampled tokens/s")
    for pads, name in ((True, "padded, computed anew"), (False, "packed, with what is kept")):
        table.add_row(name, f"{found[pads][0]:.2f}", f"{SAMPLES * count / found[pads][1]:.1f}")
    Console(highlight=False).print(table)
    gains = [before / after for before, after in zip(found[True], found[False], strict=True)]
    if not smoke:
        keep(f"states_{given.kind}", {"padded": [*found[True]], "packed": [*found[False]]})
    print(f"packed {gains[0]:.1f} times, kept {gains[1]:.1f} times")


if __name__ == "__main__":
    main()

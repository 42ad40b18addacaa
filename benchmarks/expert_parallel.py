"""Bytes that a process receives, and memory that it takes, in a forward and backward pass of a mixture of experts under
FSDP2.

Two ways are compared: gathering the experts of each layer in every process, and dividing the experts, to which tokens
are then sent. Beside them is the least that divided experts need, if each token went once to each other process.

The mixture has layers like those of Qwen3-30B-A3B at half the width, with half the experts, of which a token goes to
eight; its weights are noise in float32. Memory is the process's own, above what it held before the pass. Processes are
on this machine's CPU: there is nothing to be learned about speed.

    python benchmarks/expert_parallel.py
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from attrs import define, frozen
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.load_memory import Growth
from benchmarks.meeting import SECONDS, found_together, received
from benchmarks.results import keep

CHOSEN = 8
"""Experts of a token."""


@define(kw_only=True)
class Work:
    """Settings of the measurement."""

    hidden: int = 1024
    """Numbers of a hidden state."""
    inner: int = 384
    """Inner features of an expert."""
    experts: int = 64
    """Experts of a layer; a token goes to eight."""
    layers: int = 2
    """Layers."""
    tokens: int = 1024
    """Tokens of each process in a pass."""
    processes: int = 2
    """Processes."""
    smoke: bool = False
    """Smallest work, to see that the script runs; its figures mean nothing."""


SMALL = Work(hidden=64, inner=32, experts=16, layers=2, tokens=64, smoke=True)
"""Sizes of the smallest work."""


@frozen
class Pass:
    """Bytes that a process received in a pass, and by which its memory grew at most."""

    received: int
    grown: int


def main(work: Work) -> None:
    """Makes a pass with experts gathered and one with experts divided."""
    if work.smoke:
        work = SMALL
    gathered, divided = measured(work, 1), measured(work, work.processes)
    table = Table("experts of a layer", "bytes received", "memory of a pass")
    for name, each in (("gathered in each process", gathered), ("divided", divided)):
        table.add_row(name, f"{each.received / 1e6:,.1f} MB", f"{each.grown / 1e6:,.1f} MB")
    Console(width=100).print(table)
    floor = least(work)
    print(f"gathered over divided: {gathered.received / divided.received:.1f} times the bytes")
    print(f"divided over the least, {floor / 1e6:,.1f} MB: {divided.received / floor:.1f} times")
    if not work.smoke:
        figures = {
            name: getattr(work, name) for name in ("hidden", "inner", "experts", "layers", "tokens", "processes")
        }
        figures["least_received"] = floor
        for name, each in (("gathered", gathered), ("divided", divided)):
            figures |= {f"{name}_received": each.received, f"{name}_grown": each.grown}
        print(f"kept in {keep('expert_parallel', figures)}")


def least(work: Work) -> int:
    """Returns the fewest bytes that a process can receive.

    FSDP2 gathers the parameters of layers beside the experts in both passes and all other parameters in one, and
    reduces gradients in one: a process receives what the others have of these. It also receives a row for each token
    of the others that it computes, and one for each of its own tokens that they compute, in each layer and both passes.
    """
    with torch.device("meta"):
        model = mixture(work)
    beside = [(name, p.nbytes) for name, p in model.named_parameters() if ".experts." not in name]
    passes: int = sum(size * (3 if ".layers." in name else 2) for name, size in beside)
    others = work.processes - 1
    row_bytes = work.hidden * torch.float32.itemsize
    rows = 4 * min(others, CHOSEN) * work.tokens * work.layers
    return passes * others // work.processes + rows * row_bytes


def measured(work: Work, size: int) -> Pass:
    """Returns the most of new processes, of which `size` divide the experts."""
    found = found_together(partial(make_pass, work, size), work.processes)
    return Pass(max(each.received for each in found), max(each.grown for each in found))


def make_pass(work: Work, size: int, rank: int) -> Pass:
    """Makes a pass as the process `rank`, after a small one that makes what is kept between passes."""
    from rollgrad.adapters.models.fsdp.division import divide
    from rollgrad.adapters.models.torch.experts.expert_parallel import join_expert_groups
    from rollgrad.adapters.models.torch.forward import PackedLM
    from rollgrad.adapters.models.torch.layers.attention import install_attention
    from rollgrad.domain.batches.packed import pack
    from rollgrad.testing.agent_executor import make_trajectory

    join_expert_groups(size, timeout=SECONDS)
    model = mixture(work)
    install_attention(model)
    module = divide(PackedLM(model))
    chance = torch.Generator().manual_seed(rank)

    def learn(tokens: int) -> None:
        prompt, reply = torch.randint(3, model.config.vocab_size, (2, tokens // 2), generator=chance).tolist()
        logprobs_A, _ = module(pack([make_trajectory(prompt, reply)]))
        logprobs_A.sum().backward()

    learn(16)
    with received() as total, Growth() as growth:
        learn(work.tokens)
    return Pass(round(sum(total)), growth.largest)


def mixture(work: Work) -> Any:
    """Returns a Qwen3 mixture with random weights, equal in every process."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=work.hidden,
        moe_intermediate_size=work.inner,
        num_experts=work.experts,
        num_experts_per_tok=CHOSEN,
        num_hidden_layers=work.layers,
        num_attention_heads=work.hidden // 32,
        num_key_value_heads=2,
        head_dim=32,
    )
    return Qwen3MoeForCausalLM(config).eval()


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))

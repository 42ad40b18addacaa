"""Shapes, a model, a batch, times and memory that the sections of first light share, and where their findings go."""

import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve

GPU = torch.cuda.is_available()
DEV = torch.device("cuda", 0) if GPU else torch.device("cpu")
CPU = torch.device("cpu")
DT = torch.bfloat16


@define
class Run:
    """`tiny`: small shapes; `file` keeps the findings of the section; `packed` is vLLM's file that unpacks weights."""

    tiny: bool = False
    file: str = ""
    packed: str = ""


RUN = Run()
"""The run of this process."""


class Found(dict):
    """Findings of a section, which are kept as soon as they are there: it may be killed before its end."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(f"   {name}: {json.dumps(value, default=str)}", flush=True)
        if RUN.file:
            whole = Path(f"{RUN.file}.whole")
            whole.write_text(json.dumps(self, default=str))
            whole.replace(RUN.file)  # at once: it may be killed while it writes


def sync() -> None:
    if GPU:
        torch.cuda.synchronize()


def ms(work: Callable[[], Any], *, repeats: int = 5, warm: int = 2) -> float:
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        sync()
        t = time.perf_counter()
        work()
        sync()
        times.append(time.perf_counter() - t)
    return 1e3 * sorted(times)[len(times) // 2]


def forget_peak() -> None:
    if GPU:
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0


def reserved_gib() -> float:
    """Returns what torch held of the GPU at most for itself, gaps between tensors included."""
    return torch.cuda.max_memory_reserved() / 2**30 if GPU else 0.0


def allocated() -> int:
    return torch.cuda.memory_allocated() if GPU else 0


def free_all() -> None:
    """Gives back what nobody holds: models and optimizers are in cycles of references."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def matmul_flops() -> float:
    """FLOPs a second of a product of large matrices."""
    size = 256 if RUN.tiny else 8192
    a, b = (torch.randn(size, size, device=DEV, dtype=DT) for _ in range(2))
    return 2 * size**3 / ms(lambda: a @ b) * 1e3


def use(kind: str) -> None:
    """Has attention computed by the variable-length kernel, where there is one, or in padded buckets."""
    from rollgrad.adapters.models.torch.kernels import attention as kernels
    from rollgrad.adapters.models.torch.layers import attention

    attention.has_varlen = {"varlen": kernels.has_varlen, "buckets": lambda *_: False}[kind]  # type: ignore[attr-defined]


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM has on a CPU
    "vocab_size": 512,
}
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
"""Shapes of the models, of which the second is Qwen3-0.6B's."""


def config(kind: str = "Qwen3Config", **others: Any) -> Any:
    """Settings of a model of a kind of transformers, and what else is different."""
    import transformers

    return getattr(transformers, kind)(**{**(TINY if RUN.tiny else LARGE), "tie_word_embeddings": True, **others})


def model(dtype: torch.dtype = DT, device: torch.device = DEV, *, shape: Any = None) -> Any:
    """A model with random weights, of the settings `shape`, or `config()`."""
    from transformers import AutoModelForCausalLM

    from rollgrad.adapters.models.torch.layers.attention import install_attention

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(shape or config(), dtype=dtype).eval()
    install_attention(made)
    return made


def batch(groups: int, samples: int, prompt: int, reply: int, vocabulary: int = 500) -> Any:
    from rollgrad.domain.batches.packed import pack
    from rollgrad.domain.episodes.generation import Generation, StopReason
    from rollgrad.domain.episodes.trajectory import TrajectoryBuilder

    g = torch.Generator().manual_seed(1)
    made = []
    for group in range(groups):
        ids = torch.randint(3, vocabulary, (prompt,), generator=g).tolist()
        for sample in range(samples):
            builder = TrajectoryBuilder(ids, group_id=group, sample_id=group * samples + sample)
            tokens = torch.randint(3, vocabulary, (reply,), generator=g).tolist()
            builder.add_action(
                Generation(
                    token_ids=tokens, logprobs=[-1.0] * reply, versions=[0] * reply, stop_reason=StopReason.LENGTH
                )
            )
            made.append(builder.build(stop_reason=StopReason.LENGTH))
    packed = pack(made)
    weights = packed.action_mask_N / packed.action_mask_N.sum()
    return evolve(packed, advantages_N=torch.randn(packed.token_count, generator=g), loss_weights_N=weights)


def policy(made: Any, **settings: Any) -> Any:
    """`made` under AdamW."""
    from rollgrad.adapters.models.torch.models import TorchPolicy
    from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings

    rate = settings.pop("lr", 1e-6)
    return TorchPolicy(made, None, OptimizerSettings(lr=rate, total_steps=20), **settings)


def step(of: Any, *batches: Any) -> Any:
    """Takes an optimizer step; returns its metrics."""
    from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective

    return of.update(batches, PolicyLossObjective(entropy_coef=0.01))


def planned_gib(samples: int, prompt: int, reply: int, kind: Any, *, offloads: bool) -> float:
    """GiB of an actor's update by the memory plan, of so many replies to a prompt in one micro-batch."""
    from rollgrad.application.settings.memory_places import Machine
    from rollgrad.application.settings.run import RLConfig
    from rollgrad.entrypoints import dry_run

    run = RLConfig()
    run.algo.advantage.estimator, run.algo.kl.init_coef = "group_norm", 0.0
    run.rollout.batch_size, run.rollout.n_samples_per_prompt = 1, samples
    run.data.max_prompt_tokens, run.rollout.max_new_tokens = prompt, reply
    run.train.max_tokens_per_micro_batch = samples * (prompt + reply)
    run.actor.gradient_checkpointing, run.actor.offload_activations = kind, offloads
    machine = Machine(gpu=torch.cuda.get_device_properties(0).total_memory if GPU else 0, memory=2**40)
    with tempfile.TemporaryDirectory() as folder:
        config().save_pretrained(folder)
        run.actor.model_name_or_path = folder
        return dry_run._rows(run, dry_run._shapes(run, DT, DEV), machine, DT)[0].total / 2**30


def engine_of(m: Any, rows: int, *, captured: bool = True) -> Any:
    from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine

    engine = EmbeddedEngine(m, eos_token_ids=[], max_batch_size=rows, memory_share=0.3)
    if not captured:
        engine._batch.decoder._graphs = None  # type: ignore[union-attr]
    return engine


def play(engine: Any, rows: int, new: int, *, vocabulary: int = 500, sleeps: bool = False) -> list[Any]:
    """Tokens of replies to so many prompts of 64 tokens, each the likeliest."""
    return asyncio.run(played(engine, rows, new, vocabulary=vocabulary, sleeps=sleeps))


async def played(engine: Any, rows: int, new: int, *, vocabulary: int = 500, sleeps: bool = False) -> list[Any]:
    """As `play`, for an engine that stays in one event loop."""
    from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams

    asked = [
        GenerationRequest(
            prompt_token_ids=(7 + row % (vocabulary - 7), *range(5, 68)),
            params=SamplingParams(max_new_tokens=new, seed=row, temperature=0.0),
        )
        for row in range(rows)
    ]
    replies = await asyncio.gather(*(engine.generate(request) for request in asked))
    if sleeps:
        await engine.sleep()
    return [reply.token_ids for reply in replies]


def graphs_of(engine: Any) -> dict[str, Any]:
    """How many graphs an engine has, and whether a capture has failed."""
    from rollgrad.adapters.engines.embedded.step_graphs import uncaptured

    graphs = engine._batch.decoder._graphs
    return {} if graphs is None else {"graphs": len(graphs._captured), "captures": graphs._capture is not uncaptured}


def same(one: list[Any], other: list[Any]) -> float:
    """Share of the tokens that are the same."""
    alike = [a == b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return float(round(sum(alike) / len(alike), 3))

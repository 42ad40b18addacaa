"""How far the memory plan of `--dry_run` is from what models hold: for each architecture and role the peak of torch's
own count of allocated bytes, beside the plan.

    python benchmarks/memory_plan.py                 # eleven architectures: some minutes on two cores
    python benchmarks/memory_plan.py --smoke         # one of them, smaller, in seconds
    python benchmarks/memory_plan.py qwen3 gemma2    # these alone

A step of each role runs with random weights: an update of actor and critic in two micro-batches, a pass of the
reference and of the reward model, and replies of the embedded engine. The actor's update also runs with activations
that are computed again, and with samples that share their prompts.
"""

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from attrs import evolve, frozen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import results, smoke
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.kv_cache import BLOCK
from rollgrad.adapters.models.torch.layers.padded import use_exact_attention
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.planning.pass_memory import measured_passes
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.adapters.models.torch.rewards.reward_text import EncodedText
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.memory_places import Machine
from rollgrad.application.settings.memory_plan import memory_plan
from rollgrad.application.settings.memory_plan_passes import MIB
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.ports.models import LossOutput, TokenScores
from rollgrad.testing.agent_executor import make_trajectory
from tests import tiny_architectures

ARCHITECTURES = (
    *("llama", "qwen3", "gemma3_text", "mistral", "phi3", "olmo2", "granite", "starcoder2", "gpt2", "qwen3_moe"),
    "gemma2",
)
"""The last caps its scores."""
WAYS = (
    (Checkpointing.OFF, False),
    (Checkpointing.SELECTIVE, False),
    (Checkpointing.FULL, False),
    (Checkpointing.FULL, True),
)
"""Kinds of checkpointing of the actor, and whether inputs of layers are moved: here within the same memory."""
PROMPT, REPLY = 64, 192
"""Tokens; of prompts that samples share and of their replies the other way about."""
SHARING = 4
"""Samples of a prompt that they share."""
CPU = torch.device("cpu")
FLAG = "--model"
OPTIMIZER = OptimizerSettings(lr=1e-4)


@frozen(kw_only=True)
class Work:
    """Sizes of models and batches."""

    width: int = 256
    layers: int = 4
    vocabulary: int = 4000
    samples: int = 16


@frozen(kw_only=True)
class Row:
    """Bytes of one role beside its weights and its optimizer's state, which are exact."""

    architecture: str
    role: str
    measured: int
    planned: int

    @property
    def ratio(self) -> float:
        """Planned over measured."""
        return self.planned / self.measured


def peak(work: Callable[[], Any], thread: Executor | None = None) -> int:
    """Returns the most bytes that torch allocates at once in `work`, more than at its beginning: in this thread, or in
    that of an executor."""
    gc.collect()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    switch: Callable[..., Any] = (lambda act: act()) if thread is None else (lambda act: thread.submit(act).result())
    switch(profile.start)
    work()
    switch(profile.stop)
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def make_model(architecture: str, work: Work, directory: str) -> None:
    """Saves a model with random weights of the sizes of `work`."""
    layers = dict.fromkeys(("num_hidden_layers", "n_layer"), work.layers)
    heads = dict.fromkeys(("head_dim",), work.width // 4)
    wider = {name: work.width for name, size in tiny_architectures.SIZES.items() if size == 32}
    positions = {name: 1024 for name, size in tiny_architectures.SIZES.items() if size == 128}
    before = dict(tiny_architectures.SIZES)
    try:
        tiny_architectures.SIZES.update(wider | layers | heads | positions | {"vocab_size": work.vocabulary})
        tiny_architectures.tiny_model(architecture).save_pretrained(directory)
    finally:
        tiny_architectures.SIZES.clear()
        tiny_architectures.SIZES.update(before)


def make_config(path: str, work: Work) -> RLConfig:
    """Returns the settings of a run with all roles, two micro-batches a step."""
    config = RLConfig()
    config.actor.model_name_or_path = path
    config.algo.advantage.estimator = "gae"
    config.algo.kl.init_coef = 0.1
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = work.samples, 1
    config.rollout.max_new_tokens, config.data.max_prompt_tokens = REPLY, PROMPT
    config.train.max_tokens_per_micro_batch = work.samples // 2 * (PROMPT + REPLY)
    return config


def batch_of(work: Work) -> PackedBatch:
    """Returns samples of one length, each of its own prompt."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for sample in range(work.samples):
        tokens = torch.randint(3, 80, (PROMPT + REPLY,), generator=draw).tolist()
        made.append(make_trajectory(tokens[:PROMPT], tokens[PROMPT:], group_id=sample, sample_id=sample))
    return pack(made)


def groups_of(work: Work) -> PackedBatch:
    """Returns as many samples, `SHARING` of each prompt, whose prompts are long and replies short."""
    draw = torch.Generator().manual_seed(2)
    made = []
    for group in range(work.samples // SHARING):
        prompt = torch.randint(3, 80, (REPLY,), generator=draw).tolist()
        for sample in range(group * SHARING, (group + 1) * SHARING):
            reply = torch.randint(3, 80, (PROMPT,), generator=draw).tolist()
            made.append(make_trajectory(prompt, reply, group_id=group, sample_id=sample))
    return pack(made)


def likelihood(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """A loss with a gradient at every action token, and of the entropy too."""
    return LossOutput(loss=-(scores.logprobs_N + 0.01 * scores.entropy_N).sum() / part.token_count)


def squares(values_N: torch.Tensor, part: PackedBatch) -> LossOutput:
    """The critic's loss, against zero."""
    return LossOutput(loss=values_N.square().sum() / part.token_count)


def measure(architecture: str, work: Work, directory: str) -> Iterator[Row]:
    """Yields the rows of one architecture."""
    make_model(architecture, work, directory)
    config = make_config(directory, work)
    passes = partial(measured_passes, directory, dtype=torch.float32, device=CPU, longest=PROMPT + REPLY)
    shape = evolve(model_shape("actor.model_name_or_path", directory), passes=passes(prompt=PROMPT))
    if shape.passes is None:
        print(f"{architecture} cannot be measured without weights")
    judge = evolve(shape, passes=passes(judges=True))
    machine = Machine(gpu=0, memory=0)
    plan = {row.role: row for row in memory_plan(config, shape, compute_bytes=4, machine=machine, reward=judge)}
    batch = batch_of(work)
    halves = [batch.select(list(range(0, work.samples, 2))), batch.select(list(range(1, work.samples, 2)))]

    def load() -> Any:
        return load_causal_lm(directory, dtype=torch.float32, device=CPU, flag=FLAG)

    def row(role: str, measured: int) -> Row:
        planned = plan[role].gradients + plan[role].passes
        return Row(architecture=architecture, role=role, measured=measured, planned=planned)

    for kind, offloads in WAYS:
        policy = TorchPolicy(load(), None, OPTIMIZER, gradient_checkpointing=kind, offload_activations=offloads)
        policy.update(halves, likelihood)
        config.actor.gradient_checkpointing, config.actor.offload_activations = kind, offloads
        held = evolve(shape, passes=passes(checkpointing=kind, offloads=offloads))
        again = memory_plan(config, held, compute_bytes=4, machine=machine)[0]
        role = "actor" if kind is Checkpointing.OFF else f"actor, {kind}{', moved' if offloads else ''}"
        plan[role] = again
        yield row(role, peak(partial(policy.update, halves, likelihood)))
        del policy
    policy = TorchPolicy(load(), None, OPTIMIZER)
    both = groups_of(work)
    parts = [both.select(part) for part in torch.arange(work.samples).view(2, -1).tolist()]
    policy.update(parts, likelihood)
    groups = make_config(directory, work)
    groups.rollout.batch_size, groups.rollout.n_samples_per_prompt = work.samples // 2 // SHARING, SHARING
    groups.rollout.max_new_tokens, groups.data.max_prompt_tokens = PROMPT, REPLY
    plan["actor, shared prompts"] = memory_plan(groups, shape, compute_bytes=4, machine=machine)[0]
    yield row("actor, shared prompts", peak(partial(policy.update, parts, likelihood)))
    del policy
    critic = TorchValue(load(), None, OPTIMIZER, head={})
    critic.update(halves, squares)
    yield row("critic", peak(partial(critic.update, halves, squares)))
    del critic
    reference = TorchReference(load())
    yield row("reference", peak(partial(reference.score, halves[0])))
    del reference
    if (rewards := reward_model(directory)) is not None:
        ends = range(3 + PROMPT + REPLY, 3 + PROMPT + REPLY - work.samples, -1)  # so that there is padding
        texts = [EncodedText(tuple(range(3, end)), truncated=False) for end in ends]
        yield row("reward", peak(partial(rewards.score_encoded, texts)))
    yield row("engines", engine_peak(load(), work))


def reward_model(directory: str) -> RewardModel | None:
    """Returns a sequence classifier of the same architecture, where transformers has one."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        settings = AutoConfig.from_pretrained(directory, num_labels=1)
        model = AutoModelForSequenceClassification.from_config(settings)
    except ValueError:
        return None
    if not hasattr(model, "score"):
        return None
    use_exact_attention(model.eval())
    return RewardModel(model, None)


def engine_peak(model: Any, work: Work) -> int:
    """Returns the most bytes of the embedded engine; of its cache those of the blocks in use, for the others are only
    reserved."""
    engine = EmbeddedEngine(model.requires_grad_(False), eos_token_ids=(), max_batch_size=work.samples)
    engine.max_tokens = PROMPT + REPLY
    cache, used = engine._batch.decoder.cache, 0

    def reserve(place: Any, tokens: int, *, inner: Any = cache.reserve) -> None:
        nonlocal used
        inner(place, tokens)
        used = max(used, cache.used)

    cache.reserve = reserve  # type: ignore[method-assign]

    async def sample() -> None:
        params = SamplingParams(max_new_tokens=REPLY, seed=1)
        prompts = [tuple(range(3 + index, 3 + index + PROMPT)) for index in range(work.samples)]
        requests = (GenerationRequest(prompt_token_ids=prompt, params=params) for prompt in prompts)
        await asyncio.gather(*(engine.generate(request) for request in requests))

    most = peak(lambda: asyncio.run(sample()), engine._worker)
    return most - cache.nbytes + used * BLOCK * engine._batch.decoder.token_bytes


def main() -> None:
    """Prints a table, and keeps it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help=smoke.HELP)
    parser.add_argument("architectures", nargs="*")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    names = arguments.architectures or (("llama",) if arguments.smoke else ARCHITECTURES)
    work = Work(width=64, layers=2, samples=8) if arguments.smoke else Work()
    rows: list[Row] = []
    print(f"{'architecture':14} {'role':21} {'measured MiB':>12} {'planned MiB':>12} ratio")
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            for row in measure(name, work, str(Path(directory) / "model")):
                rows.append(row)
                found = f"{row.measured / MIB:12.2f} {row.planned / MIB:12.2f} {row.ratio:.2f}"
                print(f"{row.architecture:14} {row.role:21} {found}", flush=True)
    print(f"planned over measured: {min(r.ratio for r in rows):.2f} to {max(r.ratio for r in rows):.2f}")
    if not arguments.smoke and not arguments.architectures:
        kept = [{"architecture": r.architecture, "role": r.role, "ratio": round(r.ratio, 3)} for r in rows]
        results.keep("memory_plan", {"rows": kept})


if __name__ == "__main__":
    main()

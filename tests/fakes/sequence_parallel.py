"""Forward and backward passes that several processes make together: importable there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor, nn

from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.torch.compiling import compile_layers
from rollgrad.adapters.models.torch.forward import PackedLM, PackedValue, scatter
from rollgrad.adapters.models.torch.heads.allowed_tokens import follow_grammars
from rollgrad.adapters.models.torch.heads.distillation import DistillationSettings, KeptTeacher, Teacher
from rollgrad.adapters.models.torch.layers.attention import install_attention
from rollgrad.adapters.models.torch.layers.sequence_parallel import join_sequence_group
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.ports.models import LossOutput, TokenScores
from rollgrad.testing.agent_executor import make_trajectory
from tests.compiled_layers import AS_IT_IS, AS_WRITTEN, compiler
from tests.fakes import cluster, grammars
from tests.meeting_processes import fork_all, met
from tests.tiny_architectures import tiny_model

TIMEOUT = 300.0
VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "head_dim": 4,
    "first_k_dense_replace": 2,
}
"""Latent attention, with keys of 12 numbers and values of 10."""


GROUPED = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
"""Heads of a gated delta rule, of which two each share queries and keys."""


FAMILIES = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2_moe",
    "bamba",
    "falcon_h1",
    "zamba2",
    "mamba2",
    "mamba",
    "falcon_mamba",
    "zamba",
)
"""Types of models that hand a state on, beside those of other cases."""


@frozen(kw_only=True)
class Case:
    """A model, by the name of its class or its type, and the batch of `seed`; `samples` None: two tokens, fewer than
    there may be processes; `branches`: its samples part from each other again and again; `teacher`: settings in which
    its teacher differs; `compiler`: that of its layers, empty if they are not compiled."""

    family: str = "Llama"
    settings: dict[str, Any] = Factory(dict)
    seed: int = 0
    samples: int | None = 5
    branches: bool = False
    teacher: dict[str, Any] = Factory(dict)
    checkpointing: bool = False
    lora: bool = False
    prescribed: bool = False
    compiler: str = ""
    dtype: torch.dtype = torch.float32


CASES = {
    "two_heads": Case(),
    "another_batch": Case(seed=1, samples=7),
    "one_sample": Case(seed=2, samples=1),
    "one_head_for_all_queries": Case(
        family="Mistral", settings={"num_key_value_heads": 1, "sliding_window": 5}, seed=10, checkpointing=True
    ),
    "uneven_heads": Case(settings={"num_key_value_heads": 3}, seed=3),
    "a_head_each_query": Case(settings={"num_key_value_heads": 6}, seed=4),
    "tied_and_query_norms": Case(
        family="Qwen3", settings={"num_key_value_heads": 3, "tie_word_embeddings": True}, seed=5
    ),
    "window": Case(family="Mistral", settings={"num_key_value_heads": 3, "sliding_window": 5}, seed=6),
    "sinks": Case(family="GraniteSWA", settings={"num_key_value_heads": 3, "sliding_window": 5}, seed=12),
    "capped_scores": Case(
        family="Gemma2",
        settings={"num_key_value_heads": 3, "sliding_window": 5, "attn_logit_softcapping": 2.0},
        seed=13,
        checkpointing=True,
    ),
    "chunks_and_scaled_queries": Case(
        family="Llama4Text",
        settings={
            "num_key_value_heads": 3,
            "attention_chunk_size": 5,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
        },
        seed=17,
        branches=True,
    ),
    "checkpointing": Case(settings={"num_key_value_heads": 3}, seed=7, checkpointing=True),
    "adapters": Case(settings={"num_key_value_heads": 3}, seed=9, lora=True),
    "prescribed_replies": Case(settings={"num_key_value_heads": 3}, seed=11, prescribed=True),
    "compiled": Case(settings={"num_key_value_heads": 3}, seed=11, compiler=AS_WRITTEN),
    "compiled_gradients": Case(settings={"num_key_value_heads": 3}, seed=11, compiler=AS_IT_IS),
    "bfloat16": Case(settings={"num_key_value_heads": 3}, seed=8, dtype=torch.bfloat16),
    "fewer_tokens_than_processes": Case(settings={"num_key_value_heads": 3}, samples=None),
    "fewer_query_heads_than_processes": Case(settings={"num_attention_heads": 2, "num_key_value_heads": 1}, seed=12),
    "four_heads": Case(
        family="Qwen3",
        settings={"num_attention_heads": 4, "num_key_value_heads": 4},
        seed=13,
        branches=True,
        teacher={"num_key_value_heads": 2},
    ),
    "branches": Case(
        family="Mistral",
        settings={"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 7},
        seed=14,
        samples=8,
        branches=True,
        checkpointing=True,
    ),
    "latent": Case(family="DeepseekV3", settings=LATENT, seed=15, branches=True, lora=True),
    "layers_with_unlike_heads": Case(
        family="Gemma4Text",
        settings={
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "global_head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
        seed=16,
    ),
    "delta_rule": Case(family="qwen3_next", settings=GROUPED, seed=18, branches=True, checkpointing=True),
    "state_spaces": Case(family="nemotron_h", settings={"n_groups": 2}, seed=20, branches=True, checkpointing=True),
    "state_spaces_with_adapters": Case(family="granitemoehybrid", seed=22, lora=True),
    "channels": Case(family="jamba", seed=23, branches=True),
    "convolutions": Case(family="lfm2", seed=24, branches=True),
    "half_precision_states": Case(family="qwen3_5_text", settings=GROUPED, seed=25, dtype=torch.bfloat16),
    **{f"every_{family}": Case(family=family, seed=26, branches=True) for family in FAMILIES},
}


def model(case: Case) -> Any:
    import transformers

    torch.manual_seed(0)
    if case.family in transformers.CONFIG_MAPPING:
        made = tiny_model(case.family, vocab_size=VOCABULARY, **case.settings).to(case.dtype)
    else:
        config = getattr(transformers, f"{case.family}Config")(**{**SIZES, **case.settings})
        made = getattr(transformers, f"{case.family.removesuffix('Text')}ForCausalLM")(config).eval().to(case.dtype)
    install_attention(made)
    follow_grammars(made, grammars.chance_masks(VOCABULARY))
    if case.lora:
        add_lora(made, LoraConfig(rank=4), seed=1)
        for name, parameter in made.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)  # at 0, where it starts, A has no gradient
    if case.checkpointing:
        made.gradient_checkpointing_enable({"use_reentrant": False})
        made.train()
    if case.compiler:
        compile_layers(made)
    return made


def batch(seed: int, samples: int | None, *, branches: bool = False) -> PackedBatch:
    """Samples of one to three turns; those of a group share a prompt, which may be one token or most of the batch, and
    with `branches` their first turns besides: each begins as the one before it does, up to half of that."""
    generator = torch.Generator().manual_seed(seed)

    def count(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    def tokens(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    if samples is None:
        trajectories = [make_trajectory(tokens(1), tokens(1))]
    else:
        prompts = [tokens(count(40)) for _ in range(2)]
        trajectories = [
            make_trajectory(
                prompts[sample % 2],
                *(tokens(count(15)) for _ in range(2 * count(2) - 1)),
                group_id=sample % 2,
                sample_id=sample,
            )
            for sample in sorted(range(samples), key=lambda sample: sample % 2)
        ]
    if branches:
        replies = tokens(40)
        for sample in range(4):
            replies = replies[: len(replies) // 2 + 4] + tokens(count(15))
            reply = make_trajectory(prompts[0], replies, group_id=0, sample_id=samples + sample)
            trajectories.append(reply)
    packed = pack(trajectories)
    weights_N = torch.where(packed.action_mask_N, torch.rand(packed.token_count, generator=generator), 0.0)
    advantages_N = torch.randn(len(packed), generator=generator)[packed.sequence_ids_N]
    return evolve(packed, loss_weights_N=weights_N, value_weights_N=weights_N, advantages_N=advantages_N)


def by_token(scores: TokenScores, part: PackedBatch) -> LossOutput:
    weights_N = part.filled("loss_weights_N")
    return LossOutput(
        loss=(weights_N * (scores.logprobs_N + 0.3 * scores.entropy_N)).sum(),
        metrics={"entropy": (weights_N * scores.entropy_N).sum().detach()},
    )


def by_sequence(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """GSPO's ratio, the geometric mean over a sequence: every token's gradient depends on all others' log-probs."""
    difference_N = torch.where(part.action_mask_N, scores.logprobs_N + 3.0, 0.0)
    sums_S, actions_S = (
        torch.zeros(len(part)).index_add(0, part.sequence_ids_N, column_N)
        for column_N in (difference_N, part.action_mask_N.float())
    )
    ratio_N = (sums_S / actions_S.clamp(min=1)).exp()[part.sequence_ids_N]
    loss = -(part.filled("loss_weights_N") * part.filled("advantages_N") * ratio_N).sum()
    return LossOutput(loss=loss, metrics={"ratio": (part.filled("loss_weights_N") * ratio_N).sum().detach()})


def of_values(values_N: Tensor, part: PackedBatch) -> LossOutput:
    return LossOutput(loss=(part.filled("value_weights_N") * (values_N - 1).square()).sum())


OBJECTIVES: dict[str, Callable[[TokenScores, PackedBatch], LossOutput]] = {
    "by_token": by_token,
    "by_sequence": by_sequence,
}


def passes(case: Case) -> dict[str, Any]:
    """Returns this process's part of a case: columns of the action tokens, losses, and its gradients by objective."""
    packed = batch(case.seed, case.samples, branches=case.branches)
    packed = grammars.prescribed(packed) if case.prescribed else packed
    body = model(case)
    lm = PackedLM(body, temperature=0.7)
    logprobs_A, entropy_A = lm(packed)
    scores = TokenScores(logprobs_N=scatter(logprobs_A, packed), entropy_N=scatter(entropy_A, packed))
    result: dict[str, Any] = {"logprobs": logprobs_A.detach(), "entropy": entropy_A.detach()}
    for name, objective in OBJECTIVES.items():
        result[name] = gradients(lm, objective(scores, packed).loss)
    for kept in (False, True):
        name = "of_kept_teacher" if kept else "of_teacher"
        result[name], divergence_A = taught(case, body, packed, kept)
        result[f"divergence_{name}"] = divergence_A
    value = PackedValue(body, {"weight": torch.linspace(-1, 1, body.config.hidden_size)[None]})
    values_A = value(packed)
    result["values"] = values_A.detach()
    result["of_values"] = gradients(value, of_values(scatter(values_A, packed), packed).loss)
    return result


def compiled_passes(case: Case) -> dict[str, Any]:
    """Returns the same, of layers that the compiler of the case has compiled if it has one."""
    if not case.compiler:
        return passes(case)
    # Several gradients of one pass are taken here, as no trainer does.
    with compiler(case.compiler), torch._functorch.config.patch(donated_buffer=False):
        return passes(case)


def taught(case: Case, body: Any, packed: PackedBatch, kept: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the divergence of the model `body` from a teacher, which predicts now or has predicted before, and
    that divergence."""
    settings = DistillationSettings(beta=0.5, temperature=0.7, top_k=5 if kept else None)
    if kept:
        generator = torch.Generator().manual_seed(case.seed)
        ids_NK = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:5] for _ in range(packed.token_count)])
        logprobs_NB = torch.randn(packed.token_count, 6, generator=generator).log_softmax(1)
        packed = evolve(packed, teacher_ids_NK=ids_NK.int(), teacher_logprobs_NK=logprobs_NB.half())
        teacher: Teacher | KeptTeacher = KeptTeacher(settings)
    else:
        other = model(evolve(case, settings=case.settings | case.teacher, checkpointing=False, lora=False))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.8)
        teacher = Teacher(other, settings)
    lm = PackedLM(body, teacher=teacher)
    *_, divergence_A = lm(packed)
    weights_A = packed.filled("loss_weights_N")[packed.action_mask_N]
    return gradients(lm, (weights_A * divergence_A).sum()), divergence_A.detach()


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss, of the parameters that have any."""
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    found = {name: p.grad.float() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


@contextmanager
def joined(folder: Path, timeout: float, rank: int, processes: int) -> Iterator[None]:
    """Makes this process one of those that share batches, inside the block; they meet in `folder`."""
    with met(folder, timeout, rank, processes):
        join_sequence_group(processes, timeout=timeout)
        yield


def work(folder: Path, timeout: float, rank: int, processes: int, names: list[str]) -> None:
    """One of the processes: its results go to the file `<rank>` of `folder`."""
    with joined(folder, timeout, rank, processes):
        results: dict[str, Any] = {name: compiled_passes(CASES[name]) for name in names}
        join_sequence_group(1, timeout=timeout)
        results["apart"] = passes(CASES["two_heads"])
        torch.save(results, folder / str(rank))


def rank_policy(path: str, stage: int | str, width: int) -> RankPolicy:
    """In a group of so many, like those that follow."""
    join_sequence_group(width, timeout=TIMEOUT)
    return cluster.rank_policy(path, stage)


def rank_value(path: str, stage: int | str, width: int) -> TorchValue:
    join_sequence_group(width, timeout=TIMEOUT)
    return cluster.rank_value(path, stage)


def rank_reference(path: str, width: int) -> TorchReference:
    join_sequence_group(width, timeout=TIMEOUT)
    return cluster.rank_reference(path)


if __name__ == "__main__":
    fork_all(work, lambda name: model(evolve(CASES[name], compiler="")))

"""Models with compiled layers compute what they compute without, and compile nothing anew for packs of other sizes."""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, distributed, nn

from rollgrad.adapters.engines.embedded.decoding import decoder_of
from rollgrad.adapters.engines.embedded.kv_cache import Place
from rollgrad.adapters.models.fsdp.module import FSDPTrainedModule
from rollgrad.adapters.models.torch import compiling
from rollgrad.adapters.models.torch.compiling import compile_layers
from rollgrad.adapters.models.torch.experts.router_replay import install_router_replay, scored_with_experts
from rollgrad.adapters.models.torch.forward import PackedLM, scatter
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.loading.weight_shards import layer_stacks
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.references import AdapterlessReference
from rollgrad.application.settings.rules import setting_errors
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import ActorConfig, AdapterConfig, Checkpointing, DType
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.application.settings.sections.examples import ExampleModelConfig
from rollgrad.application.settings.sections.ref import RefConfig
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import TokenScores
from rollgrad.entrypoints.composition.models import (
    make_actor_model,
    make_critic,
    make_reference_model,
    make_trained_actor,
    make_trained_reward,
)
from rollgrad.testing.agent_executor import make_trajectory
from tests.compiled_layers import AS_IT_IS, AS_WRITTEN, compiler, graphs
from tests.fakes import cluster
from tests.recomputed import recompute
from tests.tiny_architectures import tiny_model

TOLERANCE = 1e-5
"""Largest difference of a log-prob, or of a gradient as a share of its parameter's largest."""
DECAY_TOLERANCE = 3e-5
"""Largest difference of the gradients of a recurrence's decay, which sum over all pairs of tokens."""


@pytest.fixture
def compiled_as_it_is() -> Iterator[None]:
    with compiler(AS_IT_IS):
        yield


@pytest.fixture
def compiled_as_written() -> Iterator[None]:
    with compiler(AS_WRITTEN):
        yield


def batch(seed: int, samples: int = 3) -> PackedBatch:
    """Two groups, each of which shares its prompt; a batch of another seed has other lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 79, (count,), generator=generator).tolist()

    prompts = [tokens(3 + 2 * seed), tokens(4)]
    return pack(
        [
            make_trajectory(prompts[group], tokens(2 + seed + 3 * sample), group_id=group)
            for group in range(2)
            for sample in range(samples)
        ]
    )


def likelihood(module: nn.Module, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of a loss of log-probs and entropies."""
    module.zero_grad()
    logprobs_A, entropy_A = module(packed)
    (logprobs_A.sum() + 0.1 * entropy_A.sum()).backward()
    return logprobs_A.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_alike(module: nn.Module, plain: nn.Module, packed: PackedBatch) -> None:
    (found_A, gradients), (wanted_A, wanted) = (likelihood(each, packed) for each in (module, plain))
    torch.testing.assert_close(found_A, wanted_A, rtol=0, atol=TOLERANCE)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        bound = DECAY_TOLERANCE if name.endswith("A_log") else TOLERANCE
        assert (gradients[name] - gradient).abs().max() <= bound * gradient.abs().max(), name
    with torch.no_grad():
        torch.testing.assert_close(module(packed)[0], found_A, rtol=0, atol=TOLERANCE)


def installed(model_type: str, *, recomputes: bool = False) -> Any:
    model = tiny_model(model_type)
    install_and_compare(model)
    if recomputes:
        recompute(model)
    return model


def compiled(model: Any) -> Any:
    compile_layers(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "recomputes", "backend"),
    [
        ("llama", True, AS_IT_IS),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in [
                ("qwen3_moe", True, AS_IT_IS),
                ("gemma3_text", False, AS_IT_IS),
                ("qwen3_5_text", False, AS_IT_IS),
                ("jamba", False, AS_IT_IS),
                # Their layers differ in Python; the operations of their gradients are those of the others.
                ("llama", False, AS_WRITTEN),
                ("cohere2", True, AS_WRITTEN),
                ("gpt2", False, AS_WRITTEN),
                ("lfm2", False, AS_WRITTEN),
                ("deepseek_v3", True, AS_WRITTEN),
                ("llama4_text", True, AS_WRITTEN),
                ("nemotron", True, AS_WRITTEN),
            ]
        ),
    ],
)
def test_packs_of_all_sizes_share_the_graphs_of_the_first(model_type: str, recomputes: bool, backend: str) -> None:
    with compiler(backend):
        plain, module = (PackedLM(installed(model_type, recomputes=recomputes)) for _ in range(2))
        compile_layers(module.model)
        assert_alike(module, plain, batch(0))
        assert 4 <= graphs() <= 24, (
            "pieces between attention and experts, with and without gradients, of each kind of layer"
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for seed in range(1, 9):
                assert_alike(module, plain, batch(seed, samples=1 + seed % 4))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_as_written")
def test_layers_alike_share_their_graphs() -> None:
    counts = []
    for layers in (2, 5):
        model = tiny_model("llama", num_hidden_layers=layers)
        install_and_compare(model)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        likelihood(PackedLM(compiled(model)), batch(0))
        counts.append(graphs())
    assert counts[0] == counts[1] > 0


def adapted(path: Path, *, compiles: bool, weights: dict[str, Tensor] | None = None) -> TorchPolicy:
    """Makes a policy that trains adapters, with these weights if there are some, and recomputes its layers."""
    model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag=cluster.FLAG)
    add_lora(model, AdapterConfig(rank=4), seed=0)
    model.load_state_dict(weights or model.state_dict())
    if compiles:
        compile_layers(model)
    return TorchPolicy(
        model,
        None,
        OptimizerSettings(lr=1e-3),
        gradient_checkpointing=Checkpointing.FULL,
        offload_activations=compiles,
    )


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("backend", [AS_IT_IS, "inductor"])
def test_a_policy_with_adapters_whose_layers_are_compiled_and_recomputed_takes_the_same_steps(
    tiny_model_dir: Path, backend: str
) -> None:
    with compiler(backend):
        policies = [adapted(tiny_model_dir, compiles=compiles) for compiles in (False, True)]
        for _ in range(2):
            plain, fused = (cluster.trained(policy) for policy in policies)
            assert fused == pytest.approx(plain, rel=1e-5, abs=1e-6)
        assert graphs() > 0


@pytest.mark.slow
@pytest.mark.wide
def test_fused_layers_give_the_same_log_probs() -> None:
    """Without gradients, whose code takes the compiler of a CPU most of a minute; this takes it half of one."""
    with compiler("inductor"):
        plain, fused = (PackedLM(installed("llama")) for _ in range(2))
        compile_layers(fused.model)
        with torch.no_grad():
            torch.testing.assert_close(fused(batch(0))[0], plain(batch(0))[0], rtol=0, atol=TOLERANCE)
        assert graphs() > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", [AS_WRITTEN, pytest.param("inductor", marks=pytest.mark.wide)])
def test_a_policy_with_adapters_scores_the_same_with_them_and_without(tiny_model_dir: Path, backend: str) -> None:
    with compiler(backend):
        plain = adapted(tiny_model_dir, compiles=False)
        cluster.trained(plain)
        fused = adapted(tiny_model_dir, compiles=True, weights=plain.module.state_dict())
        wanted, found = (policy.score(cluster.batch()).logprobs_N for policy in (plain, fused))
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
        assert (found - AdapterlessReference(fused).score(cluster.batch()).logprobs_N).abs().max() > 1e-4
        wanted, found = (AdapterlessReference(policy).score(cluster.batch()).logprobs_N for policy in (plain, fused))
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
        assert graphs() > 0


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.usefixtures("compiled_as_written")
def test_a_critic_s_values_and_steps_are_the_same(tiny_model_dir: Path) -> None:
    plain, critic = (cluster.value(str(tiny_model_dir), compiles=compiles) for compiles in (False, True))
    assert cluster.fitted(critic) == pytest.approx(cluster.fitted(plain), rel=1e-5)
    torch.testing.assert_close(critic.values(cluster.batch()), plain.values(cluster.batch()), rtol=0, atol=TOLERANCE)
    assert graphs() > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", [AS_WRITTEN, pytest.param(AS_IT_IS, marks=pytest.mark.wide)])
def test_fsdp2_divides_compiled_layers(tiny_model_dir: Path, backend: str) -> None:
    with compiler(backend):
        assert_fsdp2_trains_as_one_process(str(tiny_model_dir))


def assert_fsdp2_trains_as_one_process(path: str) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        lone = cluster.policy(path)
        policy = cluster.policy(path, FSDPTrainedModule, compiles=True)
        assert cluster.trained(policy) == pytest.approx(cluster.trained(lone), rel=1e-5)
        found = cluster.weights(policy)
        for name, tensor in lone.weights():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)  # AdamW magnifies rounding
        assert 0 < graphs() <= 24
        with torch._dynamo.config.patch(error_on_recompile=True):
            cluster.trained(policy)
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_as_written")
def test_a_mixture_that_replays_experts_goes_to_them_in_compiled_layers(tiny_mixture_dir: Path) -> None:
    def make(compiles: bool) -> tuple[Any, PackedLM]:
        model = load_causal_lm(str(tiny_mixture_dir), dtype=torch.float32, device=torch.device("cpu"), flag="model")
        install_router_replay(model, "actor.router_replay is trainer")
        return model, PackedLM(compiled(model) if compiles else model)

    def scored(model: Any, module: PackedLM, packed: PackedBatch) -> TokenScores:
        return scored_with_experts(model, packed, lambda part: scores_of(module, part))

    plain, fused = make(False), make(True)
    with torch.no_grad():
        wanted = scored(*plain, batch(1))
        assert torch.equal(scored(*fused, batch(1)).experts_NLK, wanted.experts_NLK)
    others = (wanted.experts_NLK + 1) % 4
    moved = evolve(batch(1), experts_NLK=others)
    assert_alike(fused[1], plain[1], moved)
    assert (likelihood(plain[1], moved)[0] - likelihood(plain[1], batch(1))[0]).abs().max() > 1e-3


def scores_of(module: PackedLM, packed: PackedBatch) -> TokenScores:
    logprobs_A, entropy_A = module(packed)
    return TokenScores(logprobs_N=scatter(logprobs_A, packed), entropy_N=scatter(entropy_A, packed))


@pytest.mark.usefixtures("compiled_as_it_is")
def test_the_engine_s_passes_compile_nothing(tiny_model_dir: Path) -> None:
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="model")
    compile_layers(model)
    before = graphs()
    decoder = decoder_of(model)
    decoder.cache.capacity = 2
    place = Place()
    decoder.cache.reserve(place, 8)
    with torch.no_grad():
        decoder.prefill([(5, 6, 7)], [[place]])
        decoder.step([8], [place], [3])
        decoder.extend([(9, 10)], [place], [4])
    assert graphs() == before


def test_a_machine_that_cannot_compile_is_told_what_to_install(tiny_model_dir: Path) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("No working C++ compiler found.")

    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="model")
    with compiler(broken), pytest.raises(ConfigurationError) as caught:
        compile_layers(model)
    assert "install a C++ compiler (g++, or the variable CXX), or leave --actor.compile out." in str(caught.value)
    assert "No working C++ compiler found" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_compiler_is_told_as_torch_tells_it(tiny_model_dir: Path) -> None:
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="model")
    with (
        compiler("inductor"),
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
        pytest.raises(ConfigurationError, match=r"machine \(No working C\+\+ compiler .*\): install a C\+\+"),
    ):
        compile_layers(model)


def test_a_variable_that_turns_compiling_off_is_told(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="model")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ConfigurationError, match=r"TORCHDYNAMO_DISABLE is 1, which turns torch.compile off: unset it"):
        compile_layers(model)


@pytest.mark.usefixtures("compiled_as_it_is")
@pytest.mark.parametrize("compiles", [False, True])
def test_a_run_s_trained_models_and_its_reference_are_compiled_and_its_engine_s_own_is_not(
    tiny_model_dir: Path, compiles: bool
) -> None:
    actor = ActorConfig(model_name_or_path=str(tiny_model_dir), dtype=DType.FLOAT32, compile=compiles)
    tokenizer = load_tokenizer(str(tiny_model_dir), flag="model")
    settings = OptimizerSettings(lr=1e-3)
    critic = make_critic(actor, CriticConfig(), tokenizer, settings, MasterOptimizer, seed=0)
    reward = make_trained_reward(ExampleModelConfig(**kept(actor)), 0, tokenizer, settings, MasterOptimizer)
    models = [make_trained_actor(actor, 0), make_reference_model(actor, RefConfig()), critic._module, reward._module]
    assert [is_compiled(model) for model in models] == [compiles] * 4
    assert not is_compiled(make_actor_model(actor))


def kept(actor: ActorConfig) -> dict[str, Any]:
    return {name: getattr(actor, name) for name in ("model_name_or_path", "dtype", "compile")}


def is_compiled(model: Any) -> bool:
    layers = [layer for stack in layer_stacks(model) for layer in stack]
    return bool(layers) and all(isinstance(layer.forward, compiling._CompiledForward) for layer in layers)


@pytest.mark.usefixtures("compiled_as_it_is")
def test_a_model_that_is_computed_padded_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="MiniMaxForCausalLM is computed with padding"):
        compile_layers(installed("minimax"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"actor.lora.rank": 4, "actor.lora.dropout": 0.1}, "lora.dropout"),
        ({"cluster.enable": True, "ds.zero_stage": 3}, "cut layers"),
        ({"cluster.enable": True, "ds.tensor_parallel_size": 2, "actor.num_gpus_per_node": 2}, "cut layers"),
    ],
)
def test_settings_that_leave_nothing_to_compile_are_refused(changes: dict[str, Any], problem: str) -> None:
    config = RLConfig()
    for name, value in {"actor.compile": True, **changes}.items():
        *sections, key = name.split(".")
        setattr(reduce(getattr, sections, config), key, value)
    [found] = [each for each in map(str, setting_errors(config)) if each.startswith("actor.compile is True")]
    assert problem in found
    assert found.endswith("or leave --actor.compile out.")
    config.cluster.strategy, config.actor.lora.dropout = Strategy.FSDP2, 0.0
    assert not any("actor.compile" in str(each) for each in setting_errors(config))

"""Adapters against W + alpha / rank * B A written out in float64, and against peft's own reading of what is saved."""

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import (
    SAVED_PREFIX,
    adapter_numbers,
    adapter_weights,
    add_lora,
    plain_weights,
    without_adapters,
)
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.adapters.models.torch.references import AdapterlessReference, TorchReference
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.sections.actor import ActorConfig, AdapterConfig, Checkpointing, DType, LoraConfig
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import CheckpointError, ConfigurationError, MissingExtraError
from rollgrad.entrypoints.composition.models import make_critic
from tests.adapted_models import branching_batch, learn, logprobs, plain
from tests.fakes import cluster
from tests.model_sweep import episodes
from tests.tiny_architectures import tiny_model as tiny_architecture
from tests.tiny_models import saved, tiny_model

FLAG = "--actor.model_name_or_path"
LORA = LoraConfig(rank=4, alpha=8)
SCALE = 2.0
"""Scale of `LORA`: alpha / rank."""

SETTINGS = OptimizerSettings(lr=1e-2, total_steps=10, max_norm=0.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"tie_word_embeddings": False},  # biases beside the adapters
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
}
"""GPT-2's matrices lie the other way round; a mixture's experts have no linear layers of their own."""


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(str(path), dtype=dtype, device=torch.device("cpu"), flag=FLAG)


@pytest.fixture
def make(tiny_model_dir: Path) -> Callable[..., TorchPolicy]:
    """Policies of the tiny model with adapters."""

    def policy(
        lora: LoraConfig = LORA,
        *,
        path: Path = tiny_model_dir,
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
        **settings: Any,
    ) -> TorchPolicy:
        model = load(path, dtype)
        add_lora(model, lora, seed=seed)
        return TorchPolicy(model, load_tokenizer(str(tiny_model_dir), flag=FLAG), SETTINGS, **settings)

    return policy


@pytest.fixture(params=FAMILIES)
def family_dir(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    return saved(
        tiny_model(request.param, tiny_tokenizer, **FAMILIES[request.param]), tiny_tokenizer, tmp_path / "base"
    )


@pytest.fixture
def batch() -> PackedBatch:
    return branching_batch()


def named(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def raw(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.module.named_parameters()}


def by_hand(policy: TorchPolicy, base: Any) -> dict[str, Tensor]:
    """Returns the weights that `base` becomes with the policy's adapters, in float64."""
    parts = raw(policy)
    merged = {name: p.detach().to(torch.float64, copy=True) for name, p in base.named_parameters()}
    for name in [name for name in parts if ".lora_A." in name]:
        product = parts[name.replace("lora_A", "lora_B")].double() @ parts[name].double()
        target = f"{name.partition('.lora_A.')[0]}.weight"
        merged[target] += SCALE * (product.T if type(base).__name__ == "GPT2LMHeadModel" else product)
    return merged


ATTENTION_AND_GATES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("name", "adapted"),
    [
        ("qwen2_moe", {*ATTENTION_AND_GATES, "shared_expert_gate"}),
        ("falcon_h1", {*ATTENTION_AND_GATES, "in_proj"}),
    ],
)
def test_layers_are_adapted_as_they_are_named(name: str, adapted: set[str]) -> None:
    """Peft would adapt the experts of a mixture in the place of its shared expert, and refuses the output projection of
    a scan."""
    model = tiny_architecture(name)
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    add_lora(model, LORA, seed=0)
    layers = {weight.name.rpartition(".lora_")[0] for weight in adapter_weights(model)}
    assert {layer.rpartition(".")[2] for layer in layers} == adapted
    found = {weight.name: weight for weight in plain_weights(model)}
    assert {name for name, weight in found.items() if weight.layer is not None} == {
        f"{layer.removeprefix(SAVED_PREFIX)}.weight" for layer in layers
    }
    assert all(torch.equal(found[key].value(lambda part: part), tensor) for key, tensor in before.items())
    with pytest.raises(ConfigurationError, match=r"target_modules has 'out_proj', but the linear layers"):
        add_lora(tiny_architecture("falcon_h1"), LoraConfig(rank=4, target_modules=("out_proj",)), seed=0)


@pytest.mark.parametrize("name", ["mamba", "jamba", "longcat_flash", "zamba", "llama4_text", "phimoe", "whisper"])
def test_every_adapter_takes_part_and_the_weights_take_it_in(name: str, tmp_path: Path) -> None:
    """Some layers have none: their weight is read alone or shared, or they return more than a product."""
    tiny_architecture(name).save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    model, merged = load(tmp_path), load(tmp_path)
    with torch.device("meta"):
        uncomputed = AutoModelForCausalLM.from_config(model.config)
    count = adapter_numbers(uncomputed, LORA)
    add_lora(model, LORA, seed=1)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in adapters) == count
    with torch.no_grad():
        for parameter in adapters:
            parameter += 0.1 * torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
        for weight in plain_weights(model):
            merged.get_parameter(weight.name).copy_(weight.value(lambda part: part))
    packed = episodes(42)
    found_A = PackedLM(model)(packed)[0]
    found_A.sum().backward()
    assert all(parameter.grad is not None for parameter in adapters)
    with torch.no_grad():
        torch.testing.assert_close(PackedLM(merged)(packed)[0], found_A, rtol=0, atol=1e-4)


def test_adapters_are_counted_before_there_are_any(family_dir: Path) -> None:
    model = load(family_dir)
    expected = adapter_numbers(model, LORA)
    add_lora(model, LORA, seed=1)
    assert expected == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("section", ["actor", "critic"])
def test_layers_that_are_not_there_are_told_of_the_model_that_has_them_set(section: str, tiny_model_dir: Path) -> None:
    lora = AdapterConfig(rank=2, target_modules=("nothing",))
    with pytest.raises(ConfigurationError, match=f"^{section}.lora.target_modules has .* change --{section}.lora"):
        model_shape(f"{section}.model_name_or_path", str(tiny_model_dir), lora)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_of_the_plain_model_with_the_adapters_added(
    make: Callable[..., TorchPolicy], family_dir: Path, batch: PackedBatch, dtype: torch.dtype
) -> None:
    policy = make(path=family_dir, dtype=dtype)
    learn(policy, batch)
    base = plain(family_dir, dtype).double()
    expected, found = by_hand(policy, base), named(policy)
    assert list(found) == list(expected)
    adapted = {f"{name.partition('.lora_A.')[0]}.weight" for name in raw(policy) if ".lora_A." in name}
    for name, weight in found.items():
        assert weight.dtype == dtype
        step = torch.finfo(dtype).eps * expected[name].abs()  # one rounding of the sum, and float32's of the product
        assert ((weight.double() - expected[name]).abs() <= 0.501 * step + 1e-6).all(), name
        assert torch.equal(weight, base.get_parameter(name).to(dtype)) != (name in adapted), name


def test_the_trainer_scores_what_the_plain_model_does_with_the_weights_that_leave(
    make: Callable[..., TorchPolicy], family_dir: Path, batch: PackedBatch
) -> None:
    policy = make(path=family_dir)
    learn(policy, batch)
    base = plain(family_dir, torch.float32)
    before = logprobs(base, batch)
    with torch.no_grad():
        for name, weight in by_hand(policy, base).items():
            base.get_parameter(name).copy_(weight)
    after = logprobs(base, batch)
    torch.testing.assert_close(policy.score(batch).logprobs_N, after, rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 0.1, "the adapters have learnt"


def test_a_gradient_is_that_of_the_two_matrices(
    make: Callable[..., TorchPolicy], tiny_model_dir: Path, batch: PackedBatch
) -> None:
    policy = make()
    learn(policy, batch, 2)  # before the first step B is 0, and with it the gradient of A
    base = plain(tiny_model_dir)
    matrices = {name: p.double().requires_grad_() for name, p in raw(policy).items() if ".lora_" in name}
    merged = dict(base.named_parameters())
    for name in [name for name in matrices if ".lora_A." in name]:
        target = f"{name.partition('.lora_A.')[0]}.weight"
        merged[target] = merged[target] + SCALE * matrices[name.replace("lora_A", "lora_B")] @ matrices[name]

    class Replaced:
        def __call__(self, tokens: Tensor) -> Any:
            return torch.func.functional_call(base, merged, (tokens,), tie_weights=True)

    loss = -(batch.filled("loss_weights_N") * logprobs(Replaced(), batch)).sum()
    norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, list(matrices.values()))]).norm()
    metrics = learn(policy, batch, 1)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_alone_are_trained_and_kept(
    make: Callable[..., TorchPolicy], tiny_model_dir: Path, batch: PackedBatch, dtype: torch.dtype
) -> None:
    policy = make(dtype=dtype, gradient_checkpointing=Checkpointing.FULL)
    before = raw(policy)
    learn(policy, batch, 2)
    for name, weight in raw(policy).items():
        assert torch.equal(weight, before[name]) != (".lora_" in name), name
        assert policy.module.get_parameter(name).requires_grad == (".lora_" in name)
    assert all(".lora_" in name for name in policy.state_dict()["masters"])
    assert not policy.module.training


def test_fresh_adapters_change_nothing(
    make: Callable[..., TorchPolicy], tiny_model_dir: Path, batch: PackedBatch
) -> None:
    policy, without = make(), TorchPolicy(load(tiny_model_dir), None, SETTINGS)
    assert torch.equal(policy.score(batch).logprobs_N, without.score(batch).logprobs_N)
    found, expected = named(policy), named(without)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_the_first_adapters_are_the_seeds(make: Callable[..., TorchPolicy]) -> None:
    state = torch.get_rng_state()
    one, same, other = raw(make()), raw(make()), raw(make(seed=2))
    assert torch.equal(torch.get_rng_state(), state), "whatever else draws is left alone"
    assert all(torch.equal(same[name], weight) for name, weight in one.items())
    assert not any(torch.equal(other[name], weight) for name, weight in one.items() if ".lora_A." in name)


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        (("self_attn.o_proj", "model.layers.1.mlp.up_proj"), {"o_proj", "up_proj"}),
    ],
)
def test_the_layers_that_are_named_get_adapters(
    make: Callable[..., TorchPolicy], names: tuple[str, ...], layers: set[str]
) -> None:
    adapted = [name for name in raw(make(LoraConfig(rank=2, target_modules=names))) if ".lora_A." in name]
    assert {name.split(".")[4] for name in adapted} == layers
    assert sum("layers.0" in name and "up_proj" in name for name in adapted) == 0


@pytest.mark.parametrize("name", ["qproj", "proj", "lm_head", "embed_tokens", "mlp", "input_layernorm"])
def test_what_can_have_no_adapter_is_refused(tiny_model_dir: Path, name: str) -> None:
    model = load(tiny_model_dir)
    with pytest.raises(ConfigurationError) as error:
        add_lora(model, LoraConfig(rank=2, target_modules=("q_proj", name)), seed=0)
    assert repr(name) in str(error.value)
    assert "are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj: change" in str(error.value)
    assert all(p.requires_grad for p in model.parameters())


def test_without_peft_the_extra_is_named(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install rollgrad\[lora\]"):
        add_lora(load(tiny_model_dir), LORA, seed=0)


def test_what_is_saved_is_the_model_and_the_adapters(
    make: Callable[..., TorchPolicy], family_dir: Path, batch: PackedBatch, tmp_path: Path
) -> None:
    from peft import PeftModel

    policy = make(path=family_dir)
    learn(policy, batch)
    policy.save(tmp_path / "out")
    expected = named(policy)
    merged = plain(tmp_path / "out", torch.float32)
    assert {name for name, _ in merged.named_parameters()} == expected.keys()
    assert all(torch.equal(merged.get_parameter(name), weight) for name, weight in expected.items())
    adapted = PeftModel.from_pretrained(plain(family_dir, torch.float32), tmp_path / "out" / "adapter")
    scores = policy.score(batch).logprobs_N
    for model in (merged, adapted):
        torch.testing.assert_close(logprobs(model, batch), scores, rtol=1e-4, atol=1e-4)
    unmerged = adapted.merge_and_unload()
    for name, weight in expected.items():
        torch.testing.assert_close(unmerged.get_parameter(name), weight, rtol=1e-5, atol=1e-6)


def test_adapters_of_rslora_count_by_the_root_of_their_rank(
    make: Callable[..., TorchPolicy], tiny_model_dir: Path, batch: PackedBatch, tmp_path: Path
) -> None:
    from peft import PeftModel

    policy, same = make(LoraConfig(rank=4, alpha=8, rslora=True)), make(LoraConfig(rank=4, alpha=16))
    learn(policy, batch)
    learn(same, batch)
    expected = named(same)
    assert all(torch.equal(weight, expected[name]) for name, weight in named(policy).items())
    policy.save(tmp_path)
    adapted = PeftModel.from_pretrained(plain(tiny_model_dir, torch.float32), tmp_path / "adapter")
    torch.testing.assert_close(logprobs(adapted, batch), same.score(batch).logprobs_N, rtol=1e-4, atol=1e-4)


def test_adapters_alone_are_no_model_to_start_from(make: Callable[..., TorchPolicy], tmp_path: Path) -> None:
    make().save(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds adapters .*merged, as rollgrad saves it one directory above"):
        load(tmp_path / "adapter")


def test_saving_goes_on_with_training(make: Callable[..., TorchPolicy], batch: PackedBatch, tmp_path: Path) -> None:
    """Neither saving nor reading weights merges anything into the model that is trained."""
    policy, undisturbed = make(), make()
    for _ in range(2):
        learn(policy, batch, 1)
        learn(undisturbed, batch, 1)
        policy.save(tmp_path)
        named(policy)
    expected = raw(undisturbed)
    assert all(torch.equal(weight, expected[name]) for name, weight in raw(policy).items())


@pytest.mark.parametrize(
    "lora",
    [LoraConfig(rank=8), LoraConfig(rank=4, target_modules=("q_proj",)), None],
    ids=["rank", "target_modules", "without"],
)
def test_a_state_of_other_weights_is_refused(
    make: Callable[..., TorchPolicy], tiny_model_dir: Path, batch: PackedBatch, lora: LoraConfig | None
) -> None:
    other = TorchPolicy(load(tiny_model_dir), None, SETTINGS) if lora is None else make(lora)
    learn(other, batch, 1)
    policy = make()
    before = raw(policy)
    with pytest.raises(CheckpointError, match=r"--actor\.lora\.rank"):
        policy.load_state_dict(copy.deepcopy(other.state_dict()))
    assert all(torch.equal(weight, before[name]) for name, weight in raw(policy).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_model_without_adapters(
    make: Callable[..., TorchPolicy], tiny_model_dir: Path, batch: PackedBatch, dtype: torch.dtype
) -> None:
    policy, unasked = make(dtype=dtype), make(dtype=dtype)
    reference = AdapterlessReference(policy)
    plain = TorchReference(load(tiny_model_dir, dtype))
    expected, likely = plain.score(batch), plain.predict(batch, 4)
    for _ in range(3):
        found = reference.score(batch)
        assert torch.equal(found.logprobs_N, expected.logprobs_N)
        assert torch.equal(found.entropy_N, expected.entropy_N)
        assert torch.equal(reference.predict(batch, 4).logprobs_AB, likely.logprobs_AB)
        learn(policy, batch, 1)
        learn(unasked, batch, 1)
    assert (policy.score(batch).logprobs_N - expected.logprobs_N).abs().max() > 0.1
    assert not torch.equal(policy.predict(batch, 4).logprobs_AB, likely.logprobs_AB)
    without = raw(unasked)
    assert all(torch.equal(weight, without[name]) for name, weight in raw(policy).items()), "training was not disturbed"
    trained = policy.score(batch).logprobs_N
    with suppress(KeyError), without_adapters(policy.module):
        raise KeyError
    assert torch.equal(policy.score(batch).logprobs_N, trained), "also where the reference fails"


def test_a_critic_with_adapters_trains_them_and_its_head_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    actor = ActorConfig(model_name_or_path=str(tiny_model_dir), dtype=DType.FLOAT32)
    config = CriticConfig(lora=AdapterConfig(rank=4, alpha=8))
    tokenizer = load_tokenizer(str(tiny_model_dir), flag=FLAG)

    def critic(config: CriticConfig) -> TorchValue:
        return make_critic(actor, config, tokenizer, SETTINGS, MasterOptimizer, seed=3)

    trained, batch = critic(config), cluster.batch()
    plain = {name: tensor.clone() for name, tensor in load(tiny_model_dir).named_parameters()}
    for _ in range(3):
        cluster.fitted(trained)
    names = trained.state_dict()["masters"]
    assert {name.partition(".")[0] for name in names if "lora" not in name} == {"value_head"}
    trained.save(tmp_path / "critic")
    config.model_name_or_path, config.lora = str(tmp_path / "critic"), AdapterConfig()
    merged = critic(config)
    torch.testing.assert_close(merged.values(batch), trained.values(batch), rtol=1e-4, atol=1e-5)
    assert float(merged.values(batch).abs().max()) > 0.01
    saved = load_file(tmp_path / "critic" / "model.safetensors")
    changed = {
        name for name, tensor in saved.items() if not torch.equal(tensor, plain.get(f"model.{name}", plain.get(name)))
    }
    assert changed
    assert all("proj" in name for name in changed)
    continued = critic(CriticConfig(lora=AdapterConfig(rank=4, alpha=8)))
    continued.load_state_dict(trained.state_dict())
    assert torch.equal(continued.values(batch), trained.values(batch))
    with pytest.raises(ConfigurationError, match=r"critic\.lora\.target_modules has 'nothing'.*--critic\.lora"):
        critic(CriticConfig(lora=AdapterConfig(rank=4, target_modules=("nothing",))))

"""QLoRA: weights in 4 bits against NF4 written out, and what is trained and leaves against plain models."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn

from rollgrad.adapters.models.torch.compiling import compile_layers
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.loading.quantised import is_quantised, quantised_numbers
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.references import AdapterlessReference, TorchReference
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.errors import CheckpointError, ConfigurationError, MissingExtraError
from tests.adapted_models import logprobs, plain
from tests.compiled_layers import AS_IT_IS, compiler, graphs
from tests.fakes import cluster, lora
from tests.tiny_models import saved, tiny_model

BLOCK = 64
"""Numbers that share a scale."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Dettmers et al. 2023, appendix E."""

SCALE_ERROR = 0.02
"""Largest error of a scale in 8 bits, as a share of the largest of them."""

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "Qwen2ForCausalLM": {"tie_word_embeddings": False},  # biases beside the adapters
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None},
}
"""GPT-2's matrices lie the other way round."""

CPU = torch.device("cpu")


@pytest.fixture(params=FAMILIES)
def family_dir(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    return saved(
        tiny_model(request.param, tiny_tokenizer, **FAMILIES[request.param]), tiny_tokenizer, tmp_path / "base"
    )


def load(path: Path, dtype: torch.dtype = torch.float32, *, load_in_4bit: bool = True) -> Any:
    return load_causal_lm(str(path), dtype=dtype, device=CPU, flag=cluster.FLAG, load_in_4bit=load_in_4bit)


def qlora(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> TorchPolicy:
    return lora.policy(str(path), dtype=dtype, lora=lora.QLORA, **options)


def raw(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.module.named_parameters()}


def linear_weights(model: Any) -> set[str]:
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D)
    return {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, kinds) and name != "lm_head"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_in_nf4_with_double_quantisation(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    base, policy = plain(tiny_model_dir, dtype), qlora(tiny_model_dir, dtype)
    codes = torch.tensor(NF4, dtype=torch.float64)
    found = cluster.weights(policy)
    for name in linear_weights(base):
        weight = base.get_parameter(name).detach().double().view(-1, BLOCK)
        values = found[name].double().view(-1, BLOCK)
        largest = weight.abs().amax(1)
        scales = values.abs().amax(1)
        assert ((scales - largest).abs() <= SCALE_ERROR * largest.max()).all()
        distances = (weight[..., None] / largest[:, None, None] - codes).abs()
        rounding = torch.finfo(dtype).eps
        nearest = codes[distances.argmin(-1)]
        tied = distances.topk(2, largest=False).values.diff(dim=-1)[..., 0] < rounding  # either code is nearest
        off = (values / scales[:, None] - nearest).abs() > 2 * rounding
        assert not (off & ~tied).any(), name


def test_the_same_files_give_the_same_weights(tiny_model_dir: Path) -> None:
    one, same = raw(qlora(tiny_model_dir)), raw(qlora(tiny_model_dir))
    assert all(torch.equal(same[name], weight) for name, weight in one.items())


def test_all_linear_layers_but_the_head_are_in_four_bits(family_dir: Path) -> None:
    base, model = plain(family_dir), load(family_dir)
    quantised = {name: p for name, p in model.named_parameters() if is_quantised(p)}
    assert quantised.keys() == linear_weights(base)
    assert sum(p.quant_state.shape.numel() for p in quantised.values()) == quantised_numbers(base)
    numbers = quantised_numbers(base)
    assert sum(p.nbytes for p in quantised.values()) == numbers / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_leave_are_the_dequantised_ones_with_the_adapters_added(
    family_dir: Path, dtype: torch.dtype
) -> None:
    policy = qlora(family_dir, dtype)
    base = plain(family_dir, dtype)
    quantised, start = linear_weights(base), cluster.weights(policy)
    cluster.trained(policy)
    parts, found = raw(policy), cluster.weights(policy)
    assert list(found) == list(start) == [name for name, _ in base.named_parameters()]
    for name, weight in found.items():
        before = base.get_parameter(name).detach()
        assert (weight.dtype, weight.shape) == (dtype, before.shape)
        if name not in quantised:
            assert torch.equal(weight, before), name
            continue
        assert not torch.equal(start[name], before)
        layer = name.removesuffix(".weight")
        a, b = (parts[f"{layer}.lora_{matrix}.default.weight"].double() for matrix in "AB")
        product = 2.0 * b @ a  # alpha / rank
        expected = start[name].double() + (product.T if type(base).__name__ == "GPT2LMHeadModel" else product)
        step = torch.finfo(dtype).eps * expected.abs()  # one rounding of the sum, and float32's of the product
        assert ((weight.double() - expected).abs() <= 0.501 * step + 1e-6).all(), name


FORMATS = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}
"""Largest difference of log-probs in each format."""
ALONE = ("Qwen2ForCausalLM", torch.float32), ("GPT2LMHeadModel", torch.bfloat16)
"""One format for families beside Llama, which has all of them."""


@pytest.mark.parametrize(
    ("family_dir", "dtype", "tolerance"),
    [
        pytest.param(
            *(family, dtype, tolerance),
            marks=() if "Llama" in family or (family, dtype) in ALONE else pytest.mark.wide,
        )
        for family in FAMILIES
        for dtype, tolerance in FORMATS.items()
    ],
    indirect=["family_dir"],
    ids=str,
)
def test_the_trainer_scores_what_a_plain_model_does_with_the_weights_that_leave(
    family_dir: Path, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """In 16 bits the trainer rounds every layer's output, and does not round the sum with the adapters."""
    policy, batch = qlora(family_dir, dtype), cluster.batch()
    losses = [cluster.trained(policy, 1)["loss"] for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    policy.save(tmp_path / "out")
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    model, found = plain(tmp_path / "out"), cluster.weights(policy)
    assert {name for name, _ in model.named_parameters()} == found.keys()
    assert all(torch.equal(model.get_parameter(name), weight.double()) for name, weight in found.items())
    scores = policy.score(batch).logprobs_N.double()
    torch.testing.assert_close(scores, logprobs(model, batch), rtol=0, atol=tolerance)
    assert (scores - logprobs(plain(family_dir), batch)).abs().max() > 0.5
    adapter = plain(tmp_path / "out" / "adapter")  # peft puts it beside the base as it was before it was quantised
    assert 2 * tolerance < (scores - logprobs(adapter, batch)).abs().max()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.wide)], ids=str
)
def test_adapters_alone_are_trained_and_kept(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    policy = qlora(tiny_model_dir, dtype, gradient_checkpointing=Checkpointing.FULL)
    before = raw(policy)
    cluster.trained(policy)
    for name, weight in raw(policy).items():
        assert torch.equal(weight, before[name]) != (".lora_" in name), name
        assert weight.dtype == (torch.uint8 if "base_layer" in name else dtype)
    state = copy.deepcopy(policy.state_dict())
    assert all(".lora_" in name for name in state["masters"])
    continued = qlora(tiny_model_dir, dtype)
    continued.load_state_dict(state)
    assert cluster.trained(continued, 1) == cluster.trained(policy, 1)
    expected = raw(policy)
    assert all(torch.equal(weight, expected[name]) for name, weight in raw(continued).items())


def test_layers_without_adapters_leave_dequantised_too(tiny_model_dir: Path) -> None:
    named = evolve(lora.QLORA, target_modules=("q_proj",))
    everywhere, policy = cluster.weights(qlora(tiny_model_dir)), lora.policy(str(tiny_model_dir), lora=named)
    assert sum(".lora_A." in name for name in raw(policy)) == 2
    assert all(torch.equal(everywhere[name], weight) for name, weight in policy.weights())


def test_muon_and_averages_are_the_adapters(tiny_model_dir: Path, tmp_path: Path) -> None:
    policy = qlora(tiny_model_dir, settings=cluster.MUON_SETTINGS)
    losses = [cluster.trained(policy, 1)["loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    policy.save(tmp_path)
    with policy._trained.averaged():
        expected = cluster.weights(policy)
    averaged = cluster.weights(cluster.policy(str(tmp_path / "ema")))
    assert all(torch.equal(averaged[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_quantised_model_without_adapters(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    policy, batch = qlora(tiny_model_dir, dtype), cluster.batch()
    fresh = policy.score(batch).logprobs_N
    assert torch.equal(TorchReference(load(tiny_model_dir, dtype)).score(batch).logprobs_N, fresh)
    cluster.trained(policy)
    assert torch.equal(AdapterlessReference(policy).score(batch).logprobs_N, fresh)
    assert (policy.score(batch).logprobs_N - fresh).abs().max() > 0.1


def test_a_cpu_that_multiplies_bfloat16_computes_with_the_same_weights(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There bitsandbytes would reorder weights, and round their scales, wherever no gradient is asked for."""
    expected = qlora(tiny_model_dir).score(cluster.batch()).logprobs_N
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    policy = qlora(tiny_model_dir)
    before = raw(policy)
    assert torch.equal(policy.score(cluster.batch()).logprobs_N, expected)
    assert all(torch.equal(weight, before[name]) for name, weight in raw(policy).items())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)], ids=str)
def test_a_gpu_computes_with_the_weights_that_leave(
    tiny_model_dir: Path, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """There bitsandbytes multiplies few tokens by 4-bit weights directly."""
    policy, batch = qlora(tiny_model_dir, dtype, device="cuda"), cluster.batch()
    cluster.trained(policy)
    policy.save(tmp_path)
    scores = policy.score(batch).logprobs_N.double()
    torch.testing.assert_close(scores, logprobs(plain(tmp_path), batch), rtol=0, atol=tolerance)


@pytest.mark.parametrize("package", ["bitsandbytes", "accelerate"])
def test_without_bitsandbytes_the_extra_is_named(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pip install rollgrad\[qlora\], or leave --actor\.lora\.load_in_4bit"):
        load(tiny_model_dir)


def test_experts_are_refused(tiny_mixture_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the experts of Qwen3MoeForCausalLM .*--actor\.model_name_or_path"):
        load(tiny_mixture_dir)


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_files_that_are_quantised_are_refused(tiny_model_dir: Path, tmp_path: Path, load_in_4bit: bool) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, quantization_config=settings, device_map={"": CPU})
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="weights are quantised already: name the model that they were made from"):
        load(tmp_path, load_in_4bit=load_in_4bit)


@pytest.mark.slow
@pytest.mark.wide
def test_compiled_layers_compute_with_four_bits_as_others_do(tiny_model_dir: Path) -> None:
    settings = evolve(lora.QLORA, dropout=0.0)
    policy, fused = (lora.policy(str(tiny_model_dir), lora=settings) for _ in range(2))
    expected = cluster.trained(policy)
    with compiler(AS_IT_IS):
        compile_layers(fused.module)
        assert cluster.trained(fused) == pytest.approx(expected, rel=1e-5)
        assert graphs() > 1
    for name, weight in fused.weights():
        torch.testing.assert_close(weight, cluster.weights(policy)[name], rtol=0, atol=1e-5)

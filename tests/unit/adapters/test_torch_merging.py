"""Merged adapters against W + alpha / rank * B A written out in float64, and against rollgrad's own saved model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.chat.pictures import load_processor
from rollgrad.adapters.models.torch.layers.classifier import classifier_class
from rollgrad.adapters.models.torch.layers.images import model_factory
from rollgrad.adapters.models.torch.loading import merging
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import adapter_weights, add_lora, save_adapter
from rollgrad.adapters.models.torch.loading.merging import merge_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.errors import CheckpointError, ConfigurationError
from rollgrad.entrypoints.cli.main import main
from tests.tiny_architectures import tiny_model as tiny_architecture
from tests.tiny_models import saved, tiny_model
from tests.tiny_vision import save_tiny_reward, save_tiny_vlm

FLAG = "--actor.model_name_or_path"
RANK, ALPHA = 4, 8
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None},
}
"""GPT-2's matrices lie the other way round."""


def peft_adapters(model: Any, path: Path, **settings: Any) -> dict[str, Tensor]:
    """Saves random adapters of `model` as peft does, and returns them."""
    import peft

    options = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", **settings}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, **options))
    torch.manual_seed(7)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    wrapped.save_pretrained(path)
    return {name: tensor.detach().clone() for name, tensor in wrapped.named_parameters() if "lora_" in name}


def read(path: Path, kind: str = "AutoModelForCausalLM") -> Any:
    import transformers

    return getattr(transformers, kind).from_pretrained(path, dtype="auto")


@pytest.fixture
def base(tiny_tokenizer: Any, tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """A saved model of a family, and its place."""

    def make(name: str = "LlamaForCausalLM", dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Path]:
        model = tiny_model(name, tiny_tokenizer, **{**FAMILIES.get(name, {}), **settings}).to(dtype)
        return model, saved(model, tiny_tokenizer, tmp_path / "base")

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("settings", "scale"), [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5)], ids=["plain", "rslora"]
)
def test_a_weight_and_its_adapter_are_added_up(
    base: Callable[..., tuple[Any, Path]], tmp_path: Path, family: str, settings: dict[str, Any], scale: float
) -> None:
    model, path = base(family)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapters = peft_adapters(model, tmp_path / "adapters", **settings)
    merged = merge_lora(str(tmp_path / "adapters"), tmp_path / "out", model=str(path))
    found = read(tmp_path / "out").state_dict()
    changed = set()
    for name, a in adapters.items():
        if ".lora_A." not in name:
            continue
        weight = name.removeprefix("base_model.model.").split(".lora_A.")[0] + ".weight"
        product = scale * adapters[name.replace(".lora_A.", ".lora_B.")].double() @ a.double()
        expected = plain[weight].double() + (product.T if family == "GPT2LMHeadModel" else product)
        torch.testing.assert_close(found[weight].double(), expected, rtol=0, atol=1e-6)
        changed.add(weight)
    assert merged.layers == len(changed) > 0
    assert all(torch.equal(found[name], plain[name]) for name in plain.keys() - changed)
    assert merged.difference < 1e-4


def test_adapters_of_rollgrad_give_the_model_that_it_saves(tiny_model_dir: Path, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=cpu, flag=FLAG)
    add_lora(model, LoraConfig(rank=RANK, alpha=ALPHA), seed=1)
    tokenizer = load_tokenizer(str(tiny_model_dir), flag=FLAG)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    policy = TorchPolicy(model, tokenizer, OptimizerSettings(lr=1e-2, total_steps=10, max_norm=0.0))
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    policy.save(tmp_path / "run")
    merged = merge_lora(str(tmp_path / "run" / "adapter"), tmp_path / "out")
    assert merged.base == str(tiny_model_dir)
    found, expected = (read(tmp_path / name).state_dict() for name in ("out", "run"))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
    assert load_tokenizer(str(tmp_path / "out"), flag=FLAG).chat_template == tokenizer.chat_template
    with pytest.raises(CheckpointError, match=r"holds no adapter_config.json: name .*run/adapter\."):
        merge_lora(str(tmp_path / "run"), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"no adapter_config.json: name the directory of adapters, such as RUN/"):
        merge_lora(str(tiny_model_dir), tmp_path / "other")


def test_weights_are_rounded_once_to_the_format_that_is_asked_for(
    base: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    model, path = base(dtype=torch.bfloat16)
    plain = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    adapters = peft_adapters(model, tmp_path / "adapters")
    merge_lora(str(tmp_path / "adapters"), tmp_path / "own", model=str(path))
    merge_lora(str(tmp_path / "adapters"), tmp_path / "float16", model=str(path), dtype=torch.float16)
    a, b = (adapters[f"base_model.model.model.layers.0.mlp.up_proj.lora_{which}.default.weight"] for which in "AB")
    exact = plain.float() + ALPHA / RANK * (b.float() @ a.float())
    assert torch.equal(read(tmp_path / "own").model.layers[0].mlp.up_proj.weight, exact.bfloat16())
    assert read(tmp_path / "float16").dtype == torch.float16


def test_a_model_in_four_bits_is_dequantised_first(
    base: Callable[..., tuple[Any, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As adapters are trained beside it: the merged weights are the dequantised ones with the adapters."""
    _, path = base()
    cpu = torch.device("cpu")
    model = load_causal_lm(str(path), dtype=torch.float32, device=cpu, flag=FLAG, load_in_4bit=True)
    add_lora(model, LoraConfig(rank=RANK, alpha=ALPHA, load_in_4bit=True), seed=1)
    policy = TorchPolicy(
        model, load_tokenizer(str(path), flag=FLAG), OptimizerSettings(lr=1e-2, total_steps=10, max_norm=0.0)
    )
    policy.save(tmp_path / "run")
    adapters = str(tmp_path / "run" / "adapter")
    merged = merge_lora(adapters, tmp_path / "out", load_in_4bit=True)
    assert merged.dequantised
    found, expected = (read(tmp_path / name).state_dict() for name in ("out", "run"))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)
    capsys.readouterr()
    assert main(["merge-lora", "--adapter", adapters, "--output", str(tmp_path / "whole")]) == 0
    assert "is not quite the one that was trained, which --load_in_4bit makes" in capsys.readouterr().err


def test_the_head_of_a_reward_model_comes_with_its_adapters(
    base: Callable[..., tuple[Any, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = base()
    torch.manual_seed(3)
    classifier = read(path, "AutoModelForSequenceClassification")
    assert classifier.config.num_labels == 2
    classifier.score = torch.nn.Linear(32, 1, bias=False)
    head = classifier.score.weight.detach().clone()
    adapters = str(tmp_path / "adapters")
    targets = ["q_proj", "v_proj"]
    peft_adapters(classifier, tmp_path / "adapters", task_type="SEQ_CLS", target_modules=targets)
    assert main(["merge-lora", "--adapter", adapters, "--output", str(tmp_path / "out"), "--model", str(path)]) == 0
    assert "; scores of " in capsys.readouterr().err
    assert torch.equal(read(tmp_path / "out", "AutoModelForSequenceClassification").score.weight, head)


# What is refused; nothing is written then.


def refuse(tmp_path: Path, match: str, adapter: str, **options: Any) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((CheckpointError, ConfigurationError), match=match):
        merge_lora(adapter, tmp_path / "out", **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_merged_model_that_differs_is_not_written(
    base: Callable[..., tuple[Any, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = base()
    peft_adapters(model, tmp_path / "adapters")
    monkeypatch.setattr(merging, "_merge", lambda wrapped: 0)  # adapters that are lost on the way
    refuse(tmp_path, "The merged model would differ", str(tmp_path / "adapters"), model=str(path))


def test_adapters_of_embeddings_that_are_the_head_too_are_refused(
    base: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    model, path = base()
    peft_adapters(model, tmp_path / "adapters", target_modules=["embed_tokens"])
    refuse(tmp_path, "shares between input and output", str(tmp_path / "adapters"), model=str(path))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    base: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    model, path = base(vocab_size=64)
    peft_adapters(model, tmp_path / "adapters")
    refuse(
        tmp_path, r"makes the token \d+ of a text, but .* has 64 tokens", str(tmp_path / "adapters"), model=str(path)
    )


def test_adapters_of_another_model_are_refused(
    base: Callable[..., tuple[Any, Path]], tiny_model_dir: Path, tmp_path: Path
) -> None:
    model, _ = base()
    peft_adapters(model, tmp_path / "adapters")
    refuse(tmp_path, "do not fit .*size mismatch", str(tmp_path / "adapters"), model=str(tiny_model_dir))
    lacking = tmp_path / "adapters" / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(lacking)
    save_file(dict(list(tensors.items())[1:]), lacking)
    refuse(tmp_path, "do not agree about", str(tmp_path / "adapters"), model=str(tmp_path / "base"))


def test_adapters_that_hold_no_numbers_are_refused(base: Callable[..., tuple[Any, Path]], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, path = base()
    peft_adapters(model, tmp_path / "adapters")
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    save_file({name: tensor * torch.nan for name, tensor in load_file(file).items()}, file)
    refuse(tmp_path, "cannot be merged: .*NaNs", str(tmp_path / "adapters"), model=str(path))


def test_nothing_is_overwritten(base: Callable[..., tuple[Any, Path]], tmp_path: Path) -> None:
    model, path = base()
    peft_adapters(model, tmp_path / "adapters")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    refuse(tmp_path, "nothing is overwritten", str(tmp_path / "adapters"), model=str(path))


def test_other_kinds_of_adapters_are_refused(base: Callable[..., tuple[Any, Path]], tmp_path: Path) -> None:
    import peft

    model, path = base()
    peft.get_peft_model(model, peft.IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapters")
    refuse(tmp_path, "only LoRA", str(tmp_path / "adapters"), model=str(path))
    refuse(tmp_path, "there is no such directory", "./nowhere", model=str(path))


def test_adapters_of_experts_are_merged(base: Callable[..., tuple[Any, Path]], tmp_path: Path) -> None:
    """Peft adapts the experts of a mixture as parameters, not as layers."""
    model, path = base("Qwen3MoeForCausalLM", dtype=torch.bfloat16)
    more = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
    made = peft_adapters(model, tmp_path / "adapters", **more)
    assert made
    found = merge_lora(str(tmp_path / "adapters"), tmp_path / "out", model=str(path))
    assert found.layers
    assert found.difference < 0.2


def test_the_command(base: Callable[..., tuple[Any, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = base()
    peft_adapters(model, tmp_path / "adapters")
    words = ["--adapter", str(tmp_path / "adapters"), "--model", str(path), "--output", str(tmp_path / "new" / "out")]
    capsys.readouterr()  # what DeepSpeed says when peft imports it
    assert main(["merge-lora", *words]) == 0
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'new' / 'out'}\n"
    assert "layers of" in output.err
    assert "4 bits" not in output.err
    assert main(["merge-lora"]) == 2
    assert [line.split(":")[1] for line in capsys.readouterr().err.splitlines()] == [
        " --adapter is not set",
        " --output is not set",
    ]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "policy") for family in ("qwen2_5_vl", "qwen3_vl", "idefics3", "qwen3_5")),
        ("qwen3_vl", "reward"),
        *(pytest.param(family, "reward", marks=pytest.mark.wide) for family in ("qwen2_5_vl", "idefics3")),
    ],
)
def test_models_that_see_images_are_merged(tmp_path: Path, family: str, kind: str) -> None:
    """Their adapters may be of the tower, too; the processor's files are written beside the weights."""
    base = save_tiny_vlm(family, tmp_path / "base")
    if kind == "reward":
        save_tiny_reward(base, tmp_path / "rewards")
        base = str(tmp_path / "rewards")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base)
    factory = classifier_class(config) if kind == "reward" else model_factory(config, images=True)
    model = factory.from_pretrained(base, dtype=torch.float32)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"task_type": "SEQ_CLS", "modules_to_save": []} if kind == "reward" else {}
    adapters = peft_adapters(model, tmp_path / "adapters", **options)
    merged = merge_lora(str(tmp_path / "adapters"), tmp_path / "out", model=base)
    assert merged.difference < 1e-4
    found = factory.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    changed = set()
    for name, a in adapters.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").split(".lora_A.")[0] + ".weight"
            product = ALPHA / RANK * adapters[name.replace(".lora_A.", ".lora_B.")] @ a
            torch.testing.assert_close(found[weight], plain[weight] + product, atol=1e-5, rtol=1e-5)
            changed.add(weight)
    assert any("vis" in name for name in changed)
    assert all(torch.equal(found[name], plain[name]) for name in plain.keys() - changed)
    assert load_processor(str(tmp_path / "out"), load_tokenizer(str(tmp_path / "out"), flag=FLAG), flag=FLAG)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_adapters_of_a_mixture_are_merged_into_the_layers_that_they_name(
    name: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """Peft would take those of a shared expert for adapters of all experts."""
    base = str(saved(tiny_architecture(name, vocab_size=len(tiny_tokenizer)), tiny_tokenizer, tmp_path / "base"))
    model = load_causal_lm(base, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    add_lora(model, LoraConfig(rank=RANK, alpha=ALPHA), seed=0)
    adapters = {weight.name: torch.randn_like(weight.parameter) / 10 for weight in adapter_weights(model)}
    save_adapter(model, adapters, tmp_path / "adapters")
    merged = merge_lora(str(tmp_path / "adapters"), tmp_path / "out", model=base)
    assert merged.difference < 1e-4
    assert merged.layers == len(adapters) / 2


def test_adapters_of_a_language_model_alone_are_merged_into_it(tmp_path: Path) -> None:
    """Qwen3.5, which is trained without its tower where there are no images."""
    base = save_tiny_vlm("qwen3_5", tmp_path / "base")
    model = load_causal_lm(base, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    adapters = peft_adapters(model, tmp_path / "adapters")
    merged = merge_lora(str(tmp_path / "adapters"), tmp_path / "out", model=base)
    assert merged.difference < 1e-4
    assert merged.layers == len(adapters) / 2

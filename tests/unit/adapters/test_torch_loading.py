"""Models load ready to use: packed, or padded where they cannot be packed, or they are refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.models.torch.heads.logits import LogitForm, logit_form
from rollgrad.adapters.models.torch.layers.attention import ATTENTION, attention_forward, install_attention
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.compatibility import usable_positions
from rollgrad.adapters.models.torch.loading.loading import (
    load_causal_lm,
    load_critic,
    load_tokenizer,
    loaded_from,
    resolve_dtype,
)
from rollgrad.domain.errors import CheckpointError, ConfigurationError
from tests.tiny_architectures import tiny_model

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CPU = torch.device("cpu")
FLAG = "--actor.model_name_or_path"


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(str(path), dtype=dtype, device=CPU, flag=FLAG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_loads_in_eval_mode_with_packed_attention(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    model = load(tiny_model_dir, dtype)
    assert not model.training
    assert model.config._attn_implementation == ATTENTION
    assert next(model.parameters()).dtype == dtype


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "afmoe", "laguna"])
def test_what_a_model_freezes_is_not_trained(model_type: str, tmp_path: Path) -> None:
    """Corrections of experts' scores, which get no gradient: a run that trained them would be refused."""
    made = tiny_model(model_type)
    made.save_pretrained(tmp_path)
    frozen = {name for name, parameter in made.named_parameters() if not parameter.requires_grad}
    assert frozen
    found = dict(load(tmp_path).named_parameters())
    assert {name for name, parameter in found.items() if not parameter.requires_grad} == frozen
    assert all(torch.equal(found[name], made.get_parameter(name)) for name in frozen)


def test_threads_load_one_after_another(tiny_model_dir: Path) -> None:
    """Engines that are replaced while a server loads a newer model; transformers would never tie weights again."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    ties, loading, most = PreTrainedModel.tie_weights, [0], [0]

    class Slow:
        @staticmethod
        def from_pretrained(path: str) -> Any:
            loading[0] += 1
            most[0] = max(most[0], loading[0])
            model = AutoModelForCausalLM.from_pretrained(path)
            loading[0] -= 1
            return model

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: loaded_from(Slow, str(tiny_model_dir), "model"), range(8)))
    assert most == [1]
    assert PreTrainedModel.tie_weights is ties


def test_the_tokenizer_is_the_models(tiny_model_dir: Path, tiny_tokenizer: Any) -> None:
    assert load_tokenizer(str(tiny_model_dir), flag=FLAG).get_vocab() == tiny_tokenizer.get_vocab()


@pytest.mark.parametrize("loader", [load_tokenizer, lambda name, flag: load(Path(name))])
def test_a_missing_directory_is_named_with_its_flag(loader: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--actor\.model_name_or_path is .*no such directory"):
        loader(str(tmp_path / "nothing"), flag=FLAG)


def test_the_directory_of_a_run_is_answered_with_that_of_its_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"which has no config\.json; name the directory of a model\.$"):
        load_tokenizer(str(tmp_path), flag=FLAG)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"; did you mean {tmp_path / 'model'}\?$"):
        load_tokenizer(str(tmp_path), flag=FLAG)


def test_a_directory_without_weights_is_one_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"cannot be loaded .*\. Bring a whole copy there, or name") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_cut_short_are_one_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    for file in tiny_model_dir.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(tmp_path)


def bloom_alibi() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=2))


def lightning_attention() -> Any:
    return tiny_model("minimax")


def gpt2_learned_positions() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (bloom_alibi, "attention interface"),
        (lightning_attention, "linear_attention"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_packing_would_change_is_padded(
    family: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    family().save_pretrained(tmp_path)
    assert is_padded(load(tmp_path))
    told = capsys.readouterr()
    assert message in told.out + told.err


@pytest.mark.parametrize("flag", ["--critic.model_name_or_path", "--ref.model_name_or_path", "--model"])
def test_a_refusal_names_the_setting_that_named_the_model(flag: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tiny_model("roberta").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        load_causal_lm(str(tmp_path), dtype=torch.float32, device=CPU, flag=flag)
    assert str(caught.value).startswith(f"{flag} is ")
    assert FLAG not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_of_another_model_s_shapes_are_named_as_such(tmp_path: Path) -> None:
    """transformers names an argument that nobody has set."""
    tiny_model("llama").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "intermediate_size": settings["intermediate_size"] + 2}))
    with pytest.raises(CheckpointError, match="the files have weights of other shapes than its"):
        load(tmp_path)


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
def test_weights_that_would_be_random_are_refused(left_out: str, tmp_path: Path) -> None:
    lacking(tmp_path, left_out)
    with pytest.raises(CheckpointError, match=f"lack weights.*{left_out}"):
        load(tmp_path)


def test_a_critic_needs_no_output_embedding_but_all_layers(tmp_path: Path) -> None:
    lacking(tmp_path / "headless", "lm_head.weight")
    lacking(tmp_path / "lacking", "model.layers.0.mlp.up_proj.weight")
    flag = "--critic.model_name_or_path"
    _, head = load_critic(str(tmp_path / "headless"), dtype=torch.float32, device=CPU, flag=flag)
    assert head == {}
    with pytest.raises(CheckpointError, match="up_proj"):
        load_critic(str(tmp_path / "lacking"), dtype=torch.float32, device=CPU, flag=flag)


@pytest.mark.parametrize("tied", [False, True], ids=["no output embedding", "that of its inputs"])
def test_a_reward_model_is_no_policy_but_a_critic(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    settings = LlamaConfig(**SIZES, num_labels=1, tie_word_embeddings=tied)
    LlamaForSequenceClassification(settings).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="a LlamaForSequenceClassification, which judges texts and writes none"):
        load(tmp_path)
    _, head = load_critic(str(tmp_path), dtype=torch.float32, device=CPU, flag="--critic.model_name_or_path")
    assert head["weight"].shape == (1, SIZES["hidden_size"])


def lacking(path: Path, name: str) -> None:
    """Saves a Llama without the weight `name`."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    del weights[name]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"not finite in float32: its weights are broken.*--actor\.model"):
        load(tmp_path)


def test_weights_of_another_shape_are_one_sentence(tmp_path: Path) -> None:
    import json

    lacking(tmp_path, "lm_head.weight")
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(settings | {"intermediate_size": 48}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "settings", "form"),
    [
        ("Llama", {}, LogitForm()),
        ("Granite", {"logits_scaling": 8.0}, LogitForm(scale=0.125)),
        ("Cohere", {"logit_scale": 0.0625}, LogitForm(scale=0.0625)),
        ("Gemma3Text", {"final_logit_softcapping": 30.0, "head_dim": 16}, LogitForm(cap=30.0)),
        ("NanoChat", {"final_logit_softcapping": 15.0}, LogitForm(cap=15.0)),
    ],
)
def test_the_form_of_logits_is_measured(family: str, settings: Any, form: LogitForm, dtype: torch.dtype) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert logit_form(model) == form
    assert "forward" not in vars(model.model), "the model is left as it was"


def test_the_limits_of_a_model_are_what_they_were(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=40)).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.config.sliding_window == 40
    assert {part.config.sliding_window for part in model.modules() if hasattr(part, "config")} == {40}


def test_longrope_ends_where_its_angles_change() -> None:
    from transformers import Phi3Config

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    limit = {"original_max_position_embeddings": 24}
    config = Phi3Config(**SIZES, **limit, rope_parameters=rope | limit)
    assert usable_positions(config) == 24
    assert usable_positions(Phi3Config(**SIZES)) == 64


def test_learned_positions_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gpt2_learned_positions().save_pretrained(tmp_path)
    assert load(tmp_path).config._attn_implementation == ATTENTION


def test_layers_of_an_unknown_type_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.config.layer_types = ["block_attention", "full_attention"]
    with pytest.raises(ConfigurationError, match="block_attention"):
        install_attention(model)


@pytest.mark.parametrize(
    "keyword",
    [{"position_bias": torch.zeros(1)}, {"is_causal": False}, {"softcap": 30.0, "s_aux": torch.zeros(2)}],
)
def test_a_keyword_that_changes_the_result_is_refused(keyword: dict[str, Any]) -> None:
    module = torch.nn.Module()
    with pytest.raises(ConfigurationError, match=" and ".join(keyword)):
        attention_forward(module, *[torch.zeros(1, 2, 3, 4)] * 3, None, attention_plan=None, **keyword)  # type: ignore[arg-type]


def test_auto_is_a_format_the_processor_multiplies() -> None:
    native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16

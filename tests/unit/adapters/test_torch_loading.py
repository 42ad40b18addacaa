"""Models that packed training cannot compute are refused; the others load ready to use."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.torch.attention import ATTENTION, attention_forward, install_attention
from rollgrad.adapters.torch.loading import load_causal_lm, load_tokenizer, resolve_dtype
from rollgrad.domain.errors import CheckpointError, ConfigurationError

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


def test_the_tokenizer_is_the_models(tiny_model_dir: Path, tiny_tokenizer: Any) -> None:
    assert load_tokenizer(str(tiny_model_dir), flag=FLAG).get_vocab() == tiny_tokenizer.get_vocab()


@pytest.mark.parametrize("loader", [load_tokenizer, lambda name, flag: load(Path(name))])
def test_a_missing_directory_is_named_with_its_flag(loader: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--actor\.model_name_or_path is .*no such directory"):
        loader(str(tmp_path / "nothing"), flag=FLAG)


def test_a_directory_without_weights_is_one_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="cannot be loaded") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_cut_short_are_one_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    for file in tiny_model_dir.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(tmp_path)


def gemma2_softcap() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=50.0))


def gpt_oss_sinks() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1))


def bloom_alibi() -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=2))


def granite_scaled_logits() -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))


def cohere_scaled_logits() -> Any:
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625))


def mamba_recurrence() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2))


def qwen3_next_linear_attention() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **SIZES,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return Qwen3NextForCausalLM(config)


def gpt2_learned_positions() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (gemma2_softcap, "softcap"),
        (gpt_oss_sinks, "s_aux"),
        (bloom_alibi, "attention interface"),
        (granite_scaled_logits, "logits differ"),
        (cohere_scaled_logits, "logits differ"),
        (mamba_recurrence, "packed"),
        (qwen3_next_linear_attention, "linear_attention"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_packing_would_change_is_refused(family: Any, message: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    family().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(tmp_path)
    assert FLAG in str(caught.value)


def test_learned_positions_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gpt2_learned_positions().save_pretrained(tmp_path)
    assert load(tmp_path).config._attn_implementation == ATTENTION


def test_chunked_attention_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ConfigurationError, match="chunked_attention"):
        install_attention(model)


@pytest.mark.parametrize(
    "keyword", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"position_bias": torch.zeros(1)}, {"is_causal": False}]
)
def test_a_keyword_that_changes_the_result_is_refused(keyword: dict[str, Any]) -> None:
    module = torch.nn.Module()
    with pytest.raises(ConfigurationError, match=next(iter(keyword))):
        attention_forward(module, *[torch.zeros(1, 2, 3, 4)] * 3, None, attention_plan=None, **keyword)  # type: ignore[arg-type]


def test_auto_is_a_format_the_processor_multiplies() -> None:
    native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if native else torch.float32)
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16

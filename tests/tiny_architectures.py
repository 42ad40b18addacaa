"""Tiny models with random weights of every causal language model type that transformers knows."""

from typing import Any

import torch

VOCABULARY = 101

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "codebook_size", "audio_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_dim", "lru_width", "attention_hidden_size", "backbone_hidden_size"), 32),
    **dict.fromkeys(("hidden_size_global", "input_size", "dim_model_base", "output_embedding_size"), 32),
    **dict.fromkeys(("input_embedding_size", "mamba_d_ssm", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dff", "dim_ff", "ffn_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size_mlp", "expert_ffn_hidden_size", "feed_forward_size", "d_inner"), 32),
    **dict.fromkeys(("dense_intermediate_size", "moe_shared_expert_intermediate_size", "mlp_dim"), 32),
    **dict.fromkeys(("n_layer", "num_layers", "n_layers", "num_hidden_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers", "depth", "num_blocks"), 2),
    **dict.fromkeys(("num_layers_per_stack", "num_global_layers", "conf_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads", "conf_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads", "swa_num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "d_head", "dim_head", "linear_head_dim"), 8),
    **dict.fromkeys(("attention_head_size", "rotary_dim", "global_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "model_max_length"), 128),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "local_attention"), 12),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups", "mamba_n_groups", "o_groups"), 1),
    **dict.fromkeys(("mamba_ngroups", "num_nextn_predict_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 12),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_conv", "conv_L_cache"), 4),
    **dict.fromkeys(("mamba_d_head",), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "index_n_heads"), 4),
    **dict.fromkeys(("index_topk", "mamba_chunk_size", "chunk_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("altup_num_inputs", "laurel_rank", "time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("query_pre_attn_scalar",), 8),
    **dict.fromkeys(("zero_expert_num", "hc_mult", "hc_count"), 2),
    **dict.fromkeys(("gated_norm_rank", "hc_lowrank", "ple_embed_dim", "router_hidden_size", "adapter_rank"), 8),
    "attention_chunk_size": 12,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "image_size": 28,
    "patch_size": 14,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
    "is_decoder": True,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
"""Settings of configurations; each type gets those it has."""

SPECIAL_TOKENS = (
    "image_token_id video_token_id audio_token_id image_token_index vision_start_token_id vision_end_token_id "
    "boi_token_id eoi_token_id boa_token_id eoa_token_id boi_token_index eoi_token_index eoa_token_index sep_token_id "
    "cls_token_id eod_token_id mask_token_id begin_of_image_token_id"
)
SIZES |= {name: 80 + index for index, name in enumerate(SPECIAL_TOKENS.split())}

OWN: dict[str, dict[str, Any]] = {
    "blt": {
        "patcher_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 32,
        },
        "encoder_hash_byte_group_vocab": 50,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 12},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    **{key: {"unpadded_vocab_size": VOCABULARY} for key in ("inkling2_text", "inkling2_loop_text")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **{key: {"layer_types": ["conv", "full_attention"]} for key in ("lfm2", "lfm2_moe")},
    "llama4_text": {"no_rope_layers": [1, 0], "floor_scale": 12},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "phi4_multimodal": {"audio_config": {"hidden_size": 32, "num_blocks": 1, "ext_pw_out_channel": 32}},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
    },
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 50, "shape_embed_dim": 8},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "num_key_value_heads": 4,
        "chunk_size": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}
OWN["qwen4_exp"] = OWN["qwen4_exp_text"] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
"""Settings that only one type needs."""


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The configuration of a tiny model of `model_type` (a name of transformers' `CONFIG_MAPPING`); `changes` are
    arguments of its class, which come before all others."""
    from transformers import CONFIG_MAPPING

    family = CONFIG_MAPPING[model_type]
    return family(**_settings(family) | changes)


def _settings(family: Any) -> dict[str, Any]:
    """Arguments of the tiny configuration of a class of configurations: two layers, or one of each kind."""
    from transformers import AutoConfig

    if getattr(family, "has_no_defaults_at_init", False):  # since transformers 5.20 each class has defaults
        names: Any = family.__dataclass_fields__
        parts = {}
    else:
        default = family()
        names = default.to_dict()
        parts = {name: getattr(default, name, None) for name in family.sub_configs or {}}
    made = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    kinds = list(dict.fromkeys(names.get("layer_types") or ()))
    if len(kinds) > 1:
        made |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    for name, part in parts.items():
        if part is not None:
            made[name] = _settings(type(part))
            if family.sub_configs[name] is AutoConfig:
                made[name]["model_type"] = part.model_type
    return made | OWN.get(family.model_type, {})


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A model of `tiny_config` in eval mode. All parameters are random, those too that start as ones or zeros: norms,
    biases and corrections of routers."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()
    biases = [buffer for name, buffer in model.named_buffers() if "bias" in name and buffer.is_floating_point()]
    with torch.no_grad():
        for tensor in [*model.parameters(), *biases]:
            tensor += 0.1 * torch.randn_like(tensor)
    return model

"""More families of tiny random models that see images (`tests/tiny_vision.py`)."""

from typing import Any

from tests.tiny_vision import _processor, _qwen_tokens, _qwen_tower, _text, _tokenizer, _width

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
GLM_MARKS = {
    "image": "<|image|>",
    "video": "<|video|>",
    "image_start": "<|begin_of_image|>",
    "image_end": "<|end_of_image|>",
    "video_start": "<|begin_of_video|>",
    "video_end": "<|end_of_video|>",
}


def _qwen(kind: str, processor: str, text: dict[str, Any], tower: dict[str, Any]) -> tuple[Any, Any]:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer("".join(QWEN_MARKS[:3]), *QWEN_MARKS)
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=2048)
    config = getattr(transformers, f"{kind}Config")(
        text_config=_text(tokenizer, **text),
        vision_config=tower,
        **_qwen_tokens(tokenizer),
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model, _processor(getattr(transformers, processor), images, tokenizer)


def qwen2_vl() -> tuple[Any, Any]:
    """A Qwen2-VL."""
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": _width(), "num_heads": 2, "mlp_ratio": 2, "patch_size": 8}
    return _qwen("Qwen2VL", "Qwen2VLProcessor", {"rope_parameters": ROPE}, tower)


def qwen3_vl_moe() -> tuple[Any, Any]:
    """A Qwen3-VL whose layers have experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    tower = _qwen_tower(num_position_embeddings=64, deepstack_visual_indexes=[0])
    rope = {"rope_parameters": {**ROPE, "mrope_interleaved": True}}
    text = {"head_dim": 8, "norm_topk_prob": True}  # which vLLM reads, and published files have
    return _qwen("Qwen3VLMoe", "Qwen3VLProcessor", {**text, **experts, **rope}, tower)


def glm4v() -> tuple[Any, Any]:
    """A GLM-4.1V, with positions of three numbers."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration, Glm4vProcessor
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    tokenizer = _tokenizer("<|begin_of_image|><|image|><|end_of_image|>", *GLM_MARKS.values())
    images = Glm4vImageProcessorPil(patch_size=8, merge_size=2, size={"shortest_edge": 256, "longest_edge": 4096})
    config = Glm4vConfig(
        text_config=_text(
            tokenizer,
            attention_bias=True,  # which vLLM reads, and published files have
            rope_parameters={**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        ),
        vision_config=_qwen_tower(image_size=64),
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in GLM_MARKS.items()},
        tie_word_embeddings=False,
    )
    return Glm4vForConditionalGeneration(config), _processor(Glm4vProcessor, images, tokenizer)


def _llavas(kind: Any, images: Any, tokenizer: Any) -> Any:
    """Returns a processor of class `kind`, for towers in patches of 8 pixels that begin with the state of a class."""
    return kind(
        images,
        tokenizer,
        chat_template=tokenizer.chat_template,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def llava() -> tuple[Any, Any]:
    """A LLaVA 1.5, which takes features of the tower's last layer but one, without those of the first token."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _tokenizer("<image>", "<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    config = LlavaConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    return LlavaForConditionalGeneration(config), _llavas(LlavaProcessor, images, tokenizer)


def llava_next() -> tuple[Any, Any]:
    """A LLaVA-NeXT: tiles in a grid, and the whole image."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration, LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokenizer = _tokenizer("<image>", "<image>")
    grid, crop = [[32, 64], [64, 32], [64, 64]], {"height": 32, "width": 32}
    images = LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=crop, image_grid_pinpoints=grid)
    config = LlavaNextConfig(
        text_config={"model_type": "mistral", **_text(tokenizer)},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
        image_grid_pinpoints=grid,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    return LlavaNextForConditionalGeneration(config), _llavas(LlavaNextProcessor, images, tokenizer)


def mistral3() -> tuple[Any, Any]:
    """A Mistral 3.1 with Pixtral's tower, whose processor needs torchvision: images keep their shape, and lines of them
    end with a token."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralProcessor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    tokenizer = _tokenizer("[IMG]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    images = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size={"height": 8, "width": 8})
    config = Mistral3Config(
        text_config={"model_type": "mistral", **_text(tokenizer, head_dim=8, sliding_window=None)},
        vision_config={"model_type": "pixtral", **TOWER, "image_size": 64},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config), PixtralProcessor(
        images, tokenizer, chat_template=tokenizer.chat_template, patch_size=8, spatial_merge_size=2
    )

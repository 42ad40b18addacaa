"""TemplateCodec: special tokens, missing and refusing templates."""

import copy
from typing import Any

import pytest

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.errors import ConfigurationError, DataError


def test_special_tokens_of_the_template_are_single_tokens_and_none_is_added(tiny_tokenizer: Any) -> None:
    rendered = TemplateCodec(tiny_tokenizer).render([{"role": "user", "content": "What is 3 plus 4?"}])
    assert rendered.text == "<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n<|im_start|>assistant\n"
    starts = [i for i in rendered.token_ids if i == tiny_tokenizer.convert_tokens_to_ids("<|im_start|>")]
    assert len(starts) == 2


def test_fields_that_are_none_do_not_reach_the_template(tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.name is defined %}{{ m.name }}:{% endif %}{{ m.content }}{% endfor %}"
    )
    assert TemplateCodec(tokenizer).render([{"role": "user", "content": "hi", "name": None}]).text == "hi"


def test_decode_leaves_out_special_tokens_and_keeps_spaces(tiny_tokenizer: Any) -> None:
    codec = TemplateCodec(tiny_tokenizer)
    ids = codec.encode(" The answer , is 7 .<|im_end|>")
    assert ids[-1] == tiny_tokenizer.eos_token_id
    assert codec.decode(ids) == " The answer , is 7 ."


def test_encode_prompt_adds_what_the_tokenizer_adds_and_encode_does_not(tiny_tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny_tokenizer)
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    codec = TemplateCodec(tokenizer)
    assert codec.encode_prompt("7") == (bos, *codec.encode("7"))


def test_no_chat_template_is_a_configuration_error(tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    codec = TemplateCodec(tokenizer)
    with pytest.raises(ConfigurationError, match=r"--data.apply_chat_template False .*--data.input_template"):
        codec.render([{"role": "user", "content": "hi"}])
    assert codec.encode_prompt("hi")


def test_a_template_that_refuses_is_a_data_error(tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(DataError, match="System role not supported"):
        TemplateCodec(tokenizer).render([{"role": "system", "content": "x"}])

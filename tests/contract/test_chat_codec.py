"""What every chat codec promises."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.ports.chat_codec import ChatCodec
from tests.fakes.chat_codec import FakeChatCodec

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4? häß 漢"}]


@pytest.fixture(params=["fake", "template"])
def codec(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> ChatCodec:
    return FakeChatCodec() if request.param == "fake" else TemplateCodec(tiny_tokenizer)


def test_render_is_pure_and_its_tokens_are_those_of_its_text(codec: ChatCodec) -> None:
    assert isinstance(codec, ChatCodec)
    rendered = codec.render(MESSAGES)
    assert rendered == codec.render(MESSAGES)
    assert rendered.token_ids == codec.encode(rendered.text)
    assert all(message["content"] in rendered.text for message in MESSAGES)
    assert "assistant" in rendered.text.splitlines()[-1]


@given(text=st.text(alphabet="aZ7é漢🙂 \n\t.<|>", max_size=40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_plain_text_survives(codec: ChatCodec, text: str) -> None:
    assert codec.decode(codec.encode(text)) == text

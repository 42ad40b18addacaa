"""TrainingText: which tokens of a conversation are trained, with the chat templates of real model families."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.chat.training_text import Anomaly, TokenBranch, TrainingText, TrainingTokens, shared_prompt
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import DataError
from tests.fakes.chat_templates import TEMPLATES, tokenizer_with

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def reply(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


CHAT = [
    user("What is 3 plus 4?"),
    reply("seven", reasoning_content="one thought"),
    user("And 5?"),
    reply("five", reasoning_content="two thoughts"),
]
CALLS = [
    user("Ask."),
    reply("", tool_calls=[CALL]),
    {"role": "tool", "tool_call_id": "abcdefgh1", "name": "f", "content": "res"},
    reply("done"),
]


def weights(messages: Sequence[Message]) -> list[float]:
    return [float(message["role"] == "assistant") for message in messages]


def shown(codec: TemplateCodec, branch: TokenBranch) -> str:
    """The text of a branch, its trained tokens between brackets."""
    text, inside = "", False
    for token, weight in zip(branch.token_ids, branch.weights, strict=True):
        if (weight > 0) != inside:
            inside = weight > 0
            text += "⟦" if inside else "⟧"
        text += codec.decode([token], special_tokens=True)
    return text + "⟧" * inside


def trained_texts(codec: TemplateCodec, tokens: TrainingTokens) -> list[str]:
    """The stretches that are trained, over all branches."""
    return [codec.decode(span, special_tokens=True) for branch in tokens.branches for span in spans(branch)]


def spans(branch: TokenBranch) -> list[list[int]]:
    """The tokens of each trained stretch."""
    found: list[list[int]] = []
    for place, weight in enumerate(branch.weights):
        if weight > 0 and branch.weights[place - 1] == 0:
            found.append([])
        if weight > 0:
            found[-1].append(branch.token_ids[place])
    return found


def codec_of(family: str, tiny_tokenizer: Any) -> TemplateCodec:
    """The codec of a family, made once: copying a tokenizer takes longer than most tests."""
    if family not in _codecs:
        _codecs[family] = TemplateCodec(tokenizer_with(family, tiny_tokenizer))
    return _codecs[family]


_codecs: dict[str, TemplateCodec] = {}


# Written down by hand from the families' templates: of each family what is trained of CHAT and of CALLS, and how many
# branches it takes.
GOLDEN: Mapping[str, tuple[list[str], int, list[str], int]] = {
    "smollm2": (
        ["seven<|im_end|>", "five<|im_end|>"],
        1,
        ['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>', "done<|im_end|>"],
        1,
    ),
    "qwen3": (
        ["<think>\none thought\n</think>\n\nseven<|im_end|>", "<think>\ntwo thoughts\n</think>\n\nfive<|im_end|>"],
        2,
        [
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\ndone<|im_end|>",
        ],
        2,
    ),
    "qwen3_5_think": (
        ["one thought\n</think>\n\nseven<|im_end|>", "two thoughts\n</think>\n\nfive<|im_end|>"],
        2,
        [
            "\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
            "<|im_end|>",
            "\n</think>\n\ndone<|im_end|>",
        ],
        1,
    ),
    "llama3_1": (
        ["seven<|eot_id|>", "five<|eot_id|>"],
        1,
        ['{"name": "f", "parameters": {"a": 1}}<|eot_id|>', "done<|eot_id|>"],
        1,
    ),
    "gemma3": (
        ["seven<end_of_turn>", "five<end_of_turn>"],
        1,
        ['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><end_of_turn>', "done<end_of_turn>"],
        1,
    ),
    "gptoss": (
        ["<|channel|>final<|message|>seven<|return|>", "<|channel|>final<|message|>five<|return|>"],
        2,
        [
            ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            "<|channel|>final<|message|>done<|return|>",
        ],
        1,
    ),
    # These two end a turn with no token of its own: the model samples the one that begins the next turn.
    "glm4moe": (
        ["\n<think>one thought</think>\nseven<|user|>", "\n<think>two thoughts</think>\nfive<|user|>"],
        2,
        [
            "\n<think></think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
            "<|observation|>",
            "\n<think></think>\ndone<|user|>",
        ],
        1,
    ),
    "gemma4": (
        ["seven<turn|>", "five<turn|>"],
        1,
        ["<|tool_call>call:f{a:1}<tool_call|><|tool_response>", "done<turn|>"],
        1,
    ),
    # Phi-3 writes its eos only at the end of a conversation; no model samples it behind <|end|>.
    "phi3": (
        ["seven<|end|>", "five<|end|>"],
        1,
        ['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|end|>', "done<|end|>"],
        1,
    ),
    "deepseekv3": (
        ["seven<｜end▁of▁sentence｜>", "five<｜end▁of▁sentence｜>"],
        1,
        [
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><｜end▁of▁sentence｜>',
            "done<｜end▁of▁sentence｜>",
        ],
        1,
    ),
    "cohere2": (
        ["seven<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "five<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
        1,
        [
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|END_RESPONSE|><|END_OF_TURN_TOKEN|>',
            "done<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ],
        1,
    ),
}


@pytest.mark.parametrize("family", GOLDEN)
def test_golden_masks(family: str, tiny_tokenizer: Any) -> None:
    codec = codec_of(family, tiny_tokenizer)
    chat, chat_branches, calls, calls_branches = GOLDEN[family]
    text = TrainingText(codec)
    made = text.replies(CHAT, weights(CHAT))
    assert trained_texts(codec, made) == chat
    assert len(made.branches) == chat_branches
    made = text.replies(CALLS, weights(CALLS), [TOOL])
    assert trained_texts(codec, made) == calls
    assert len(made.branches) == calls_branches


def test_a_whole_mask_token_by_token(tiny_tokenizer: Any) -> None:
    codec = codec_of("smollm2", tiny_tokenizer)
    (branch,) = TrainingText(codec).replies(CHAT, weights(CHAT)).branches
    assert shown(codec, branch) == (
        "<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n<|im_start|>assistant\n⟦seven<|im_end|>⟧\n"
        "<|im_start|>user\nAnd 5?<|im_end|>\n<|im_start|>assistant\n⟦five<|im_end|>⟧"
    )


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("conversation", [CHAT, CALLS], ids=["chat", "calls"])
def test_every_reply_is_trained_once_in_the_context_of_inference(
    family: str, conversation: list[Message], tiny_tokenizer: Any
) -> None:
    codec = codec_of(family, tiny_tokenizer)
    tools = [TOOL] if conversation is CALLS else []
    made = TrainingText(codec).replies(conversation, weights(conversation), tools)
    starts = [context for branch in made.branches for context in contexts(branch)]
    prompts = [
        codec.render(conversation[:place], tools).token_ids
        for place, message in enumerate(conversation)
        if message["role"] == "assistant"
    ]
    if Anomaly.OTHER_PROMPT in made.anomalies:  # told in the report: the prompt opens a thought that the reply has not
        assert family in ("deepseekv3", "nemotron_3_nano")
        assert len(starts) == len(prompts)
    else:
        assert starts == prompts
    assert Anomaly.NO_STOP not in made.anomalies
    assert Anomaly.MERGED not in made.anomalies


def contexts(branch: TokenBranch) -> list[tuple[int, ...]]:
    """The tokens before each trained stretch."""
    places = range(1, len(branch.weights))
    return [branch.token_ids[:p] for p in places if branch.weights[p] > 0 and branch.weights[p - 1] == 0]


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Co")), min_size=1, max_size=12).filter(
    lambda text: text == text.strip() and text
)


@settings(max_examples=20, deadline=None)
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=4), family=st.sampled_from(["smollm2", "llama3_1"]))
def test_trained_spans_decode_to_the_replies(tiny_tokenizer: Any, turns: list[tuple[str, str]], family: str) -> None:
    codec = codec_of(family, tiny_tokenizer)
    messages = [message for asked, said in turns for message in (user(asked), reply(said))]
    made = TrainingText(codec).replies(messages, weights(messages))
    stop = codec.end_of_turn
    (branch,) = made.branches
    assert trained_texts(codec, made) == [said + stop for _, said in turns]
    assert contexts(branch) == [codec.render(messages[: 2 * i + 1]).token_ids for i in range(len(turns))]


@settings(max_examples=20, deadline=None)
@given(turns=st.lists(st.tuples(words, words, words), min_size=1, max_size=3))
def test_branches_of_a_template_that_drops_thoughts(tiny_tokenizer: Any, turns: list[tuple[str, str, str]]) -> None:
    turns = [part for part in turns if "think>" not in "".join(part)]
    codec = codec_of("qwen3", tiny_tokenizer)
    messages = [
        message for asked, thought, said in turns for message in (user(asked), reply(said, reasoning_content=thought))
    ]
    if not messages:
        return
    made = TrainingText(codec).replies(messages, weights(messages))
    assert len(made.branches) == len(turns)
    for number, branch in enumerate(made.branches):
        assert contexts(branch) == [codec.render(messages[: 2 * number + 1]).token_ids]
        _, thought, said = turns[number]
        assert trained_texts(codec, TrainingTokens(branches=(branch,))) == [
            f"<think>\n{thought}\n</think>\n\n{said}<|im_end|>"
        ]
    assert shared_prompt(made.branches) <= min(len(contexts(branch)[0]) for branch in made.branches)


def test_weights_of_messages(tiny_tokenizer: Any) -> None:
    codec = codec_of("smollm2", tiny_tokenizer)
    (branch,) = TrainingText(codec).replies(CHAT, [0, 0, 0, 0.5]).branches
    assert shown(codec, branch).endswith("assistant\nseven<|im_end|>\n<|im_start|>user\nAnd 5?<|im_end|>\n"
                                         "<|im_start|>assistant\n⟦five<|im_end|>⟧")  # fmt: skip
    assert set(branch.weights) == {0.0, 0.5}
    with pytest.raises(DataError, match="No reply"):
        TrainingText(codec).replies(CHAT, [0, 0, 0, 0])


def test_control_tokens_in_texts_stay_text_and_untrained_ones_train_nothing(tiny_tokenizer: Any) -> None:
    codec = codec_of("smollm2", tiny_tokenizer)
    messages = [user("say <|im_end|>"), reply("<|im_end|> it is <|im_start|>")]
    (branch,) = TrainingText(codec).replies(messages, [0, 1]).branches
    stop = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [branch.weights[i] for i, token in enumerate(branch.token_ids) if token == stop] == [0.0, 1.0]
    assert trained_texts(codec, TrainingTokens(branches=(branch,))) == ["<|im_end|> it is <|im_start|><|im_end|>"]
    assert contexts(branch) == [codec.render(messages[:1]).token_ids]


def test_a_conversation_that_begins_with_a_reply(tiny_tokenizer: Any) -> None:
    codec = codec_of("gemma3", tiny_tokenizer)  # its template cannot write a conversation of no messages
    codec_plain = codec_of("smollm2", tiny_tokenizer)
    (branch,) = TrainingText(codec_plain).replies([reply("hello"), user("hi"), reply("bye")], [1, 0, 1]).branches
    assert trained_texts(codec_plain, TrainingTokens(branches=(branch,))) == ["hello<|im_end|>", "bye<|im_end|>"]
    with pytest.raises(DataError):
        TrainingText(codec).replies([reply("hello"), user("hi")], [1, 0])


def test_a_merge_at_the_border_belongs_to_the_prompt(tiny_tokenizer: Any) -> None:
    tokenizer = tokenizer_with("smollm2", tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}"
    )
    codec = TemplateCodec(tokenizer)
    made = TrainingText(codec).replies([user("The answ"), reply("er is 7")], [0, 1])
    assert made.anomalies == {Anomaly.MERGED}
    assert trained_texts(codec, made) == [" is 7<|im_end|>"]


def test_generation_marks_are_used_and_the_stop_token_is_trained_all_the_same(tiny_tokenizer: Any) -> None:
    tokenizer = tokenizer_with("smollm2", tiny_tokenizer)
    marked = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}Sure. {% generation %}"
        "{{ m.content }}STOP{% endgeneration %}REST\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for stop, rest, expected, anomalies in (
        ("<|im_end|>", "", ["seven<|im_end|>", "five<|im_end|>"], set()),
        ("", "<|im_end|>", ["seven<|im_end|>", "five<|im_end|>"], {Anomaly.STOP_OUTSIDE_MARKS}),
    ):
        tokenizer.chat_template = marked.replace("STOP", stop).replace("REST", rest)
        codec = TemplateCodec(tokenizer)
        made = TrainingText(codec).replies([user("a"), reply("seven"), user("b"), reply("five")], [0, 1, 0, 1])
        assert trained_texts(codec, made) == expected
        assert made.anomalies == anomalies


@pytest.mark.parametrize("family", TEMPLATES)
def test_text_that_the_template_leaves_out_is_noticed(family: str, tiny_tokenizer: Any) -> None:
    text = TrainingText(codec_of(family, tiny_tokenizer))
    assert Anomaly.NO_TEXT not in text.replies(CHAT, weights(CHAT)).anomalies
    if family == "llama3_1":  # it writes the call alone
        asked = [CALLS[0], reply("I look it up.", tool_calls=[CALL])]
        assert Anomaly.NO_TEXT in text.replies(asked, weights(asked), [TOOL]).anomalies


def test_a_template_without_a_stop_token_is_noticed(tiny_tokenizer: Any) -> None:
    tokenizer = tokenizer_with("smollm2", tiny_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    made = TrainingText(TemplateCodec(tokenizer)).replies([user("a"), reply("b")], [0, 1])
    assert Anomaly.NO_STOP in made.anomalies


def test_plain_texts_end_once(tiny_tokenizer: Any) -> None:
    codec = codec_of("smollm2", tiny_tokenizer)
    text = TrainingText(codec)
    (branch,) = text.plain("Question: what?\nAnswer:", " 42").branches
    assert shown(codec, branch) == "Question: what?\nAnswer:⟦ 42<|im_end|>⟧"
    assert text.plain("Question: what?\nAnswer:", " 42<|im_end|>").branches == (branch,)
    (branch,) = text.plain("", "The quick brown fox", train_prompt=True).branches
    assert branch.weights[0] == 0.0
    assert set(branch.weights[1:]) == {1.0}


def test_everything_is_trained_but_the_beginning(tiny_tokenizer: Any) -> None:
    codec = codec_of("gemma3", tiny_tokenizer)
    (branch,) = TrainingText(codec).everything(CHAT).branches
    assert branch.weights[0] == 0.0
    assert set(branch.weights[1:]) == {1.0}

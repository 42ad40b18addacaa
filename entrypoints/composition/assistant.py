"""Loads the model of an `Assistant`. Imports torch."""

from pathlib import Path

from attrs import frozen

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.loading import default_device, load_causal_lm, load_tokenizer, resolve_dtype
from rollgrad.application.episodes.assistant import Assistant
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.assistant_arguments import AssistantArguments
from rollgrad.entrypoints.composition.engines import eos_token_ids
from rollgrad.entrypoints.composition.tool_box import ToolBox

FLAG = "--model"


@frozen(kw_only=True, eq=False)
class LoadedAssistant:
    """An assistant and its parts; close `tools` in the event loop that used them."""

    assistant: Assistant
    codec: TemplateCodec
    tools: ToolBox
    name: str


def load_assistant(arguments: AssistantArguments) -> LoadedAssistant:
    """Returns the model with its tools.

    Raises:
        ConfigurationError: a setting, a tool or the model cannot be used.
    """
    tools = ToolBox(arguments.tools, arguments.python_isolation, flag="--tools", isolation_flag="--python_isolation")
    device = default_device()
    tokenizer = load_tokenizer(arguments.model, flag=FLAG)
    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"{FLAG} {arguments.model} has no chat template, so it cannot chat: name a chat model."
        )
    model = load_causal_lm(arguments.model, dtype=resolve_dtype(arguments.dtype, device), device=device, flag=FLAG)
    check_decoding(model, FLAG)
    codec = TemplateCodec(tokenizer)
    engine = EmbeddedEngine(
        model.eval(), eos_token_ids=eos_token_ids(model.generation_config, tokenizer), decode=codec.decode
    )
    assistant = Assistant(
        engine,
        codec,
        tools.open,
        params=arguments.params(),
        system_prompt=arguments.system_prompt,
        max_turns=arguments.max_turns,
        max_tokens=engine.max_tokens,
    )
    return LoadedAssistant(
        assistant=assistant, codec=codec, tools=tools, name=Path(arguments.model).resolve().name or arguments.model
    )

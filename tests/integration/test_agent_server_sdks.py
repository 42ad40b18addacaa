"""The SDKs of OpenAI and Anthropic, and agent frameworks, unmodified, against the agent server on a real socket."""

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.episodes.generation import StopReason
from tests.fakes.scripted_engine import MODEL, Script, ScriptedEngine, Served, assert_recorded, serving

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 30, "b": 12}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
TOOL_A: Any = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
GO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 plus 4?"}]

Scenario = Callable[[Served, ScriptedEngine], Awaitable[None]]
Play = Callable[..., ScriptedEngine]


@pytest.fixture
def play(tiny_tokenizer: Any) -> Play:
    """Runs a scenario with a server of its own; afterwards the session has exactly what the engine said."""

    def run(scenario: Scenario, script: Script, *, branches: int = 1, recorded: bool = True, **how: Any) -> Any:
        async def body() -> ScriptedEngine:
            codec = TemplateCodec(tiny_tokenizer)
            engine = ScriptedEngine(codec, tiny_tokenizer.eos_token_id, script)
            async with serving(engine, codec, **how) as served:
                await scenario(served, engine)
                if recorded:
                    assert_recorded(served.session, engine.said, branches=branches)
                return engine

        return asyncio.run(body())

    return run


def client(served: Served, **settings: Any) -> Any:
    import openai

    return openai.AsyncOpenAI(
        **{"base_url": served.base, "api_key": "none", "max_retries": 0, "timeout": 300, **settings}
    )


def claude(served: Served, **settings: Any) -> Any:
    import anthropic

    return anthropic.AsyncAnthropic(
        **{"base_url": served.root, "api_key": "none", "max_retries": 0, "timeout": 300, **settings}
    )


def test_of_responses_that_say_the_same_the_one_that_is_named_is_continued(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        create = functools.partial(client(served).responses.create, model=MODEL)
        first, second = await create(input="Go."), await create(input="Go.")
        for each in (first, second):
            await create(input="And?", previous_response_id=each.id)
        recorded = served.session.ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.STOP)
        for trajectory, (_, reply) in zip(recorded, engine.said, strict=False):
            first_action = next(s for s in trajectory.segments if s.kind == "action")
            assert trajectory.logprobs_T[first_action.start : first_action.stop].tolist() == list(reply.logprobs)
            assert sum(s.kind == "action" for s in trajectory.segments) == 2

    play(scenario, ["Yes.", "Yes.", "More.", "Other."], branches=2)


def test_a_server_keeps_responses_that_clients_continue_read_and_delete(play: Play) -> None:
    """Also the OpenAI Agents SDK, where it is told to send ids in the place of conversations."""
    import agents
    import openai

    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        sdk = client(served, base_url=f"{served.url}/v1", api_key="any")
        create = functools.partial(sdk.responses.create, model=MODEL)
        first = await create(input="What is 3 plus 4?", include=["message.output_text.logprobs"])
        second = await create(input="Sure?", previous_response_id=first.id, store=False)
        assert engine.prompt(1).startswith(engine.prompt(0)), "the conversation went on"
        assert "It is 7." in engine.prompt(1)
        assert (first.store, second.store) == (True, False)  # type: ignore[attr-defined]
        kept = await sdk.responses.retrieve(first.id)
        assert (kept.output_text, kept.created_at, kept.usage) == ("It is 7.", first.created_at, first.usage)
        assert kept.output[0].content[0].logprobs == []  # type: ignore[union-attr, index]
        assert await sdk.responses.delete(first.id) is None
        for gone in (first.id, second.id):
            with pytest.raises(openai.NotFoundError, match="No response with the id"):
                await sdk.responses.retrieve(gone)
            with pytest.raises(openai.BadRequestError, match="no such response is kept here") as refused:
                await create(input="And?", previous_response_id=gone)
            assert refused.value.code == "previous_response_not_found"
        within = await client(served).responses.create(model=MODEL, input="What is 3 plus 4?")
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(within.id)  # an episode's are its own
        tool = agents.function_tool(lambda a, b: str(a + b), name_override="add", strict_mode=False)
        player = agents.Agent(name="a", model=agents.OpenAIResponsesModel(model=MODEL, openai_client=sdk), tools=[tool])
        done = await agents.Runner.run(
            player, "Add.", auto_previous_response_id=True, run_config=agents.RunConfig(tracing_disabled=True)
        )
        assert done.final_output == "It is 7 again."
        assert "Add." in engine.prompt(-1), "which the client sent with its first request alone"
        assert [request["type"] for request in done.to_input_list()[1:]] == [  # type: ignore[typeddict-item]
            "function_call",
            "function_call_output",
            "message",
        ]

    script = ["It is 7.", "Yes.", "In a session.", CALL, "It is 7 again."]
    play(scenario, script, stateless=True, recorded=False)


def test_openai_with_tools_thinking_and_a_second_turn(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        chat = client(served).chat.completions
        first = await chat.create(model=MODEL, messages=GO, tools=[TOOL], logprobs=True)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.reasoning_content == "I add twice."  # type: ignore[attr-defined]
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls or ()] == [  # type: ignore[union-attr]
            {"a": 3, "b": 4},
            {"a": 30, "b": 12},
        ]
        ids = [call.id for call in choice.message.tool_calls or ()]
        assert len(set(ids)) == 2
        prompt, reply = engine.said[0]
        assert first.usage is not None
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(prompt), len(reply.token_ids))
        assert choice.logprobs is not None
        assert [each.logprob for each in choice.logprobs.content or ()] == list(reply.logprobs)
        results: Any = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in zip(ids, "79", strict=True)]
        second = await chat.create(  # the second tool ended first
            model=MODEL, messages=[*GO, choice.message.to_dict(), *reversed(results)], tools=[TOOL], temperature=0.3
        )
        assert engine.prompt(1).index("\n7\n") < engine.prompt(1).index("\n9\n"), "as the calls"
        assert second.choices[0].message.content == "The answer is 7."
        assert second.choices[0].finish_reason == "stop"

    engine = play(scenario, [f"<think>I add twice.</think>\n\n{CALL}\n{OTHER_CALL}", "The answer is 7."])
    assert engine.requests[1].params.temperature == 1.0, "the trainer decides how to sample"


def test_a_response_continues_another_of_its_episode_by_its_id(play: Play) -> None:
    import openai

    tool: Any = {"type": "function", **TOOL["function"]}

    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        create = functools.partial(client(served).responses.create, model=MODEL, tools=[tool], instructions="Be brief.")
        first = await create(input="What is 3 plus 4?")
        (call,) = first.output
        assert call.type == "function_call"
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
        answers = [event async for event in await create(input=result, previous_response_id=first.id, stream=True)]
        second = answers[-1].response  # type: ignore[union-attr]
        assert (second.output_text, second.previous_response_id) == ("It is 7.", first.id)
        third = await create(input="Sure?", previous_response_id=second.id)
        assert third.output_text == "Yes."
        listed = client(served).responses.input_items.list
        read = [item async for item in listed(third.id, order="asc", limit=2)]
        assert [item.type for item in read] == [
            *("message", "function_call", "function_call_output", "message", "message")
        ]
        assert (read[0].content[0].text, read[1].name, read[2].output) == ("What is 3 plus 4?", "add", "7")
        assert (read[1].call_id, json.loads(read[1].arguments)) == (call.call_id, json.loads(call.arguments))
        assert (read[3].role, read[3].content[0].text, read[4].content[0].text) == ("assistant", "It is 7.", "Sure?")
        assert [item.id async for item in listed(third.id)] == [item.id for item in reversed(read)]
        for wrong in ({"limit": 101}, {"after": "msg_none"}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await listed(third.id, **wrong)
        for wrong in ("resp_none", first.id.upper()):
            with pytest.raises(openai.BadRequestError, match=r"no such response is kept here"):
                await create(input="Sure?", previous_response_id=wrong)
        other = client(served, base_url=f"{served.url}/s/{served.open().key}/v1")
        with pytest.raises(openai.BadRequestError, match=r"no such response is kept here"):
            await other.responses.create(model=MODEL, input="Sure?", previous_response_id=first.id)
        prompts = [request.prompt_token_ids for request in engine.requests]
        whole: Any = [
            {"role": "user", "content": "What is 3 plus 4?"},
            call.to_dict(),
            *result,
            {"role": "assistant", "content": "It is 7."},
            {"role": "user", "content": "Sure?"},
        ]
        fourth = await create(input=whole)
        assert fourth.output_text == "No."
        assert engine.requests[-1].prompt_token_ids == prompts[-1]

    play(scenario, [CALL, "It is 7.", "Yes.", "No."], branches=2)


def test_anthropic_with_tools_thinking_and_a_second_turn(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        messages: Any = [{"role": "user", "content": "What is 3 plus 4?"}]
        ask = functools.partial(
            claude(served).messages.create, model=MODEL, max_tokens=180, system="Be brief.", tools=[TOOL_A]
        )
        first = await ask(messages=messages)
        assert [block.type for block in first.content] == ["thinking", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use"
        uses = [block for block in first.content if block.type == "tool_use"]
        assert [use.input for use in uses] == [{"a": 3, "b": 4}, {"a": 30, "b": 12}]
        prompt, reply = engine.said[0]
        assert (first.usage.input_tokens, first.usage.output_tokens) == (len(prompt), len(reply.token_ids))
        results: Any = [
            {"type": "tool_result", "tool_use_id": uses[0].id, "content": "7"},
            {"type": "tool_result", "tool_use_id": uses[1].id, "content": [{"type": "text", "text": "42"}]},
        ]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        counted = await claude(served).messages.count_tokens(
            model=MODEL, messages=messages, system="Be brief.", tools=[TOOL_A]
        )
        assert counted.input_tokens > 0
        second = await ask(messages=messages)
        assert [block.to_dict() for block in second.content] == [{"type": "text", "text": "The answer is 7."}]
        assert second.stop_reason == "end_turn"

    play(scenario, [f"<think>I add twice.</think>\n\n{CALL}\n{OTHER_CALL}", "The answer is 7."])


def test_openai_streaming(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        stream = await client(served).chat.completions.create(
            model=MODEL, messages=GO, tools=[TOOL], stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas).strip() == "Let me add."
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
        (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
        assert [json.loads(call.function.arguments or "") for call in calls if call.function] == [{"a": 3, "b": 4}]
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        prompt, reply = engine.said[0]
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(reply.token_ids))
        assert len(deltas) > 5, "pieces come while the reply is sampled"

    play(scenario, [f"<think>Hm.</think>\n\nLet me add.\n{CALL}"])


def test_anthropic_streaming(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        settings: Any = {"messages": [{"role": "user", "content": "go"}], "tools": [TOOL_A], "max_tokens": 180}
        async with claude(served).messages.stream(model=MODEL, **settings) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text.strip() == "Let me add."
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[0].thinking == "Hm."  # type: ignore[union-attr]
        assert final.content[2].input == {"a": 3, "b": 4}  # type: ignore[union-attr]
        assert final.stop_reason == "tool_use"
        prompt, reply = engine.said[0]
        assert (final.usage.input_tokens, final.usage.output_tokens) == (len(prompt), len(reply.token_ids))

    play(scenario, [f"<think>Hm.</think>\n\nLet me add.\n{CALL}"])


def test_synchronous_clients(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        import anthropic
        import openai

        begun = int(time.time()) - 600  # the server's tests last for seconds

        def in_thread() -> list[str]:
            with openai.OpenAI(base_url=served.base, api_key="none") as one:
                first = one.chat.completions.create(model=MODEL, messages=GO)
                messages = [*GO, first.choices[0].message.to_dict(), {"role": "user", "content": "Sure?"}]
                chunks = list(one.chat.completions.create(model=MODEL, messages=messages, stream=True))
                second = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                models = [model.id for model in one.models.list()]
                times = {model.created for model in one.models.list()}
                assert one.models.retrieve(MODEL).id == MODEL
                with pytest.raises(openai.NotFoundError, match="There is no such model here"):
                    one.models.retrieve("another")
            messages += [{"role": "assistant", "content": second}, {"role": "user", "content": "Really?"}]
            with anthropic.Anthropic(base_url=served.root, api_key="none") as two:
                system, *rest = messages
                third = two.messages.create(model=MODEL, max_tokens=50, system=system["content"], messages=rest)
                models += [model.id for model in two.models.list()]
                times |= {int(model.created_at.timestamp()) for model in two.models.list()}
                assert two.models.retrieve(MODEL).display_name == MODEL
            (created,) = times  # one time on both wires
            assert begun <= created <= time.time()
            return [first.choices[0].message.content or "", second, third.content[0].text, *models]  # type: ignore[union-attr]

        assert await asyncio.to_thread(in_thread) == ["seven", "yes", "really", MODEL, MODEL]

    play(scenario, ["seven", "yes", "really"])


@pytest.mark.parametrize("streams", [False, True])
def test_stop_texts_end_a_reply_and_are_no_part_of_it(play: Play, streams: bool) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        chat = client(served).chat.completions
        if streams:
            stream = await chat.create(model=MODEL, messages=GO, stop="\nObservation:", stream=True)
            first = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        else:
            reply = await chat.create(model=MODEL, messages=GO, stop="\nObservation:")
            first = reply.choices[0].message.content or ""
            assert reply.choices[0].finish_reason == "stop"
        assert first == "Action: look"
        messages: Any = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": first}]
        settings: Any = {"system": "Be brief.", "max_tokens": 100, "stop_sequences": ["STOP", "END"]}
        messages.append({"role": "user", "content": "Go on."})
        second = await claude(served).messages.create(model=MODEL, messages=messages, **settings)
        assert second.content[0].text == "It is 7 "  # type: ignore[union-attr]
        assert (second.stop_reason, second.stop_sequence) == ("stop_sequence", "END")

    play(scenario, ["Action: look\nObservation: nothing", "It is 7 END and STOP"])


def test_the_sdks_see_that_a_stream_has_failed(play: Play) -> None:
    import anthropic
    import openai

    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        engine.dead = True  # after a first token
        one = client(served, base_url=f"{served.url}/v1")
        chat = await one.chat.completions.create(model=MODEL, messages=GO, stream=True)
        with pytest.raises(openai.APIError, match="The engine has died"):
            [chunk async for chunk in chat]
        completed = await one.completions.create(model=MODEL, prompt="go", stream=True)
        with pytest.raises(openai.APIError, match="The engine has died"):
            [chunk async for chunk in completed]
        responded = await one.responses.create(model=MODEL, input="go", stream=True)
        last = [event async for event in responded][-1]
        assert last.type == "response.failed"
        assert "The engine has died" in last.response.error.message
        told = await claude(served, base_url=served.url).messages.create(
            model=MODEL, messages=GO[1:], max_tokens=20, stream=True
        )
        with pytest.raises(anthropic.APIStatusError, match="The engine has died"):
            [event async for event in told]

    play(scenario, lambda prompt: "a reply that is never whole", recorded=False, stateless=True)


def test_a_list_of_prompts_has_choices_of_each_in_turn(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        completions = client(served, base_url=f"{served.url}/v1").completions
        asked: Any = {"model": MODEL, "prompt": ["one", "three four"], "n": 2}
        told = await completions.create(**asked, extra_body={"return_token_ids": True})
        assert [choice.index for choice in told.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in told.choices] == ["ONE", "ONE", "THREE FOUR", "THREE FOUR"]
        prompts = [choice.model_dump()["prompt_token_ids"] for choice in told.choices]
        assert prompts[0] == prompts[1]
        assert prompts[2] == prompts[3] != prompts[0]
        sampled = [choice.model_dump()["token_ids"] for choice in told.choices]
        assert told.usage is not None
        assert told.usage.prompt_tokens == len(prompts[0]) + len(prompts[2])
        assert told.usage.completion_tokens == sum(map(len, sampled))
        stream = await completions.create(**asked, stream=True, stream_options={"include_usage": True})
        texts, usage = ["", "", "", ""], None
        async for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in told.choices]
        assert usage == told.usage

    play(scenario, lambda prompt: prompt.strip().upper(), recorded=False, stateless=True)


def test_max_tokens_only_lowers(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        chat = client(served).chat.completions
        short = await chat.create(model=MODEL, messages=GO, max_completion_tokens=3)
        assert short.choices[0].finish_reason == "length"
        assert short.usage is not None
        assert short.usage.completion_tokens == 3
        await chat.create(model=MODEL, messages=GO, max_tokens=100_000)
        message = await claude(served).messages.create(
            model=MODEL, max_tokens=2, messages=[{"role": "user", "content": "x"}]
        )
        assert message.stop_reason == "max_tokens"

    engine = play(scenario, ["a long answer without an end", "short", "long"], branches=3)
    assert [request.params.max_new_tokens for request in engine.requests] == [3, 200, 2]


def test_errors_are_the_sdks_own(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        import anthropic
        import openai

        question: Any = [{"role": "user", "content": "x"}]
        root = {"base_url": f"{served.url}/v1"}
        with pytest.raises(openai.AuthenticationError, match="session's key"):
            await client(served, **root).chat.completions.create(model=MODEL, messages=question)
        with pytest.raises(anthropic.AuthenticationError, match="session's key"):
            await claude(served, base_url=served.url).messages.create(model=MODEL, messages=question, max_tokens=5)
        with pytest.raises(openai.BadRequestError, match="n is 1000") as refused:
            await client(served).chat.completions.create(model=MODEL, messages=question, n=1000)
        assert refused.value.code == "invalid_value"
        with pytest.raises(anthropic.BadRequestError, match="cannot be prescribed while the model is") as also_refused:
            await claude(served).messages.create(
                model=MODEL, messages=question, max_tokens=5, tools=[TOOL_A], tool_choice={"type": "any"}
            )
        assert also_refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        engine.failures = 2
        with pytest.raises(openai.InternalServerError, match="out of memory") as broken:
            await client(served).chat.completions.create(model=MODEL, messages=question)
        assert broken.value.status_code == 503
        with pytest.raises(anthropic.InternalServerError, match="out of memory"):
            await claude(served).messages.create(model=MODEL, messages=question, max_tokens=5)
        await served.session.seal()
        for streams in (False, True):
            with pytest.raises(openai.APIStatusError, match="episode has ended") as over:
                await client(served).chat.completions.create(model=MODEL, messages=question, stream=streams)
            assert over.value.status_code == 410
            with pytest.raises(anthropic.APIStatusError, match="episode has ended") as also_over:
                await claude(served).messages.create(model=MODEL, messages=question, max_tokens=5, stream=streams)
            assert also_over.value.status_code == 410
            assert also_over.value.body["type"] == "error"  # type: ignore[index]

    play(scenario, [], recorded=False)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_busy_server_is_asked_again_by_the_sdks(play: Play, sdk: str, streams: bool) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        import anthropic
        import openai

        engine.free.clear()
        other = served.open()
        question: Any = [{"role": "user", "content": "x"}]
        blocker = asyncio.create_task(
            client(served, api_key=other.key, base_url=f"{served.url}/v1").chat.completions.create(
                model=MODEL, messages=question
            )
        )
        while not engine.waiting:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as busy:
            await client(served).chat.completions.create(model=MODEL, messages=question, stream=streams)
        assert busy.value.response.headers["retry-after"] == "1"
        with pytest.raises(anthropic.RateLimitError):
            await claude(served).messages.create(model=MODEL, messages=question, max_tokens=50, stream=streams)
        asyncio.get_running_loop().call_later(0.1, engine.free.set)
        if sdk == "openai":
            answer: Any = await client(served, max_retries=2).chat.completions.create(
                model=MODEL, messages=question, stream=streams
            )
        else:
            answer = await claude(served, max_retries=2).messages.create(
                model=MODEL, messages=question, max_tokens=50, stream=streams
            )
        if streams:
            assert [event async for event in answer]
        await blocker
        await other.seal()
        assert_recorded(other, engine.said[:1])
        assert_recorded(served.session, engine.said[1:])

    play(scenario, ["blocking", "free"], recorded=False, max_waiting=1, max_turns=1)


def test_a_session_is_found_by_url_and_by_api_key(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        root = {"api_key": served.session.key}
        one = client(served, base_url=f"{served.url}/v1", **root)
        first = await one.chat.completions.create(model=MODEL, messages=GO)
        messages: Any = [GO[1], first.choices[0].message.to_dict(), {"role": "user", "content": "Sure?"}]
        two = claude(served, base_url=served.url, **root)
        second = await two.messages.create(model=MODEL, max_tokens=50, system="Be brief.", messages=messages)
        messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Really?"}]
        three = claude(served, base_url=served.url, api_key=None, auth_token=served.session.key)
        await three.messages.create(model=MODEL, max_tokens=50, system="Be brief.", messages=messages)

    play(scenario, ["seven", "yes", "really"])


def test_the_policy_plays_a_part_of_which_nothing_is_learned(play: Play) -> None:
    """A game of two sides: the other one has the same address and another key, and sampling settings of its own."""

    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        import openai

        learns = client(served, api_key=served.session.key).chat.completions
        other = client(served, api_key=served.session.unlearned.key).chat.completions
        messages: Any = list(GO)
        for _ in range(2):
            mine = await learns.create(model=MODEL, messages=messages, temperature=0.25)
            heard = [{"role": "user", "content": mine.choices[0].message.content}]
            theirs = await other.create(model=MODEL, messages=heard, temperature=0.25, max_tokens=40)
            said = theirs.choices[0].message.content
            messages += [mine.choices[0].message.to_dict(), {"role": "user", "content": said}]
        assert served.session.ledger.turns == 2
        assert served.session.unlearned.count == 2
        served.session.unlearned._most = 2  # as many as it has had
        with pytest.raises(openai.APIStatusError, match="has had its"):
            await other.create(model=MODEL, messages=GO)
        assert served.session.stopped is None
        claudes = claude(served, api_key=served.session.unlearned.key)
        await served.session.seal()
        with pytest.raises(Exception, match="no such session"):
            await claudes.messages.create(model=MODEL, max_tokens=50, messages=GO)

    engine = play(scenario, ["mine", "theirs", "mine again", "theirs again"], recorded=False)
    assert [request.params.temperature for request in engine.requests] == [1.0, 0.25, 1.0, 0.25]
    assert len({request.params.seed for request in engine.requests}) == 4


def test_who_asks_again_after_a_timeout_of_its_own_gets_the_reply_that_nobody_saw(play: Play) -> None:
    """It is no retry of the SDK's, which would be marked; two requests at once are two."""

    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        chat = client(served).chat.completions
        engine.free.clear()
        left = asyncio.create_task(chat.create(model=MODEL, messages=GO))
        while not engine.waiting:
            await asyncio.sleep(0.01)
        left.cancel()
        while any(served.session._waiting.values()):  # the server has seen that the client is gone
            await asyncio.sleep(0.01)
        again = asyncio.create_task(chat.create(model=MODEL, messages=GO))
        await asyncio.sleep(0.1)
        engine.free.set()
        assert (await again).choices[0].message.content == "first"
        new = await chat.create(model=MODEL, messages=GO)
        assert new.choices[0].message.content == "second"
        await served.session.seal()
        assert (served.session.ledger.turns, served.session.ledger.dropped) == (2, 0)

    play(scenario, ["first", "second"], branches=2)


def test_a_role_is_told_by_its_key(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        import openai

        for how in ({}, {"base_url": f"{served.url}/v1"}):
            for role in ("first", "second"):
                chat = client(served, api_key=f"{served.session.key}:{role}", **how).chat.completions
                await chat.create(model=MODEL, messages=GO)
        await claude(served, api_key=f"{served.session.key}:third").messages.create(
            model=MODEL, max_tokens=50, messages=GO[1:]
        )
        recorded = served.session.ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.STOP)
        assert [t.role for t in recorded] == ["first", "second", "first", "second", "third"]
        wrong = client(served, api_key=f"{served.session.key}:a:b").chat.completions
        with pytest.raises(openai.AuthenticationError, match="names a role that is no word"):
            await wrong.create(model=MODEL, messages=GO)

    play(scenario, lambda prompt: "mine", branches=5)


def test_without_sessions_nothing_is_recorded(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        chat = client(served, base_url=f"{served.url}/v1").chat.completions
        reply = await chat.create(model=MODEL, messages=GO, temperature=0.5, stop=["7"], seed=-1)
        assert reply.choices[0].message.content == "It is "
        assert served.session.ledger.turns == 0

    engine = play(scenario, ["It is 7."], recorded=False, stateless=True)
    assert engine.requests[0].params.temperature == 0.5


async def test_a_real_model_is_recorded_token_by_token(tiny_model_dir: Path) -> None:
    import torch

    from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
    from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer

    tokenizer = load_tokenizer(str(tiny_model_dir), flag="model")
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="model")
    codec = TemplateCodec(tokenizer)
    engine = EmbeddedEngine(model, eos_token_ids=[tokenizer.eos_token_id], decode=codec.decode)
    async with serving(engine, codec) as served:
        messages: Any = list(GO)
        said = []
        for turn in range(3):
            reply = await client(served).chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=12,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            (choice,) = reply.choices
            said.append((reply.prompt_token_ids, choice.token_ids))  # type: ignore[attr-defined]
            assert choice.logprobs is not None
            messages += [choice.message.to_dict(), {"role": "user", "content": f"and {turn}?"}]
        (trajectory,) = served.session.ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.ENVIRONMENT)
        prompt, last = said[-1]
        assert trajectory.token_ids_T.tolist() == prompt + last
        for earlier_prompt, earlier in said:
            place = len(earlier_prompt)
            assert trajectory.token_ids_T[place : place + len(earlier)].tolist() == earlier


def test_openai_agents_plays_an_episode(play: Play) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

        set_tracing_disabled(True)

        @function_tool
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        agent = Agent(
            name="adder",
            instructions="Be brief.",
            tools=[add],
            model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client(served)),
        )
        result = await Runner.run(agent, "What is 3 plus 4?")
        assert result.final_output == "The answer is 7."
        streamed = Runner.run_streamed(agent, [*result.to_input_list(), {"role": "user", "content": "And 30 plus 12?"}])
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output == "42"

    engine = play(scenario, [CALL, "The answer is 7.", OTHER_CALL, "42"])
    assert "<tool_response>\n7\n</tool_response>" in engine.prompt(1)
    assert "<tool_response>\n42\n</tool_response>" in engine.prompt(3)


@pytest.mark.parametrize("wire", ["openai", "anthropic"])
def test_pydantic_ai_plays_an_episode(play: Play, wire: str) -> None:
    async def scenario(served: Served, engine: ScriptedEngine) -> None:
        from pydantic_ai import Agent
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider

        model: Any = (
            OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client(served)))
            if wire == "openai"
            else AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=claude(served)))
        )
        agent = Agent(model, instructions="Be brief.")

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        result = await agent.run("What is 3 plus 4?")
        assert result.output == "The answer is 7."
        async with agent.run_stream("And 30 plus 12?", message_history=result.all_messages()) as streamed:
            assert await streamed.get_output() == "42"

    script = [f"<think>Both at once.</think>\n\n{CALL}\n{OTHER_CALL}", "The answer is 7.", "42"]
    engine = play(scenario, script)
    assert "<tool_response>\n7\n</tool_response>\n<tool_response>\n42\n</tool_response>" in engine.prompt(1)

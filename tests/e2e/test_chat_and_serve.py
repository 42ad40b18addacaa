"""`rollgrad chat` and `rollgrad serve agent` as a user runs them: real processes, a real (tiny) model, real clients."""

import asyncio
import importlib.util
import io
import itertools
import json
import os
import pty
import readline
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch

import rollgrad
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.servers.agent_server import AgentServer
from rollgrad.adapters.servers.server import Server
from rollgrad.application.episodes.assistant import Assistant
from rollgrad.application.episodes.chat_request import ChatRequest, RefusedError
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.episodes.messages import ReplyForm
from rollgrad.domain.errors import EngineError
from rollgrad.entrypoints.cli.chat import _ChatSession
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.serve_agent import ServeAgentArguments
from rollgrad.entrypoints.composition.serving.assistant import load_assistant
from tests.fakes.model_server import ModelServer
from tests.fakes.recording_engine import RecordingEngine
from tests.scripts import ScriptHost
from tests.tiny_models import SHARE, saved

SETTINGS = ["--max_new_tokens", "12", "--seed", "5", "--temperature", "1"]


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, script_host: ScriptHost) -> Iterator[str]:
    rollgrad = [*script_host.python(), "-m", "rollgrad.entrypoints.cli.main"]
    process = subprocess.Popen(
        [*rollgrad, "serve", "agent", "--model", str(tiny_model_dir), "--port", "0", *SETTINGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "Traceback" not in complaints


@pytest.mark.slow
def test_chat_and_server_sample_the_same_tokens(tiny_model_dir: Path, server: str, rollgrad_command: list[str]) -> None:
    command = [*rollgrad_command, "chat", "--model", str(tiny_model_dir), "--json", *SETTINGS]
    done = subprocess.run([*command, "--prompt", "What is 3 plus 4?"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    asked: list[Any] = [{"role": "user", "content": "What is 3 plus 4?"}]
    reply = client.chat.completions.create(
        model="tiny-llama", messages=asked, extra_body={"return_token_ids": True}, seed=5
    )
    assert reply.choices[0].token_ids == told["token_ids"]  # type: ignore[attr-defined]
    assert reply.choices[0].message.content == told["answer"]
    assert client.models.list().data[0].id == "tiny-llama"
    other = client.chat.completions.create(
        model="tiny-llama", messages=asked, seed=6, extra_body={"return_token_ids": True}
    )
    assert other.choices[0].token_ids != told["token_ids"]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_another_server_samples_the_same_tokens(
    tiny_model_dir: Path, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    question = ["--json", *SETTINGS, "--model", str(tiny_model_dir), "--prompt", "What is 3 plus 4?"]
    assert main(["chat", *question]) == 0
    assert main(["chat", *question, "--engine", "server", "--server_url", f"{server}/v1"]) == 0
    here, there = map(json.loads, capsys.readouterr().out.splitlines())
    assert here == there


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.usefixtures("vllm_host")
async def test_vllm_answers_in_the_form_that_is_asked_for_and_takes_newer_weights(
    wide_headed_model_dir: Path, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """To real clients, too."""
    from transformers import AutoModelForCausalLM

    from benchmarks.real_clients import anthropic, openai_chat, openai_completions, openai_responses

    arguments = ServeAgentArguments(
        model=str(wide_headed_model_dir), engine=Engine.VLLM, seed=3, dtype=DType.FLOAT32, gpu_memory_utilization=SHARE
    )
    newer = AutoModelForCausalLM.from_pretrained(wide_headed_model_dir)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.mul_(1.5)
    saved(newer, tiny_tokenizer, tmp_path / "step_1")
    loaded = load_assistant(arguments, follow=tmp_path)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = ReplyForm(schema={**schema, "additionalProperties": False})
    request = ChatRequest(
        messages=[{"role": "user", "content": "go"}], form=form, changes={"top_logprobs": 2, "temperature": 1.0}
    )

    async def scenario() -> tuple[ChatReply, ChatReply]:
        assert loaded.reload is not None
        try:
            before = await loaded.assistant.answer(request)
            await loaded.reload.reload()
            after = await loaded.assistant.answer(request)
            service, answer = loaded.assistant.service, loaded.assistant.answer
            server = Server(AgentServer(service, loaded.codec, model="m", answer=answer).app(), name="agent server")
            url = await server.start()
            for client in (openai_chat(), openai_responses(), openai_completions(), anthropic()):
                client.pop("a required call", None)  # the tool's description is longer than the model
                for do in client.values():
                    await asyncio.to_thread(do, url)
            await server.stop()
            return before, after
        finally:
            await loaded.aclose()

    reply, later = await scenario()
    assert (set(reply.generation.versions), set(later.generation.versions)) == ({0}, {1})
    assert list(later.generation.logprobs) != list(reply.generation.logprobs)
    assert json.loads(str(reply.parsed.message["content"])) in ({"ok": True}, {"ok": False})
    told = zip(reply.generation.token_ids, reply.generation.logprobs, reply.generation.top_logprobs, strict=True)
    assert all(dict(likeliest)[token] == pytest.approx(logprob) for token, logprob, likeliest in told)
    assert min(reply.generation.logprobs) < 0


def test_the_template_is_given_variables(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in training: a model that learned not to think must not be asked to."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking is false %}<think></think>{% endif %}")
    asked = ["chat", "--model", str(folder), *SETTINGS, "--json", "--prompt", "hi", "--chat_template_kwargs"]
    assert main([*asked[:-1]]) == 0
    assert main([*asked, "enable_thinking", "true"]) == 0
    assert main([*asked, "enable_thinking", "false"]) == 0
    plain, thinks, does_not = (json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines())
    assert plain == thinks != does_not
    for name, reason in (("other", "the chat template does not read"), ("tools", "rollgrad itself tells the template")):
        assert main([*asked, name, "1"]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_a_conversation_goes_on_and_starts_over(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = tmp_path / "opening.json"
    examples = [{"role": "user", "content": "1 plus 1?"}, {"role": "assistant", "content": "2"}]
    opening.write_text(json.dumps(examples))
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3?\nand 4?\n\n/new\nWhat is 3?\n/exit\nnever read\n"))
    assert main(["chat", "--model", str(tiny_model_dir), "--json", *SETTINGS, "--messages", str(opening)]) == 0
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"] * 3
    assert second["messages"][:2] == examples
    assert third == first, "a new conversation forgets, and the seed is the same"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["chat"], "--model is not set: name the directory or hub name of a model."),
        (["serve", "agent"], "--model is not set"),
        (["chat", "--model", "x", "--temperature", "-1"], "temperature"),
        (["chat", "--model", "x", "--tools", "hammer"], "--tools names 'hammer', which is no tool"),
        (["chat", "--model", "x", "--messages", "nowhere.json"], "--messages nowhere.json cannot be read"),
        (["chat", "--model", "x", "--engine", "server"], "--server_url is not set"),
        (["chat", "--model", "x", "--server_url", "http://x"], "--engine is embedded: set --engine server"),
        (["serve", "agent", "--model", "x", "--max_model_len", "5"], "--engine is embedded: set --engine vllm"),
        (
            ["serve", "agent", "--model", "x", "--engine", "vllm", "--gpu_memory_utilization", "2"],
            "it is a share, 1 at most",
        ),
        (["serve", "agent", "--model", "x", "--num_engines", "2"], "--engine is embedded: set --engine vllm"),
        (["chat", "--model", "x", "--vllm_extra.block_size", "16"], "--vllm_extra is set, but --engine is embedded"),
        (["chat", "--model", "x", "--engine", "vllm", "--vllm_extra", "3"], "write --vllm_extra.NAME VALUE"),
        (
            ["serve", "agent", "--model", "x", "--engine", "vllm", "--vllm_extra.max_num_seqs", "2"],
            "vllm_extra.max_num_seqs is not yours to set: set --max_batch_size, and leave --vllm_extra.max_num_seqs",
        ),
        (
            ["serve", "agent", "--model", "x", "--max_batch_size", "0"],
            "--max_batch_size is 0, but it must be 1 or more",
        ),
        (
            ["chat", "--model", "x", "--engine", "server", "--server_url", "http://x", "--max_batch_size", "2"],
            "which has a limit of its own",
        ),
        (
            ["chat", "--model", "x", "--engine", "vllm", "--num_engines", "0"],
            "--num_engines is 0, but it must be above",
        ),
        (
            ["chat", "--model", "x", "--engine", "vllm", "--cluster_address", "auto"],
            "--num_engines is not: say how many",
        ),
        (["serve", "agent", "--model", "x", "--follow", "nowhere"], "--follow nowhere is no directory"),
        (["serve", "agent", "--model", "x", "--client_requests", "0"], "--client_requests is 0"),
        (["serve", "agent", "--model", "x", "--host", "0.0.0.0"], "no token protects it"),
        (["chat", "--model", "x", "--dtype", "int3"], "invalid choice 'int3' for argument '--dtype'"),
        (["chat", "--model", "x", "--prompt", " "], "--prompt is empty"),
        (["chat", "--modell", "x"], "--modell is not a flag; did you mean --model?"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLGRAD_TOKEN", raising=False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert sentence in error


@pytest.mark.parametrize("command", ["chat", "serve agent"])
@pytest.mark.parametrize(
    ("lacking", "fails", "sentence"),
    [
        (None, [], "does not answer: "),
        ({"token": "sesame"}, [], "refuses its callers (401): set the environment variable ROLLGRAD_ENGINE_TOKEN"),
        ({"tokens": False}, [404], "answered /v1/completions with 404: "),
        ({"tokens": False, "token_ids": False}, [], "--server_url names http://127.0.0.1:"),
    ],
    ids=["nobody", "no token", "no such model", "texts alone"],
)
def test_a_server_that_cannot_sample_is_one_sentence(
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    lacking: dict[str, Any] | None,
    fails: list[int],
    sentence: str,
) -> None:
    server = ModelServer(**(lacking or {}))
    server.fails = list(fails)
    if lacking is None:
        server.close()
    try:
        words = ["--model", str(tiny_model_dir), "--engine", "server", "--server_url", f"{server.url}/v1"]
        assert main([*command.split(), *words, *(["--prompt", "hi"] if command == "chat" else ["--port", "0"])]) != 0
    finally:
        server.close()
    *_, line = capsys.readouterr().err.splitlines()  # after a line for each attempt
    assert line.startswith("error: ")
    assert sentence in line


def scripted(tokenizer: Any, *replies: str) -> tuple[Assistant, RecordingEngine]:
    """An assistant with the Python tool whose model says `replies`."""
    from rollgrad.adapters.tools.python import PythonTool

    codec = TemplateCodec(tokenizer)
    engine = RecordingEngine(lambda request, number: codec.encode(replies[number]))

    python = PythonTool()

    async def tools() -> list[Any]:
        return [python]

    return Assistant(engine, codec, tools, params=SamplingParams(max_new_tokens=200), system_prompt="Be brief."), engine


CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call><|im_end|>'
WRITE, LIST = (CALL.replace("print(6 * 7)", code) for code in ("open('a', 'w')", "import os; os.listdir('.')"))


async def test_a_served_answer_comes_after_the_servers_tools(tiny_tokenizer: Any) -> None:
    assistant, engine = scripted(tiny_tokenizer, CALL, "It is 42.<|im_end|>")
    pieces: list[str] = []
    request = ChatRequest(messages=[{"role": "user", "content": "6 times 7?"}])
    reply = await assistant.answer(request, lambda field, text: pieces.append(text))
    assert reply.parsed.message["content"] == "It is 42."
    assert pieces == ["It is 42."]
    prompt = tiny_tokenizer.decode(engine.exchanges[1].prompt)
    assert "<tool_response>\n42\n</tool_response>" in prompt
    assert "Be brief." in prompt
    first, second = engine.exchanges
    assert second.prompt[: len(first.prompt)] == first.prompt


async def test_files_last_for_a_conversation_and_of_a_client_that_keeps_it_for_an_answer(tiny_tokenizer: Any) -> None:
    """A server of such clients cannot know which requests belong together."""
    said = (WRITE, LIST, "One.<|im_end|>", LIST, "None.<|im_end|>", WRITE, "Done.<|im_end|>", LIST, "One.<|im_end|>")
    assistant, engine = scripted(tiny_tokenizer, *said)
    for _ in range(2):
        await assistant.answer(ChatRequest(messages=[{"role": "user", "content": "Go on."}]))
    conversation = assistant.conversation()
    await conversation.say("Write it.")
    await conversation.say("And list it.")
    await conversation.close()
    seen = [tiny_tokenizer.decode(engine.exchanges[number].prompt) for number in (2, 4, 8)]
    assert ["<tool_response>\n['a']\n" in prompt for prompt in seen] == [True, False, True]
    assert "<tool_response>\n[]\n" in seen[1]


async def test_a_served_answer_ends_before_the_clients_stop_text(tiny_tokenizer: Any) -> None:
    assistant, _ = scripted(tiny_tokenizer, CALL, "It is 42.<|im_end|>")
    pieces: list[str] = []
    request = ChatRequest(messages=[{"role": "user", "content": "6 times 7?"}], changes={"stop_strings": (" 42",)})
    reply = await assistant.answer(request, lambda field, text: pieces.append(text))
    assert (reply.parsed.message["content"], reply.stopped_by, pieces) == ("It is", " 42", ["It is"])


async def test_equal_requests_have_seeds_of_their_own_unless_one_is_set(tiny_tokenizer: Any) -> None:
    seeds: list[int] = []
    codec = TemplateCodec(tiny_tokenizer)

    def said(request: GenerationRequest, number: int) -> tuple[int, ...]:
        seeds.append(request.params.seed)
        return codec.encode("Hi.<|im_end|>")

    async def no_tools() -> list[Any]:
        return []

    for draws in (True, False):
        params = SamplingParams(max_new_tokens=20, seed=4)
        assistant = Assistant(RecordingEngine(said), codec, no_tools, params=params, draws_seeds=draws)
        hi = [{"role": "user", "content": "hi"}]
        for request in (ChatRequest(messages=hi), ChatRequest(messages=(), prompt="hi")):
            await assistant.answer(request)
            await assistant.answer(request)
        await assistant.answer(ChatRequest(messages=hi, changes={"seed": 5}))
        await assistant.conversation().say("hi")
    assert len(set(seeds[:4])) == 4
    assert seeds[4] == 5
    assert seeds[5] not in seeds[:5]
    assert seeds[6:] == [4, 4, 4, 4, 5, 4]


async def test_a_client_with_tools_gets_the_call(tiny_tokenizer: Any) -> None:
    assistant, engine = scripted(tiny_tokenizer, CALL)
    tool = {"type": "function", "function": {"name": "python", "description": "", "parameters": {"type": "object"}}}
    request = ChatRequest(messages=[{"role": "user", "content": "6 times 7?"}], tools=[tool])
    reply = await assistant.answer(request)
    assert reply.parsed.tool_calls[0].arguments == {"code": "print(6 * 7)"}
    assert len(engine.exchanges) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_takes_no_commands_from_a_model(
    tiny_tokenizer: Any, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "Be\x1b]52;c;eA==\x07 brief,\tnow.\nYes."
    assistant, _ = scripted(tiny_tokenizer, f"{said}<|im_end|>")
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", shown)
    with asyncio.Runner() as runner:
        loaded: Any = SimpleNamespace(assistant=assistant)
        talk = _ChatSession(loaded, [], as_json=False)
        talk.take(runner, "hi", interruptible=False)
    monkeypatch.undo()
    expected = said.replace("\x1b", "␛").replace("\x07", "␇") if terminal else said
    assert shown.getvalue() == f"{expected}\n"


@pytest.mark.skipif("GNU" not in (readline.__doc__ or ""), reason="editline knows no pasted texts")
def test_lines_that_are_pasted_together_are_one_message() -> None:
    code = "from rollgrad.entrypoints.cli.chat import _lines; print(next(_lines(None, terminal=True)).split())"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
    with subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while b"> " not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"\x1b[200~one\ntwo\x1b[201~\r")
        while b"']" not in shown:
            shown += os.read(ours, 4096)
        process.wait()  # which may still write the end of its line
        os.close(ours)
    assert b"\x1b[?2004h" in shown, "which has the terminal mark what is pasted"
    assert b"['one', 'two']" in shown
    assert process.returncode == 0


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_who_types_help_is_told_and_a_line_of_a_file_is_a_message(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    async def aclose() -> None:
        pass

    assistant, _ = scripted(tiny_tokenizer, "Hello.<|im_end|>")
    loaded = SimpleNamespace(assistant=assistant, name="it", aclose=aclose)
    monkeypatch.setattr("rollgrad.entrypoints.composition.serving.assistant.load_assistant", lambda arguments: loaded)
    monkeypatch.setattr("sys.stdin", Typed("/help\n"))
    assert main(["chat", "--model", "it"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("/new starts over") == (2 if terminal else 0)
    assert ("Hello." in printed.out) is not terminal


def test_images_that_are_refused_are_not_shown_with_the_next_message(
    tiny_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PIL.Image.new("RGB", (4, 4)).save(tmp_path / "red.png")
    assistant, _ = scripted(tiny_tokenizer, "Hello.<|im_end|>")
    assistant.sees_images = True  # but its codec reads none
    loaded: Any = SimpleNamespace(assistant=assistant)
    with asyncio.Runner() as runner:
        talk = _ChatSession(loaded, [], as_json=False)
        for line in (f"/image {tmp_path / 'red.png'}", "What?", "hi"):
            talk.take(runner, line, interruptible=True)
    printed = capsys.readouterr()
    assert printed.out == "Hello.\n"
    assert printed.err.count("has an image") == 1


def test_a_chat_goes_on_after_a_tool_was_lost(tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    up: list[bool] = []

    @rollgrad.tool
    def search() -> str:
        if not up:
            raise EngineError("The search server is down.")
        return "seven"

    async def tools() -> list[Any]:
        return [search]

    codec, call = TemplateCodec(tiny_tokenizer), '<tool_call>\n{"name": "search"}\n</tool_call><|im_end|>'
    replies = [call, call, "It is 7.<|im_end|>"]
    engine = RecordingEngine(lambda request, number: codec.encode(replies[number]))
    loaded: Any = SimpleNamespace(assistant=Assistant(engine, codec, tools, params=SamplingParams(max_new_tokens=99)))
    with asyncio.Runner() as runner:
        talk = _ChatSession(loaded, [], as_json=False)
        talk.take(runner, "3+4?", interruptible=True)
        up.append(True)
        talk.take(runner, "And now?", interruptible=True)
        up.clear()
        engine.exchanges.clear()
        with pytest.raises(EngineError):  # a script's chat ends
            talk.take(runner, "Again?", interruptible=False)
    printed = capsys.readouterr()
    assert printed.out == "It is 7.\n"
    assert printed.err.count("The search server is down.") == 1


def test_messages_in_json_may_have_the_files_of_a_tools_images(capsys: pytest.CaptureFixture[str]) -> None:
    opening = [{"role": "user", "content": [{"type": "image", "image": b"\x89PNG"}]}]
    turn = SimpleNamespace(
        action=SimpleNamespace(message={"content": "Yes."}, generation=SimpleNamespace(token_ids=[1])),
        result=SimpleNamespace(info={}),
    )

    class Told:
        messages = opening

        async def say(self, content: str, **how: Any) -> Any:
            return turn

    loaded: Any = SimpleNamespace(assistant=SimpleNamespace(conversation=lambda messages: Told()))
    with asyncio.Runner() as runner:
        _ChatSession(loaded, [], as_json=True).take(runner, "hi", interruptible=False)
    (part,) = json.loads(capsys.readouterr().out)["messages"][0]["content"]
    assert part["image"] == "data:application/octet-stream;base64,iVBORw=="


async def test_a_conversation_keeps_the_models_own_tokens(tiny_tokenizer: Any) -> None:
    assistant, engine = scripted(tiny_tokenizer, CALL, "It is 42.<|im_end|>", "Bye.<|im_end|>")
    conversation = assistant.conversation()
    heard: list[tuple[str, str]] = []

    await conversation.say("6 times 7?", on_piece=lambda field, text: heard.append((field, text)))
    await conversation.say("Thanks")
    messages = conversation.messages
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [message["role"] for message in messages] == roles
    assert "".join(text for field, text in heard if field == "content") == "It is 42."
    for before, after in itertools.pairwise(engine.exchanges):
        whole = (*before.prompt, *before.generation.token_ids)
        assert after.prompt[: len(whole)] == whole


async def test_a_reply_ends_where_the_models_positions_do(tiny_model_dir: Path) -> None:
    loaded = load_assistant(ServeAgentArguments(model=str(tiny_model_dir), seed=3, max_new_tokens=500))
    long = ChatRequest(messages=[{"role": "user", "content": "a" * 490}])
    reply = await loaded.assistant.answer(long)
    assert len(reply.prompt_token_ids) + len(reply.generation.token_ids) <= 512
    too_long = ChatRequest(messages=[{"role": "user", "content": "a" * 600}])
    with pytest.raises(RefusedError, match="leaves no room for a reply within the 512 that the model takes"):
        await loaded.assistant.answer(too_long)


def test_the_loaded_assistant_is_named_after_its_model(tiny_model_dir: Path) -> None:
    loaded = load_assistant(ServeAgentArguments(model=str(tiny_model_dir)))
    assert loaded.name == "tiny-llama"

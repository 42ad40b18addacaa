"""`rollgrad chat`: talks to a model in the terminal, with the tools and the conversation of training."""

import contextlib
import json
import sys
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from attrs import define

from rollgrad.application.episodes.chat_request import RefusedError
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError
from rollgrad.entrypoints.composition.serving.arguments import AssistantArguments
from rollgrad.entrypoints.terminal_text import without_commands

if TYPE_CHECKING:
    import asyncio

    from rollgrad.application.episodes.runtime import PlayedTurn
    from rollgrad.domain.episodes.messages import Message
    from rollgrad.entrypoints.composition.serving.assistant import LoadedAssistant

HELP = (
    "Type a message and Enter. /image PATH shows an image with the next message, /new starts over, /help shows this, "
    "/exit (or Ctrl-D) leaves; Ctrl-C stops a reply."
)
SHOW = "/image"
"""First word of a line that names an image, in a message or before it."""


@define(kw_only=True)
class ChatArguments(AssistantArguments):
    """Talks to a model in the terminal.

    Standard input that is no terminal is read line by line, a message each. A line `/image PATH`, of the input or at
    the beginning of --prompt, shows the model an image with the message that follows it.
    """

    messages: Path | None = None
    """JSON file with a list of messages with which the conversation begins, such as examples for the model."""
    prompt: str | None = None
    """A single message: its answer is printed, and the command ends."""
    json: bool = False
    """Print one JSON object a message: answer, messages and token ids of the last reply."""

    def check(self) -> None:
        """Refuses wrong settings, before anything is loaded.

        Raises:
            ConfigurationError: one is missing or out of range.
        """
        super().check()
        if self.prompt is not None and not self.prompt.strip():
            raise ConfigurationError("--prompt is empty: give a message, or leave it out to be asked for some.")


def chat(arguments: ChatArguments) -> None:
    """Talks until the input ends.

    Raises:
        KeyboardInterrupt: Ctrl-C while no reply is being sampled.
        ConfigurationError: a setting or the model cannot be used.
    """
    import asyncio

    arguments.check()
    opening = [] if arguments.messages is None else _read_messages(arguments.messages)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for answers alone, not for prints of libraries
        from rollgrad.entrypoints.composition.serving.assistant import load_assistant

        loaded = load_assistant(arguments)
    terminal = arguments.prompt is None and sys.stdin.isatty()
    if terminal:
        sys.stderr.write(f"{loaded.name}. {HELP}\n")
    talk = _ChatSession(loaded, opening, as_json=arguments.json)
    with asyncio.Runner() as runner:
        try:
            for line in _lines(arguments.prompt, terminal=terminal):
                if line == "/exit":
                    break
                if line == "/new":
                    runner.run(talk.close())
                    talk.restart()
                elif terminal and line == "/help":
                    sys.stderr.write(f"{HELP}\n")
                elif line:
                    talk.take(runner, line, interruptible=terminal)
            if not terminal:
                talk.check_images()
        finally:
            runner.run(talk.close())
            runner.run(loaded.aclose())


def _read_messages(path: Path) -> "list[Message]":
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--messages {path} cannot be read as JSON ({error}): name a file that holds one list of messages."
        ) from error
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ConfigurationError(f"--messages {path} must hold a list of messages, each with role and content.")
    return messages


def _lines(prompt: str | None, *, terminal: bool) -> Iterator[str]:
    if prompt is not None:
        yield prompt
        return
    while True:
        if terminal:
            with contextlib.suppress(ImportError):
                import readline  # line editing and history

                # Lines that are pasted together are one message; Python turns that off.
                readline.parse_and_bind("set enable-bracketed-paste on")
            try:
                yield input("> ").strip()
            except EOFError:
                sys.stderr.write("\n")
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
            yield line.strip()


class _ChatSession:
    """A conversation in the terminal: thinking, calls and results dimmed on stderr, answers on stdout."""

    def __init__(self, loaded: "LoadedAssistant", opening: "Sequence[Message]", *, as_json: bool) -> None:
        self._loaded = loaded
        self._opening = opening
        self._json = as_json
        self._dim = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
        self.restart()

    def restart(self) -> None:
        self._conversation = self._loaded.assistant.conversation(self._opening)
        self._images: list[str] = []

    async def close(self) -> None:
        await self._conversation.close()

    def take(self, runner: "asyncio.Runner", text: str, *, interruptible: bool) -> None:
        said = False
        try:
            text = self._show_images(text)
            if not text:
                self._dimmed(f"(with your next message: {', '.join(self._images)})")
                return
            said = True
            images = [{"type": "image", "image": path} for path in self._images]
            content = [*images, {"type": "text", "text": text}] if images else text
            turn = runner.run(
                self._conversation.say(content, on_piece=None if self._json else self._piece, on_turn=self._turn)
            )
            self._images = []
        except KeyboardInterrupt:
            if not interruptible:
                raise
            sys.stderr.write("\n(stopped)\n")
            return
        except (DataError, RefusedError, EngineError) as error:
            if not interruptible:
                raise
            if said and not isinstance(error, EngineError):  # they would be refused again, with each message to come
                self._images = []
            sys.stderr.write(f"{without_commands(str(error))}\n")
            return
        answer = turn.result.info.get("answer", turn.action.message["content"])
        if self._json:
            token_ids = list(turn.action.generation.token_ids)
            told = {"answer": answer, "messages": self._conversation.messages, "token_ids": token_ids}
            sys.stdout.write(json.dumps(told, ensure_ascii=False, default=_image_file) + "\n")
        elif answer != turn.action.message["content"]:
            _write(sys.stdout, f"{answer}\n")  # the result of a tool that ends the task
        sys.stdout.flush()

    def _show_images(self, text: str) -> str:
        """Returns a text without the lines at its beginning that name images, which the next message has.

        Raises:
            DataError: the model sees none, or one cannot be read.
        """
        from rollgrad.adapters.chat.image_files import image_bytes

        while True:
            line, _, rest = text.partition("\n")
            command, _, path = line.strip().partition(" ")
            if command != SHOW:
                return text
            path, text = path.strip(), rest
            if not path:
                raise DataError(f"{SHOW} names no file: write {SHOW} PATH.")
            if not self._loaded.assistant.sees_images:
                raise DataError(
                    f"{self._loaded.name} is shown no images: leave out {SHOW} {path}, or chat with a model that sees, "
                    "on --engine embedded or vllm, or on a server of vllm serve --enable-scale-out."
                )
            image_bytes(path)
            self._images.append(path)

    def check_images(self) -> None:
        """Checks, at the end of the input, that each image was shown with a message.

        Raises:
            DataError: no message followed one.
        """
        if self._images:
            raise DataError(
                f"No message follows {SHOW} {self._images[-1]}, so the model was not shown it: write one on the next "
                "line."
            )

    def _piece(self, field: str, text: str) -> None:
        if field == "content":
            _write(sys.stdout, text)
            sys.stdout.flush()
        else:
            self._dimmed(text, end="")

    def _turn(self, turn: "PlayedTurn") -> None:
        if self._json:
            return
        if turn.action.message["content"]:
            sys.stdout.write("\n")
        for call in turn.action.tool_calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False) if call.arguments is not None else "?"
            self._dimmed(f"{call.name}({arguments})")
        if not isinstance(turn.result.observation, str):
            from rollgrad.domain.episodes.messages import content_text

            for message in turn.result.observation:
                if message.get("visible", True):
                    self._dimmed(content_text(message["content"]))

    def _dimmed(self, text: str, end: str = "\n") -> None:
        sys.stderr.write(self._dim[0])
        _write(sys.stderr, text)
        sys.stderr.write(f"{self._dim[1]}{end}")
        sys.stderr.flush()


def _image_file(value: object) -> str:
    """Returns an image of a tool, a path or the bytes of a file, as --messages reads it."""
    if isinstance(value, bytes):
        return f"data:application/octet-stream;base64,{b64encode(value).decode()}"
    return str(value)


def _write(stream: TextIO, text: str) -> None:
    """Writes words of a model or a tool, in which no terminal finds commands."""
    stream.write(without_commands(text) if stream.isatty() else text)

"""Rewards from a language model that judges: one chat completion a reply, on an OpenAI-compatible server.

The question is a text file of the user's with placeholders for the prompt, the reply and columns of the row; the reward
is the last number in the judge's answer. Does not own: the choice of the server, and retries (`posting`).
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollgrad.adapters.rewards.posting import QUOTED, JudgeServers
from rollgrad.adapters.rewards.verifiers import last_number
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, RewardError
from rollgrad.domain.placeholders import filled, places
from rollgrad.domain.ports.reward_source import RewardSource

TOKEN_VARIABLE = "ROLLGRAD_JUDGE_TOKEN"
"""Environment variable whose value, if set, is sent as a bearer token."""
MAX_IN_FLIGHT = 64
"""Largest number of questions in flight; a reply's deadline begins when its question is sent."""
PLACES = ("prompt", "response", "query", "label")
"""Placeholders besides columns of the row."""
_SCALE = re.compile(r"(?<=[0-9])\s*(?:/|out of)\s*[0-9]+(?:\.[0-9]+)?")
"""Upper end of a scale, as in 8/10 or 8 out of 10, which is not the judgement."""
_THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)


class JudgePrompt:
    """The question to the judge, with `{prompt}`, `{response}`, `{query}`, `{label}` and `{column}` of the row.

    `{{name}}` is the text {name}; other braces are plain text.

    Args:
        text: of the file.
        path: its name, for errors.

    Raises:
        ConfigurationError: it has no placeholder of the reply.
    """

    def __init__(self, text: str, path: str) -> None:
        self._text = text
        self._path = path
        if not places(text) & {"response", "query"}:
            raise ConfigurationError(
                f"--reward.judge_prompt {path} has neither {{response}} nor {{query}}, so that the judge would see no "
                "reply: write {response} where the reply belongs."
            )

    @classmethod
    def read(cls, path: str) -> "JudgePrompt":
        """Returns the question in a file.

        Raises:
            ConfigurationError: the file cannot be read, or has no placeholder of the reply.
        """
        try:
            return cls(Path(path).read_text(encoding="utf-8"), path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--reward.judge_prompt is {path!r}, which cannot be read: {error}.") from error

    def filled(self, request: RewardRequest) -> str:
        """Returns the question about a reply.

        Raises:
            ConfigurationError: a placeholder is neither known nor a column of the row.
        """
        row = request.prompt.metadata
        known: Mapping[str, Any] = {
            **row,
            "prompt": readable(request.prompt),
            "response": request.response,
            "query": request.query,
            "label": request.label,
        }

        def value(name: str) -> str:
            if name not in known:
                raise ConfigurationError(
                    f"--reward.judge_prompt {self._path} has the placeholder {{{name}}}, which is neither one of "
                    f"{', '.join(PLACES)} nor a column of {request.prompt.datasource!r} ({', '.join(sorted(row))}): "
                    f"correct it, or write {{{{{name}}}}} for the text itself."
                )
            return str(known[name])

        return filled(self._text, value)


class LLMJudge(RewardSource):
    """Scores each reply by the last number in a judge's answer to `prompt`, asked at temperature 0; 8/10 and 8 out of
    10 are 8. Thinking (`<think>...</think>`) in the answer is left out.

    Args:
        urls: base addresses, as OpenAI's clients take them (`http://host:8000/v1`); several share the work.
        model: the name under which the servers know the judge.
        prompt: the question.
        timeout: seconds for one judgement, all attempts together.
        bounds: lowest and highest number that counts as a judgement; None: any does.

    Raises:
        ConfigurationError: a URL has no http or https scheme.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str,
        prompt: JudgePrompt,
        timeout: float,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        self._servers = JudgeServers(
            [f"{url.rstrip('/')}/chat/completions" if url else url for url in urls],
            name="judge",
            flag="reward.judge_url",
            timeout=timeout,
            token_variable=TOKEN_VARIABLE,
        )
        self._model = model
        self._prompt = prompt
        self._bounds = bounds
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward for each request, in order.

        Raises:
            RewardError: the judge did not answer in time, or its answer has no number within the bounds.
            ConfigurationError: the question has an unknown placeholder.
        """
        questions = [self._prompt.filled(request) for request in requests]
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a semaphore belongs to the loop that waited for it
            self._loop, self._slots = loop, asyncio.Semaphore(MAX_IN_FLIGHT)
        return list(await asyncio.gather(*map(self._judge, questions)))

    async def aclose(self) -> None:
        """Closes the connections; call it in the event loop that scored."""
        await self._servers.aclose()

    async def _judge(self, question: str) -> Reward:
        body = {"model": self._model, "messages": [{"role": "user", "content": question}], "temperature": 0.0}
        async with self._slots:
            url, answer = await self._servers.ask(body, about="1 reply")
        try:
            text = answer["choices"][0]["message"]["content"]
            text = _THOUGHT.sub("", text)
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(
                f"The judge {url} answered {str(answer)[:QUOTED]!r}, which is no chat completion with a text: check "
                "--reward.judge_url and --reward.judge_model."
            ) from error
        number = last_number(_SCALE.sub("", text))
        if number is None:
            raise RewardError(
                f"The judge {url} answered {text[-QUOTED:]!r}, which has no number: let --reward.judge_prompt ask for "
                "one at the end."
            )
        value = float(number)
        if self._bounds is not None and not self._bounds[0] <= value <= self._bounds[1]:
            low, high = self._bounds
            raise RewardError(
                f"The judge {url} answered {text[-QUOTED:]!r}, whose last number {value:g} is not from {low:g} to "
                f"{high:g}: let --reward.judge_prompt ask for such a number, or change --reward.judge_range."
            )
        return Reward(value=value)


def readable(prompt: Prompt) -> str:
    """Returns a prompt as a judge reads it: the user's text, or a conversation with a line of its role before each
    message."""
    if not prompt.messages:
        return prompt.text
    if len(prompt.messages) == 1:
        return _written(prompt.messages[0])
    return "\n\n".join(f"{message['role']}:\n{_written(message)}" for message in prompt.messages)


def _written(message: Message) -> str:
    """Returns the text of a message, `<image>` in the place of each image, which no judge is shown."""
    content = message.get("content") or ""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part["text"]) if part.get("type") == "text" else f"<{part.get('type')}>" for part in content)

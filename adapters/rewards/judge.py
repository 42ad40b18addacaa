"""Rewards from a language model that judges: one chat completion a reply, on an OpenAI-compatible server.

The question is a text file of the user's with placeholders for the prompt, the reply and columns of the row; the reward
is the last number in the judge's answer. Does not own: the choice of the server, and retries (`posting`).
"""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from rollgrad.adapters.rewards.posting import QUOTED, JudgeServers
from rollgrad.adapters.rewards.rubric import Criterion, criteria, weighed
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
        text: content of the file.
        path: its name, for errors.
        rubric: whether it asks about one `{criterion}` at a time.

    Raises:
        ConfigurationError: it has no placeholder of the reply, or none of the criterion that it should ask about.
    """

    def __init__(self, text: str, path: str, *, rubric: bool = False) -> None:
        self._text = text
        self._path = path
        if not places(text) & {"response", "query"}:
            raise ConfigurationError(
                f"--reward.judge_prompt {path} has neither {{response}} nor {{query}}, so that the judge would see no "
                "reply: write {response} where the reply belongs."
            )
        if rubric and "criterion" not in places(text):
            raise ConfigurationError(
                f"--reward.judge_prompt {path} has no {{criterion}}, but each criterion of --reward.judge_rubric_key "
                "is asked about by itself: write {criterion} where it belongs."
            )

    @classmethod
    def read(cls, path: str, *, rubric: bool = False) -> "JudgePrompt":
        """Returns the question in a file; raises as the class does, and where the file cannot be read."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"), path, rubric=rubric)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--reward.judge_prompt is {path!r}, which cannot be read: {error}.") from error

    def filled(self, request: RewardRequest, **more: str) -> str:
        """Returns the question about a reply; `more` are further places.

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
            **more,
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
        rubric_key: column of a row's criteria (`rubric.py`), each of which the judge is asked about by itself; a
            judgement of `bounds` is from 0 to 1 then. None asks about the reply as a whole.

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
        rubric_key: str | None = None,
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
        self._rubric_key = rubric_key
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward for each request, in order.

        Raises:
            RewardError: the judge did not answer in time, or its answer has no number within the bounds.
            ConfigurationError: the question has an unknown placeholder.
        """
        rubrics = [self._rubric(request) for request in requests]
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a semaphore belongs to the loop that waited for it
            self._loop, self._slots = loop, asyncio.Semaphore(MAX_IN_FLIGHT)
        return list(await asyncio.gather(*starmap(self._judge, zip(requests, rubrics, strict=True))))

    async def aclose(self) -> None:
        """Closes the connections; call it in the event loop that scored."""
        await self._servers.aclose()

    def _rubric(self, request: RewardRequest) -> list[Criterion]:
        return [] if self._rubric_key is None else criteria(request.prompt.metadata, self._rubric_key)

    async def _judge(self, request: RewardRequest, rubric: Sequence[Criterion]) -> Reward:
        """Returns the judgement of a reply, or what those of each criterion come to."""
        if not rubric:
            value, words = await self._judgement(self._prompt.filled(request))
            return Reward(value=value, feedback=words.strip())
        questions = [self._prompt.filled(request, criterion=criterion.text) for criterion in rubric]
        judgements = await asyncio.gather(*map(self._judgement, questions))
        low, high = self._bounds or (0.0, 1.0)
        met = [(number - low) / (high - low) for number, _ in judgements]
        said = "\n\n".join(f"{each.text}\n{words.strip()}" for each, (_, words) in zip(rubric, judgements, strict=True))
        return Reward(value=weighed(met, rubric), metrics={"rubric_met": math.fsum(met) / len(met)}, feedback=said)

    async def _judgement(self, question: str) -> tuple[float, str]:
        """Returns the number that the judge answers, and its words without its thoughts."""
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
        return value, text


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

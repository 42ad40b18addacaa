"""Resources servers of NeMo Gym, over HTTP: their tools, and their verdict on the whole conversation.

Protocol: `POST /seed_session` with the task opens a session, which is kept in cookies; `POST /<tool>` with the
arguments runs a tool; `POST /verify` with the task and the whole conversation, as items of OpenAI's Responses API,
returns `{"reward": ...}`. Calls of one reply run one after another, because sessions have state. Does not own: the
server.
"""

import asyncio
import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from attrs import frozen

from rollgrad.adapters.environments.opening import conversation
from rollgrad.adapters.system.certificates import trusted_certificates
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.messages import Action, Message, ToolResult
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.environment import StepResult, Tool

if TYPE_CHECKING:
    import httpx2

TASK = "responses_create_params"
"""Field of a task with the model's input; it is added if the prompt's metadata has none."""


class _Server:
    """One session. `lost` is the first failure of the server, if it had any."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.lost: Exception | None = None
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._client: httpx2.AsyncClient | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> "httpx2.Response":
        """Returns the answer, whatever its status.

        Raises:
            ConnectionError: the server is not there, or hung up.
            TimeoutError: it did not answer in time.
        """
        import httpx2

        from rollgrad.adapters.system.bounded_answer import UNCOMPRESSED, bound

        if self._client is None:
            # asyncio.timeout is the deadline; a timeout of the client could only end the call earlier.
            self._client = httpx2.AsyncClient(
                timeout=None,
                verify=trusted_certificates(),
                headers=UNCOMPRESSED,
                event_hooks={"response": [bound]},
            )
        try:
            async with self._turn, asyncio.timeout(self._timeout):
                with foreign_code(lambda words: ConnectionError(self._silent(path, words))):
                    return await self._client.post(f"{self.url}/{path}", json=dict(body))
        except TimeoutError:
            self.lost = TimeoutError(
                f"Waited {self._timeout:g} s for the NeMo Gym server {self.url} to answer POST /{path}."
            )
        except ConnectionError as error:
            self.lost = error
        raise self.lost

    def _silent(self, path: str, words: str) -> str:
        return f"The NeMo Gym server {self.url} did not answer POST /{path}: {words}"

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Returns the JSON of an answer that must succeed.

        Raises:
            RuntimeError: its status is not 200, or it is no JSON.
        """
        response = await self.post(path, body)
        try:
            if response.status_code == 200:
                return response.json()
        except (ValueError, RecursionError):  # no JSON, or so deep that nobody reads it
            pass
        raise RuntimeError(
            f"The NeMo Gym server {self.url} answered POST /{path} with {response.status_code} "
            f"({response.text[:200]!r})."
        )

    async def close(self) -> None:
        """Forgets the session."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


@frozen(kw_only=True)
class NemoGymTool(Tool):
    """A tool that the server runs; name, description and parameters (JSON schema) are the task's."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    server: _Server

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Returns the server's answer unchanged; a status from 400 on makes it an error that the model can react to.

        Raises:
            ConnectionError: the server is not there, or hung up.
            TimeoutError: it did not answer in time.
        """
        response = await self.server.post(self.name, arguments)
        return ToolResult(content=response.text, is_error=response.status_code >= 400)

    async def close(self) -> None:
        """Does nothing: the session belongs to the environment."""


class NemoGymEnvironment(ToolEnvironment):
    """Plays one episode on the resources server at `url`, which gives the reward for a reply without tool calls.

    The prompt's metadata is the task, a row of NeMo Gym's data: all of it goes to the server.

    Args:
        url: address of the server (http or https).
        tools: schemas of its tools, in the shape of OpenAI's Responses or Chat Completions API.
        timeout: seconds for each answer.

    Metrics: those of `ToolEnvironment`, and the numbers of the server's verdict.

    Raises:
        ConfigurationError: `url` has another scheme.
    """

    def __init__(self, url: str, *, tools: Sequence[Mapping[str, Any]] = (), timeout: float = 60.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"The NeMo Gym server's url is {url!r}, but it starts with http:// or https://: correct the url of "
                "NemoGymEnvironment."
            )
        self._server = _Server(url, timeout)
        self._schemas = [dict(schema.get("function", schema)) for schema in tools]
        self._task: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []
        super().__init__([self._tool(schema) for schema in self._schemas])

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Opens the session; the conversation is the prompt's.

        Raises:
            ConnectionError: the server is not there, or hung up.
            RuntimeError: it refused the task.
            TimeoutError: it did not answer in time.
        """
        await super().reset(prompt)
        messages = conversation(prompt)
        self._output = []
        given = {"input": messages, "tools": [{"type": "function", "strict": False, **one} for one in self._schemas]}
        self._task = {**prompt.metadata, TASK: {**given, **prompt.metadata.get(TASK, {})}}
        await self._server.ask("seed_session", self._task)
        return messages

    async def step(self, action: Action) -> StepResult:
        """Runs the calls of a reply, or has the conversation verified.

        Raises:
            ConnectionError: the server is not there, or hung up.
            RuntimeError: it gave no verdict.
            TimeoutError: it did not answer in time.
        """
        self._output += _items(action)
        result = await super().step(action)
        if self._server.lost is not None:  # no mistake of the model's: the episode fails
            raise self._server.lost
        for message in result.observation:
            if isinstance(message, Mapping) and message["role"] == "tool":
                item = {"type": "function_call_output", "call_id": message["tool_call_id"]}
                self._output.append({**item, "output": message["content"]})
        return result

    async def reward_hook(self, answer: str, prompt: Prompt) -> StepResult:
        """Returns the server's verdict.

        Raises:
            RuntimeError: it has no finite reward, or says that the server failed.
        """
        task = self._task[TASK]
        response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": "policy",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": task["tools"],
        }
        verdict = await self._server.ask("verify", {**self._task, "response": response})
        reward = verdict.get("reward") if isinstance(verdict, Mapping) else None
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise RuntimeError(f"The NeMo Gym server {self._server.url} verified with the reward {reward!r}.")
        if verdict.get("mask_sample"):
            why = verdict.get("failure_reason") or verdict.get("failure_kind") or "it gives no reason"
            raise RuntimeError(f"The NeMo Gym server {self._server.url} could not verify the episode: {why}.")
        numbers = {
            key: float(value)
            for key, value in verdict.items()
            if isinstance(value, Real) and math.isfinite(value) and key != "reward"
        }
        return StepResult(
            reward=float(reward), metrics={key: value for key, value in numbers.items() if key not in self._task}
        )

    async def close(self) -> None:
        """Forgets the session."""
        await super().close()
        await self._server.close()

    def _tool(self, schema: Mapping[str, Any]) -> NemoGymTool:
        return NemoGymTool(
            name=schema["name"],
            description=schema.get("description") or "",
            parameters=schema.get("parameters") or {"type": "object", "properties": {}},
            server=self._server,
        )


def _items(action: Action) -> list[dict[str, Any]]:
    """Returns a reply as output items of the Responses API."""
    items: list[dict[str, Any]] = []
    content = action.message.get("content")
    if content:
        part = {"type": "output_text", "text": content, "annotations": []}
        items.append(
            {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in action.tool_calls:
        if call.arguments is not None:
            arguments = json.dumps(call.arguments)
            items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments})
    return items

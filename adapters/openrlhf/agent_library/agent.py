"""`AgentSession`, one episode without a sampler, and `AgentRuntime`, which serves users with it.

The runtime plays the session with rollgrad's own loop and token ledger: sampled tokens are never made from text again.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollgrad.adapters.openrlhf.agent_library.bridge import iterate
from rollgrad.adapters.openrlhf.agent_library.environment import FINAL, Environment
from rollgrad.adapters.openrlhf.agent_library.model import MAX_TOKENS, LLMEngine
from rollgrad.adapters.openrlhf.agent_library.serving import EngineCodec, ServedEngine, ServedEnvironment
from rollgrad.adapters.openrlhf.agent_library.template import Template
from rollgrad.adapters.openrlhf.agent_library.types import AgentStepResult, Hint, ToolCall
from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.episodes.runtime import AgentRuntime as CoreRuntime
from rollgrad.application.episodes.session import AgentSession as CoreSession
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import call_entry
from rollgrad.domain.episodes.prompts import Prompt

OnText = Callable[[str], None]
NO_ANSWER = "Max steps reached without final."
"""Message to the user when the episode ends without an answer."""


class AgentSession:
    """One episode of `environment`, written with `template`."""

    def __init__(self, environment: Environment, template: Template) -> None:
        self.environment = environment
        self.template = template
        self._steps = 0

    def reset(self, initial_observation: str | None = None) -> None:
        """Starts an episode; `initial_observation` is its task."""
        self._steps = 0
        self.environment.reset(initial_observation)

    def initialize(self, initial_observation: str | None = None) -> str:
        """Starts an episode; returns its prompt: the opening turn, the task as a user's turn, and the opening of the
        first reply."""
        self.reset(initial_observation)
        turn = self.template.render_turn("user", initial_observation or "", add_generation_prompt=True)
        return self.build_system_prompt() + turn

    def build_system_prompt(self) -> str:
        """Returns the opening turn: the environment's system prompt and its tools."""
        return self.template.render_system(self.environment.system_prompt, self.environment.tools_manifest())

    def render_observations(self, observations: Sequence[str]) -> str:
        """Returns the answers to a turn's calls, for the text of one turn."""
        return "\n".join(map(self.template.render_tool_response, observations))

    def build_user_turn(self, text: str) -> str:
        """Returns the text after a reply: the end of its turn, a turn with `text`, and the opening of the next
        reply."""
        turn = self.template.render_turn("user", text, add_generation_prompt=True)
        return self.template.turn_separator + turn

    def parse_actions(self, text: str) -> tuple[bool, list[ToolCall | None] | None]:
        """Returns whether a part of a reply could not be read, and the reply's calls."""
        return self.template.extract_tool_calls_from_text(text)

    def step(
        self,
        actions: list[ToolCall | None] | None,
        *,
        label: Any = None,
        runtime: bool = False,
        parse_error: bool = False,
    ) -> AgentStepResult:
        """Carries out a turn's calls; with `runtime` nothing is rewarded."""
        observations, reward, terminated = self.environment.step(actions, label=label, runtime=runtime)
        self._steps += 1
        return AgentStepResult(
            observations=observations,
            reward=float(reward),
            terminated=bool(terminated),
            rendered_observation=self.build_user_turn(self.render_observations(observations)),
            actions=actions,
            parse_error=parse_error,
            step_index=self._steps,
        )

    def step_from_text(self, text: str, *, label: Any = None, runtime: bool = False) -> AgentStepResult:
        """Parses a reply and carries out its calls."""
        parse_error, actions = self.parse_actions(text)
        return self.step(actions, label=label, runtime=runtime, parse_error=parse_error)


class AgentRuntime:
    """Serves users: `engine` samples, `environment` acts, `template` writes. One conversation at a time."""

    def __init__(
        self,
        engine: LLMEngine,
        environment: Environment,
        template: Template,
        *,
        max_new_tokens_per_step: int = MAX_TOKENS,
    ) -> None:
        self.engine = engine
        self.environment = environment
        self.template = template
        self._params = SamplingParams(max_new_tokens=max_new_tokens_per_step)

    def run_steps(
        self, messages: Sequence[Mapping[str, Any]], *, on_text: OnText | None = None
    ) -> Iterator[dict[str, Any]]:
        """Answers a conversation; yields messages in the OpenAI shape as they arise: replies with calls, the tools'
        answers (but no hints for the model), a reply that could not be read unchanged, and at last the answer.

        `on_text` is called with each part of a reply's text, calls included, as it is sampled; it runs in another
        thread.

        Raises:
            EngineError: the engine failed.
        """
        for message, _ in self._steps(messages, on_text):
            yield message

    def run_final(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Returns the answer alone, None when the episode ends without one."""
        answer = None
        for message, is_answer in self._steps(messages):
            answer = str(message["content"]) if is_answer else answer
        return answer

    def _steps(
        self, messages: Sequence[Mapping[str, Any]], on_text: OnText | None = None
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yields messages, each with whether it is the answer."""
        session = AgentSession(self.environment, self.template)
        session.reset(str(messages[-1]["content"]) if messages else None)
        text = self.template.render_messages(
            messages=self._conversation(messages),
            tools_manifest=self.environment.tools_manifest(),
            add_generation_prompt=True,
        )
        prompt = Prompt(token_ids=tuple(self.engine.tokenize(text)), text=text)
        codec = EngineCodec(self.engine)
        engine = ServedEngine(self.engine, codec, on_text)
        core = CoreRuntime(engine, codec, max_turns=max(1, self.environment.max_steps))
        session_of_core = CoreSession(ServedEnvironment(session))
        for turn in iterate(core.play(session_of_core, TokenLedger(codec), prompt, self._params)):
            shown, answer = _shown(turn.action.text, turn.result.info["step"])
            yield from ((message, False) for message in shown)
            if answer is not None:
                yield {"role": "assistant", "content": answer}, True
            elif turn.stop_reason is not None:
                yield {"role": "assistant", "content": NO_ANSWER}, False

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns the messages after the environment's own system prompt."""
        texts, rest = [self.environment.system_prompt], list(messages)
        if rest and rest[0]["role"] == "system":
            texts.append(str(rest.pop(0)["content"]))
        return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *rest]


def _shown(text: str, step: AgentStepResult) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the messages of a turn that a user sees, and the answer that it gave."""
    calls, answer = step.actions, None
    if calls is None or step.parse_error:
        return [{"role": "assistant", "content": text}], None
    pairs = [(call, seen) for call, seen in zip(calls, step.observations, strict=False) if call is not None]
    if step.terminated:
        given = [str(seen) for call, seen in pairs if call.name == FINAL and not isinstance(seen, Hint)]
        answer = given[0] if given else None
        pairs = [(call, seen) for call, seen in pairs if call.name != FINAL]
    if not pairs:
        return [], answer
    reply = {"role": "assistant", "content": "", "tool_calls": [_openai_call(call) for call, _ in pairs]}
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": str(seen)}
        for call, seen in pairs
        if not isinstance(seen, Hint)
    ]
    return [reply, *answers], answer


def _openai_call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return call_entry(call.id, call.name, arguments)

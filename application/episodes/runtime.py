"""`AgentRuntime`: the loop of sampling and environment steps, for training and serving."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import structlog
from attrs import evolve, frozen

from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.episodes.reply import OnPiece, sample_reply, sample_tokens
from rollgrad.application.episodes.session import AgentSession
from rollgrad.application.episodes.turns import Prepared
from rollgrad.application.foreign import foreign_code
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.episodes.messages import Action, ReplyForm, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import ForeignError
from rollgrad.domain.ports.chat_codec import ChatCodec, RenderedPrompt, SeesImages
from rollgrad.domain.ports.environment import StepResult, WholePrompt
from rollgrad.domain.ports.rollout_engine import RolloutEngine

log = structlog.get_logger(__name__)

QUOTED = 80
"""Largest number of characters of an observation in a warning."""
EXAMINED = 16
"""Observations in which marks of the chat template are looked for: it takes the loop of all episodes some time."""


@frozen(kw_only=True, eq=False)
class PlayedTurn:
    """One turn: the policy's input and action, the environment's answer, and why the episode ends with it, if it
    does."""

    prompt_token_ids: tuple[int, ...]
    action: Action
    result: StepResult
    stop_reason: StopReason | None


class AgentRuntime:
    """Plays episodes.

    Args:
        engine: samples.
        codec: converts messages to tokens and back.
        max_turns: largest number of replies of an episode.
        max_tokens: tokens of one history, prompt included; None for the model's positions.
        renderer: the threads that tokenise histories. None: the event loop, so that in which order requests reach the
            engine follows from the episodes alone.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        codec: ChatCodec,
        *,
        max_turns: int,
        max_tokens: int | None = None,
        renderer: Executor | None = None,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._renderer = renderer
        self._examined = 0
        self._told_twice = False

    async def play(
        self,
        session: AgentSession,
        ledger: TokenLedger,
        prompt: Prompt,
        params: SamplingParams,
        *,
        form: ReplyForm | None = None,
        on_piece: OnPiece | None = None,
    ) -> AsyncIterator[PlayedTurn]:
        """Starts the session and plays it to its end, a turn at a time; the last turn says why it is the last.

        There is no turn if not even the opening fits into `max_tokens`. `form` is that of each reply, and
        `on_piece` is called with pieces of replies as they are sampled, if they are messages.
        """
        await session.start(prompt)
        self._note_twice(session, prompt)
        prepared, seed = await self._rendered(self._opening, session, ledger, prompt), params.seed
        for turn in range(self._max_turns):
            room = prepared.room(params.max_new_tokens, self._max_tokens)
            if room < 1:
                return
            # Each turn has a random stream of its own: with the same seed every turn would draw the same numbers.
            seeded = evolve(params, seed=(seed + turn) % 2**63, max_new_tokens=room)
            action = await self._act(prepared, ledger, seeded, session, form, on_piece)
            result = await session.advance(action)
            ledger.set_reward(ledger.turns - 1, result.reward or 0.0)
            for role, reward in result.rewards.items():
                ledger.add_reward(role, reward)
            following = None
            stop = self._ended(action, result, last=turn + 1 == self._max_turns)
            if stop is None:
                following = await self._rendered(self._next, session, ledger, result)
                stop = StopReason.LENGTH if following.room(1, self._max_tokens) < 1 else None
            yield PlayedTurn(prompt_token_ids=prepared.token_ids, action=action, result=result, stop_reason=stop)
            if following is None or stop is not None:
                return
            prepared, params = following, result.sampling or params

    async def _act(
        self,
        prepared: Prepared,
        ledger: TokenLedger,
        params: SamplingParams,
        session: AgentSession,
        form: ReplyForm | None,
        on_piece: OnPiece | None,
    ) -> Action:
        if session.messages is None:
            generation = await sample_tokens(self._engine, prepared, params)
            text = self._codec.decode(generation.token_ids)
            action = Action(text=text, generation=generation, message=assistant_message(text))
        else:
            reply = await sample_reply(self._engine, self._codec, prepared, params, form=form, on_piece=on_piece)
            action = Action(
                text=self._codec.decode(reply.generation.token_ids),
                generation=reply.generation,
                message=reply.parsed.message,
                tool_calls=reply.parsed.tool_calls,
                error=reply.parsed.error,
            )
        ledger.commit(prepared, action.generation, action.message, state=session.last.state)
        return action

    async def _rendered(self, prepare: Callable[..., Prepared], *arguments: Any) -> Prepared:
        if self._renderer is None:
            return prepare(*arguments)

        def told() -> Prepared:
            with foreign_code(ForeignError):  # from a template or a tokenizer; a future cannot hold a StopIteration
                return prepare(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._renderer, told)

    def _opening(self, session: AgentSession, ledger: TokenLedger, prompt: Prompt) -> Prepared:
        if session.messages is None:
            if isinstance(session.opening, WholePrompt):  # it has the marks of the prompt's images
                whole = self._written(session.opening, [placed.image.data for placed in prompt.images])
                return Prepared(token_ids=whole.token_ids, images=whole.images)
            added = self._written(session.opening)
            return Prepared(token_ids=(*prompt.token_ids, *added.token_ids), images=prompt.images)
        return ledger.prepare(session.messages, session.tools, role=session.role)

    def _written(self, text: str, images: Sequence[bytes] = ()) -> RenderedPrompt:
        """Returns the tokens of an environment's text, whose marks stand for `images`."""
        if isinstance(self._codec, SeesImages):
            return self._codec.marked(text, images)
        return RenderedPrompt(text=text, token_ids=self._codec.encode(text))

    def _next(self, session: AgentSession, ledger: TokenLedger, result: StepResult) -> Prepared:
        if session.messages is None:
            self._note_bare(session, str(result.observation))
            return ledger.follow(str(result.observation), result.images)
        return ledger.prepare(session.messages, session.tools, role=session.role)

    def _note_bare(self, session: AgentSession, observation: str) -> None:
        """Warns once of a text without the chat template's marks, behind a prompt that has them: the model would go on
        in a turn that has ended."""
        prompt = session.prompt
        if self._examined == EXAMINED or prompt is None or not prompt.messages or not observation.strip():
            return
        self._examined += 1
        of_prompt = prompt.token_ids[1:]  # a token that begins every sequence is no mark
        rendered = self._has_marks(of_prompt) and not isinstance(session.opening, WholePrompt)
        if rendered and not self._has_marks(self._codec.encode(observation)):
            self._examined = EXAMINED
            log.warning(
                "the environment answers with a text that has no marks of the chat template, which the prompt has, and "
                "which is put behind the reply as it is: let reset() return prompt.messages, so that it becomes the "
                "user's next message, or write the marks",
                observation=observation[:QUOTED],
            )

    def _note_twice(self, session: AgentSession, prompt: Prompt) -> None:
        """Warns once of an opening that writes a conversation around the rendered prompt: its marks stand twice then,
        or in a message, where they are text."""
        rendered = prompt.text.strip()
        if self._told_twice or not prompt.messages or not rendered:
            return
        if session.messages is None:  # a text before it alone is a turn of its own, such as a system prompt
            before, _, after = session.opening.partition(rendered)
            twice = isinstance(session.opening, WholePrompt) and bool(before.strip() and after.strip())
        else:
            twice = any(rendered in str(message.get("content")) for message in session.messages)
        if twice and self._has_marks(prompt.token_ids[1:]):
            self._told_twice = True
            log.warning(
                "the environment puts the prompt, which the chat template has rendered, into a turn of a conversation "
                "that it writes itself, so that the model sees the template's marks twice: set "
                "--data.no_apply_chat_template if it expects the prompt's own text (as files of OpenRLHF-Agent do), or "
                "let it use prompt.messages",
                prompt=rendered[:QUOTED],
            )

    def _has_marks(self, token_ids: Sequence[int]) -> bool:
        return self._codec.decode(token_ids) != self._codec.decode(token_ids, special_tokens=True)

    @staticmethod
    def _ended(action: Action, result: StepResult, *, last: bool) -> StopReason | None:
        if result.terminated:
            return StopReason.ENVIRONMENT
        if result.truncated:
            return StopReason.TURN_LIMIT
        if action.generation.stop_reason.truncated:
            return action.generation.stop_reason
        return StopReason.TURN_LIMIT if last else None

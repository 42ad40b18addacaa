"""`TokenLedger` records the input and output tokens of the engine in one rollout.

Invariants:

- A prompt that follows a recorded reply begins with exactly the tokens that the engine was given and sampled.
- A history that cannot continue in this way opens another branch: the template rewrites it, or the agent forked or
  changed it.
- Every sampled token is an action in exactly one trajectory.
- A role continues its own replies alone: what another role said is context to it.

Does not own: sampling and judging replies.
"""

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from attrs import define, evolve, field, frozen

from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.messages import Message, same_message
from rollgrad.domain.episodes.routed import recorded
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import DataError, TrajectoryError
from rollgrad.domain.ports.chat_codec import ChatCodec, RenderedPrompt, SeesImages, ToolSchema


@frozen(kw_only=True, eq=False)
class Prepared:
    """A prompt for the engine."""

    token_ids: tuple[int, ...]
    images: PlacedImages = ()
    """Images that some of the tokens stand for."""
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSchema, ...] = ()
    parent: int | None = None
    """Turn whose tokens the prompt continues; None opens a branch."""
    role: str = ""
    """Who replies (`Trajectory.role`)."""
    continues: int = 0
    """As in `GenerationRequest`, and so are the next two."""
    continues_version: int | None = None
    known_experts: int = 0

    def room(self, wanted: int, max_tokens: int | None) -> int:
        """Returns how many of `wanted` more tokens fit into `max_tokens` (None: no limit); below 1 none do."""
        return wanted if max_tokens is None else min(wanted, max_tokens - len(self.token_ids))


@define(kw_only=True, eq=False)
class _Turn:
    prepared: Prepared
    generation: Generation
    messages: tuple[Message, ...]
    keys: tuple[str, ...]
    tools: str
    state: int
    reward: float = 0.0
    dropped: bool = False
    token_ids: tuple[int, ...] = field(init=False)
    """Tokens of prompt and reply, with which a continuation begins."""
    known_experts: int = field(init=False)
    """Number of the first of them whose experts this turn and those before it have."""

    def __attrs_post_init__(self) -> None:
        self.token_ids = (*self.prepared.token_ids, *self.generation.token_ids)
        self.known_experts = recorded(self.generation.routed, self.prepared.known_experts)

    @property
    def version(self) -> int:
        """Version of the policy that sampled the last token."""
        return int(self.generation.versions[-1])

    def followed_by(self, added: RenderedPrompt) -> PlacedImages:
        """Returns the images of the turn's tokens and those of the tokens added to them."""
        return (*self.prepared.images, *(placed.moved(len(self.token_ids)) for placed in added.images))

    def shows(self, images: PlacedImages) -> bool:
        """Returns whether the turn's tokens have the first of `images`, and no others."""
        return self.prepared.images == tuple(placed for placed in images if placed.start < len(self.token_ids))


@frozen(kw_only=True, eq=False)
class LatestReply:
    """The latest reply."""

    message: Message
    token_ids: tuple[int, ...]
    """Tokens from the beginning of its branch to its end."""
    opening: int
    """Number of tokens before the branch's first reply."""
    version: int
    """Version of the policy that sampled its last token."""
    stop_reason: StopReason
    """Why it ended."""
    images: PlacedImages = ()
    """Images that some of the tokens stand for."""


class TokenLedger:
    """Records one rollout; `codec` renders messages that the recorded tokens do not cover."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._turns: list[_Turn] = []

    @property
    def turns(self) -> int:
        """Number of replies recorded so far."""
        return len(self._turns)

    @property
    def dropped(self) -> int:
        """Number of these that are left out."""
        return sum(turn.dropped for turn in self._turns)

    @property
    def branches(self) -> int:
        """Number of trajectories that `trajectories` returns: 1 for a rollout without branches."""
        return len(self._leaves())

    def latest(self) -> LatestReply:
        """Returns the latest reply that is not left out, with all tokens before it.

        Raises:
            TrajectoryError: there is none.
        """
        kept = [index for index, turn in enumerate(self._turns) if not turn.dropped]
        if not kept:
            raise TrajectoryError("There is no reply yet that could be judged.")
        first = latest = self._turns[kept[-1]]
        while first.prepared.parent is not None:
            first = self._turns[first.prepared.parent]
        return LatestReply(
            message=latest.messages[-1],
            token_ids=latest.token_ids,
            opening=len(first.prepared.token_ids),
            version=latest.version,
            stop_reason=latest.generation.stop_reason,
            images=latest.prepared.images,
        )

    @property
    def roles(self) -> list[str]:
        """The roles that have replied."""
        return [*dict.fromkeys(turn.prepared.role for turn in self._turns if not turn.dropped)]

    def prepare(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        role: str = "",
        follows: int | None = None,
    ) -> Prepared:
        """Returns the prompt for a reply of `role` to `messages`.

        The longest recorded conversation that `messages` continue is found by its content (`same_message`), and its
        recorded tokens are used. So it has no effect if clients drop or reorder parts of the history. Of several that
        say the same, it is the turn `follows`, else the latest.

        Raises:
            DataError: the template refuses the messages.
        """
        keys, written = tuple(map(same_message, messages)), _written(tools)
        best: int | None = None
        highest = (0, False, 0)
        for index, turn in enumerate(self._turns):
            same = turn.tools == written and turn.prepared.role == role
            continues = same and len(turn.keys) < len(keys) and keys[: len(turn.keys)] == turn.keys
            rank = len(turn.keys), index == follows, index
            if continues and not turn.dropped and rank > highest:
                best, highest = index, rank
        if best is not None:
            turn = self._turns[best]
            new = tuple(messages[len(turn.keys) :])
            messages = (*turn.messages, *new)
            between = self._between(turn, new, tools)
            if between is not None:
                return self._with_history(
                    Prepared(
                        token_ids=(*turn.token_ids, *between.token_ids),
                        images=turn.followed_by(between),
                        messages=messages,
                        tools=tuple(tools),
                        parent=best,
                        role=role,
                    )
                )
        rendered = self._codec.render(messages, tools)
        return self._with_history(
            Prepared(
                token_ids=rendered.token_ids,
                images=rendered.images,
                messages=tuple(messages),
                tools=tuple(tools),
                parent=self._longest_prefix(rendered, role),
                role=role,
            )
        )

    def _with_history(self, prepared: Prepared) -> Prepared:
        """Returns a prompt with what is known of the tokens of its parent, with which it begins."""
        if prepared.parent is None:
            return prepared
        turn = self._turns[prepared.parent]
        return evolve(
            prepared,
            continues=len(turn.token_ids),
            continues_version=turn.version,
            known_experts=turn.known_experts,
        )

    def _between(self, turn: _Turn, new: Sequence[Message], tools: Sequence[ToolSchema]) -> RenderedPrompt | None:
        reply = turn.generation.token_ids
        if isinstance(self._codec, SeesImages):
            return self._codec.continued(turn.messages, new, tools, reply_token_ids=reply)
        token_ids = self._codec.extend(turn.messages, new, tools, reply_token_ids=reply)
        return None if token_ids is None else RenderedPrompt(text="", token_ids=token_ids)

    def follow(self, text: str, images: Sequence[Any] = ()) -> Prepared:
        """Returns the prompt that continues the latest reply with `text`, in which special tokens are real, the marks
        of `images` too.

        Raises:
            TrajectoryError: nothing has been sampled yet.
            DataError: images cannot be read, or the codec's model sees none.
        """
        if not self._turns:
            raise TrajectoryError("There is no reply yet that a text could follow.")
        latest = self._turns[-1]
        if images and not isinstance(self._codec, SeesImages):
            raise DataError("The environment returned images, but the model sees none: leave them out.")
        added = (
            self._codec.marked(text, images, earlier=len(latest.prepared.images))
            if isinstance(self._codec, SeesImages)
            else RenderedPrompt(text=text, token_ids=self._codec.encode(text))
        )
        return self._with_history(
            Prepared(
                token_ids=(*latest.token_ids, *added.token_ids),
                images=latest.followed_by(added),
                messages=(*latest.messages, {"role": "user", "content": text}),
                tools=latest.prepared.tools,
                parent=len(self._turns) - 1,
                role=latest.prepared.role,
            )
        )

    def commit(self, prepared: Prepared, generation: Generation, message: Message, *, state: str | None = None) -> int:
        """Records the reply to `prepared`, and its message; returns the turn's number. `state` names the state in which
        it was chosen; by default it is what was said since the reply before it."""
        messages = (*prepared.messages, message)
        if prepared.parent is not None:
            self._turns[prepared.parent].dropped = False  # it is continued, so it counts after all
        self._turns.append(
            _Turn(
                prepared=prepared,
                generation=generation,
                messages=messages,
                keys=tuple(map(same_message, messages)),
                tools=_written(prepared.tools),
                state=_state(prepared, state),
            )
        )
        return len(self._turns) - 1

    def set_reward(self, turn: int, reward: float) -> None:
        """Sets the reward of one turn, replacing an earlier one."""
        self._turns[turn].reward = reward

    def add_reward(self, role: str, reward: float) -> None:
        """Adds to the reward of the latest turn of a role; of one that has not replied nothing is known."""
        turns = [turn for turn in self._turns if turn.prepared.role == role and not turn.dropped]
        if turns:
            turns[-1].reward += reward

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been sampled."""
        return all(turn.dropped for turn in self._turns)

    def reward_last(self, reward: float, role: str | None = None) -> None:
        """Sets the episode's reward of a role, on its latest reply; without `role`, of each."""
        latest = {turn.prepared.role: index for index, turn in enumerate(self._turns) if not turn.dropped}
        for index in latest.values() if role is None else [latest[role]]:
            self.set_reward(index, reward)

    def drop_leaf(self, turn: int) -> None:
        """Leaves a turn out, unless another turn continues it."""
        self._turns[turn].dropped = all(other.prepared.parent != turn for other in self._turns)

    def trajectories(
        self,
        *,
        group_id: int,
        sample_id: int,
        stop_reason: StopReason,
        score: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reward_parts: Mapping[str, float] | None = None,
        answer: str | None = None,
        feedback: str | None = None,
    ) -> list[Trajectory]:
        """Returns one trajectory for each branch, all of the same sample; `score` defaults to the sum of all rewards of
        the branch's role.

        A turn that several branches share is an action in the first of them and context in the others.
        `reward_parts` belong to all that a role did, so that only the last branch of each has them.

        Raises:
            TrajectoryError: nothing was sampled.
        """
        leaves = self._leaves()
        if not leaves:
            raise TrajectoryError("The episode has no sampled token: there is nothing to learn from.")
        earned: dict[str, list[float]] = {role: [] for role in self.roles}
        for turn in self._turns:
            if not turn.dropped:
                earned[turn.prepared.role].append(turn.reward)
        last = {self._turns[leaf].prepared.role: leaf for leaf in leaves}
        trained: set[int] = set()
        result = []
        for leaf in leaves:
            role = self._turns[leaf].prepared.role
            built = self._branch(leaf, trained, group_id, sample_id).build(
                stop_reason=stop_reason,
                score=math.fsum(earned[role]) if score is None else score,
                metrics=metrics,
                reward_parts=reward_parts if leaf == last[role] else None,
                answer=answer,
                feedback=feedback,
                role=role,
            )
            result.append(built)
        return result

    def _leaves(self) -> list[int]:
        continued = {turn.prepared.parent for turn in self._turns if not turn.dropped}
        return [i for i, turn in enumerate(self._turns) if not turn.dropped and i not in continued]

    def _branch(self, leaf: int, trained: set[int], group_id: int, sample_id: int) -> TrajectoryBuilder:
        path: list[int] = []
        index: int | None = leaf
        while index is not None:
            path.append(index)
            index = self._turns[index].prepared.parent
        new = [index for index in reversed(path) if index not in trained]
        trained.update(new)
        builder = TrajectoryBuilder(
            self._turns[new[0]].prepared.token_ids,
            group_id=group_id,
            sample_id=sample_id,
            images=self._turns[leaf].prepared.images,
        )
        for index in path[len(new) :][::-1]:
            builder.add_routed(self._turns[index].generation.routed)
        for index in new:
            turn = self._turns[index]
            builder.expect_prefix(turn.prepared.token_ids)
            builder.add_observation(turn.prepared.token_ids[len(builder.token_ids) :])
            builder.add_action(turn.generation, turn=index, state=turn.state)
            builder.set_reward(turn.reward)
        return builder

    def _longest_prefix(self, prompt: RenderedPrompt, role: str) -> int | None:
        token_ids, best = prompt.token_ids, None
        for index, turn in enumerate(self._turns):
            longer = best is None or len(turn.token_ids) > len(self._turns[best].token_ids)
            begins = token_ids[: len(turn.token_ids)] == turn.token_ids
            if longer and begins and turn.prepared.role == role and not turn.dropped and turn.shows(prompt.images):
                best = index
        return best


def _state(prepared: Prepared, name: str | None) -> int:
    """Returns the number of a state, from its name or from the messages after the latest reply. Without any messages,
    before the first reply of an episode in plain text, the tokens stand for them."""
    said: list[str] = []
    for message in reversed(prepared.messages):
        if message["role"] == "assistant":
            break
        said.append(same_message(message))
    what = json.dumps(["named", name] if name is not None else ["said", said or prepared.token_ids])
    return int.from_bytes(blake2b(what.encode(errors="surrogatepass"), digest_size=8).digest(), "big", signed=True)


def _written(tools: Sequence[ToolSchema]) -> str:
    return json.dumps(list(tools), sort_keys=True, default=str)

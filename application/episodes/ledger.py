"""`TokenLedger` records the input and output tokens of the engine in one rollout.

Invariants:

- A prompt that follows a recorded reply begins with exactly the tokens that the engine was given and sampled.
- A history that cannot continue in this way opens another branch: the template rewrites it, or the agent forked or
  changed it.
- Every sampled token is an action in exactly one trajectory.
- A role continues its own replies alone: what another role said is context to it.

Does not own: sampling and judging replies.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from attrs import evolve

from rollgrad.application.episodes.digests import digests, followed, state_number
from rollgrad.application.episodes.turns import LatestReply, Prepared, Turn
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.episodes.routed import recorded
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import DataError, TrajectoryError
from rollgrad.domain.ports.chat_codec import ChatCodec, RenderedPrompt, SeesImages, ToolSchema


class TokenLedger:
    """Records one rollout; `codec` renders messages that the recorded tokens do not cover."""

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._turns: list[Turn] = []
        self._same: dict[bytes, list[int]] = {}
        """Turns by the digest of their conversation."""

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
        latest = self._turns[kept[-1]]
        return LatestReply(
            message=latest.messages[-1],
            token_ids=self.token_ids(kept[-1]),
            opening=len(self._turns[self._path(kept[-1])[0]].added),
            version=latest.version,
            stop_reason=latest.generation.stop_reason,
            images=latest.images,
        )

    def token_ids(self, turn: int) -> tuple[int, ...]:
        """Returns the tokens from the beginning of a turn's branch to the end of its reply, with which a continuation
        begins."""
        return tuple(chain.from_iterable(self._turns[index].own for index in self._path(turn)))

    def _path(self, turn: int) -> list[int]:
        """Returns the turns from the beginning of a branch to `turn`."""
        path: list[int] = []
        index: int | None = turn
        while index is not None:
            path.append(index)
            index = self._turns[index].parent
        return path[::-1]

    @property
    def roles(self) -> list[str]:
        """The roles that have replied."""
        return [*dict.fromkeys(turn.role for turn in self._turns if not turn.dropped)]

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
        said = digests(messages, tools, role)
        best = self._longest_known(said[1:-1], follows)
        if best is not None:
            turn = self._turns[best]
            new = tuple(messages[len(turn.messages) :])
            messages = (*turn.messages, *new)
            between = self._between(turn, new, tools)
            if between is not None:
                return self._with_history(
                    Prepared(
                        token_ids=(*self.token_ids(best), *between.token_ids),
                        images=turn.followed_by(between),
                        messages=messages,
                        tools=tuple(tools),
                        parent=best,
                        role=role,
                        conversation=said[-1],
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
                conversation=said[-1],
            )
        )

    def _longest_known(self, said: Sequence[bytes], follows: int | None) -> int | None:
        """Returns the turn at the end of the last of these conversations that is recorded: `follows` if it is one of
        several, else the latest; None if none is."""
        for conversation in reversed(said):
            turns = [index for index in self._same.get(conversation, ()) if not self._turns[index].dropped]
            if turns:
                return follows if follows in turns else turns[-1]
        return None

    def _with_history(self, prepared: Prepared) -> Prepared:
        """Returns a prompt with what is known of the tokens of its parent, with which it begins."""
        if prepared.parent is None:
            return prepared
        turn = self._turns[prepared.parent]
        return evolve(
            prepared,
            continues=turn.length,
            continues_version=turn.version,
            known_experts=turn.known_experts,
        )

    def _between(self, turn: Turn, new: Sequence[Message], tools: Sequence[ToolSchema]) -> RenderedPrompt | None:
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
            self._codec.marked(text, images, earlier=len(latest.images))
            if isinstance(self._codec, SeesImages)
            else RenderedPrompt(text=text, token_ids=self._codec.encode(text))
        )
        message = {"role": "user", "content": text}
        return self._with_history(
            Prepared(
                token_ids=(*self.token_ids(len(self._turns) - 1), *added.token_ids),
                images=latest.followed_by(added),
                messages=(*latest.messages, message),
                tools=latest.tools,
                parent=len(self._turns) - 1,
                role=latest.role,
                conversation=followed(latest.conversation, message),
            )
        )

    def commit(self, prepared: Prepared, generation: Generation, message: Message, *, state: str | None = None) -> int:
        """Records the reply to `prepared`, and its message; returns the turn's number. `state` names the state in which
        it was chosen; by default it is what was said since the reply before it.

        Raises:
            TrajectoryError: the prompt does not begin with the tokens of the turn that it continues.
        """
        before = () if prepared.parent is None else self.token_ids(prepared.parent)
        if prepared.token_ids[: len(before)] != before:
            raise TrajectoryError(
                f"The {len(before)} recorded tokens are not a prefix of the {len(prepared.token_ids)} given: the "
                "history was rewritten, so it must start another trajectory of the same sample."
            )
        if prepared.parent is not None:
            self._turns[prepared.parent].dropped = False  # it is continued, so it counts after all
        said = prepared.conversation or digests(prepared.messages, prepared.tools, prepared.role)[-1]
        turn = Turn(
            parent=prepared.parent,
            role=prepared.role,
            added=prepared.token_ids[len(before) :],
            generation=generation,
            length=len(prepared.token_ids) + len(generation.token_ids),
            images=prepared.images,
            messages=(*prepared.messages, message),
            tools=prepared.tools,
            conversation=followed(said, message),
            state=state_number(prepared, state),
            known_experts=recorded(generation.routed, prepared.known_experts),
        )
        self._turns.append(turn)
        self._same.setdefault(turn.conversation, []).append(len(self._turns) - 1)
        return len(self._turns) - 1

    def set_reward(self, turn: int, reward: float) -> None:
        """Sets the reward of one turn, replacing an earlier one."""
        self._turns[turn].reward = reward

    def add_reward(self, role: str, reward: float) -> None:
        """Adds to the reward of the latest turn of a role; of one that has not replied nothing is known."""
        turns = [turn for turn in self._turns if turn.role == role and not turn.dropped]
        if turns:
            turns[-1].reward += reward

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been sampled."""
        return all(turn.dropped for turn in self._turns)

    def reward_last(self, reward: float, role: str | None = None) -> None:
        """Sets the episode's reward of a role, on its latest reply; without `role`, of each."""
        latest = {turn.role: index for index, turn in enumerate(self._turns) if not turn.dropped}
        for index in latest.values() if role is None else [latest[role]]:
            self.set_reward(index, reward)

    def drop_leaf(self, turn: int) -> None:
        """Leaves a turn out, unless another turn continues it."""
        self._turns[turn].dropped = all(other.parent != turn for other in self._turns)

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
                earned[turn.role].append(turn.reward)
        last = {self._turns[leaf].role: leaf for leaf in leaves}
        trained: set[int] = set()
        result = []
        for leaf in leaves:
            role = self._turns[leaf].role
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
        continued = {turn.parent for turn in self._turns if not turn.dropped}
        return [i for i, turn in enumerate(self._turns) if not turn.dropped and i not in continued]

    def _branch(self, leaf: int, trained: set[int], group_id: int, sample_id: int) -> TrajectoryBuilder:
        path = self._path(leaf)
        new = [index for index in path if index not in trained]
        trained.update(new)
        first = self._turns[new[0]]
        earlier = () if first.parent is None else self.token_ids(first.parent)
        builder = TrajectoryBuilder(
            (*earlier, *first.added), group_id=group_id, sample_id=sample_id, images=self._turns[leaf].images
        )
        for index in path[: len(path) - len(new)]:
            builder.add_routed(self._turns[index].generation.routed)
        for index in new:
            turn = self._turns[index]
            if turn is not first:
                builder.add_observation(turn.added)
            builder.add_action(turn.generation, turn=index, state=turn.state)
            builder.set_reward(turn.reward)
        return builder

    def _longest_prefix(self, prompt: RenderedPrompt, role: str) -> int | None:
        best: int | None = None
        begun: set[int | None] = {None}  # turns whose tokens the prompt begins with
        for index, turn in enumerate(self._turns):
            if turn.parent not in begun or prompt.token_ids[turn.begin : turn.length] != tuple(turn.own):
                continue
            begun.add(index)
            longer = best is None or turn.length > self._turns[best].length
            if longer and turn.role == role and not turn.dropped and turn.shows(prompt.images):
                best = index
        return best

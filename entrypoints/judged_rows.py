"""Rows of replies, judged: their requests to a reward source, and their rewards."""

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from pathlib import Path

from attrs import evolve

from rollgrad.adapters.chat.image_files import image_bytes
from rollgrad.adapters.chat.image_text import known_images
from rollgrad.adapters.chat.pictures import has_images
from rollgrad.adapters.data.replies import FAILURE, Row, row_prompt
from rollgrad.application.episodes.judging import judge_request
from rollgrad.application.rollouts.generation import scores
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.rewards import FailureKind, Reward, RewardRequest, RolloutFailure
from rollgrad.domain.errors import DataError, RewardError
from rollgrad.entrypoints.composition.rl.container import RLContainer

Made = tuple[Row, RolloutFailure | None]
"""Row of a reply, and why it failed; None if it did not."""


async def judged_rows(container: RLContainer, rows: Iterable[Row], *, at_once: int) -> AsyncIterator[Made]:
    """Yields rows with their rewards, `at_once` of which are asked for at a time, in their order."""
    asked: deque[Row] = deque()

    def requests() -> Iterator[RewardRequest]:
        for row in rows:
            asked.append(row)
            yield _request(container, row)

    async with aclosing(scores(container.reward(), requests(), at_once=at_once)) as rewards:  # type: ignore[type-var]
        async for reward in rewards:
            row = asked.popleft()
            failure = None
            if isinstance(reward, RewardError):
                failure = RolloutFailure(
                    kind=FailureKind.REWARD, message=str(reward), group_id=row["row"], sample_id=row["sample"]
                )
            yield _with_reward(row, reward), failure


def check_sight(row: Row, source: Path, *, sees: bool) -> None:
    """Checks that a reward model can be shown the images of a row of the file `source`; `sees`: it is shown any.

    Raises:
        DataError: it cannot.
    """
    within = any(map(has_images, row.get("messages", ())))
    if not (row.get("images") or within):
        return
    where = f"Row {row['row']} of {source} is a reply to images, "
    if not sees:
        raise DataError(f"{where}which a reward model sees with --data.image_key images: set it.")
    if not (row.get("images") and row.get("image_places") and row.get("tokens")):
        raise DataError(
            f"{where}whose places among its tokens are not known, so that no reward model can judge it: score it by "
            "--reward.function_path or --reward.verifier, or take rows that `rollgrad generate` writes."
        )


def _request(container: RLContainer, row: Row) -> RewardRequest:
    try:
        prompt = row_prompt(row)
        if container.config().data.image_key is not None and row.get("image_places"):
            prompt = evolve(prompt, images=_placed(container, row))
    except DataError as error:
        raise DataError(f"Row {row['row']} of --input: {error}") from error
    stop = StopReason(row.get("stop_reason", StopReason.STOP))
    if not (prompt.token_ids and row.get("tokens")):
        return RewardRequest(prompt=prompt, response=row["completion"], stop_reason=stop)
    return judge_request(
        container.codec(),
        prompt,
        (*prompt.token_ids, *row["tokens"]),
        opening=len(prompt.token_ids),
        response=row["completion"],
        stop_reason=stop,
        step=row.get("version", 0),
        images=prompt.images,
    )


def _placed(container: RLContainer, row: Row) -> PlacedImages:
    """Returns the images of a row among its tokens, in a run that reads images."""
    renderer = container.image_renderer()
    assert renderer is not None
    files = [image_bytes(path) for path in row.get("images", ())]
    return known_images(renderer, row.get("prompt_tokens", ()), files, row["image_places"])


def _with_reward(row: Row, reward: Reward | RewardError | None) -> Row:
    row = {name: value for name, value in row.items() if name != FAILURE}  # without the failure of an earlier judgement
    if reward is None:
        return {**row, "reward": None, "scores": None, "metrics": {}}
    if isinstance(reward, RewardError):
        return {**row, "reward": None, "scores": None, "metrics": {}, FAILURE: str(reward)}
    score = reward.value if reward.score is None else reward.score
    steps = {"steps": list(reward.steps)} if reward.steps else {}
    metrics = {**reward.parts, **reward.metrics}
    said = {} if reward.feedback is None else {"feedback": reward.feedback}
    return {**row, "reward": reward.value, "scores": score, "metrics": metrics, **steps, **said}

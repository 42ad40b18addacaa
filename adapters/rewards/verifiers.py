"""Built-in verifiable rewards: last_number, exact_match, format and math.

Invariant: each reward is 0 or 1. Checks in linear time run inline; math-verify and the user's pattern, which can
take for ever on some replies, run in isolated processes (JudgePool). Does not own: the combination of several rewards.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from rollgrad.adapters.rewards import format_worker, math_worker
from rollgrad.adapters.rewards.judge_pool import JudgePool, Verdict
from rollgrad.application.settings.sections.reward import JudgeIsolation, Verifier
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, RewardError
from rollgrad.domain.ports.reward_source import RewardSource

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_EXPONENT = r"(?:[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z]|\.[0-9]))?"
_NUMBER = re.compile(rf"(?:(?<![0-9A-Za-z)])[-+])?\$?(?:{_DIGITS}){_EXPONENT}")
"""Integers and decimals, with thousands separators or an exponent (1.5e3); a sign after a digit, letter or bracket is
an operator."""


def last_number(text: str) -> Decimal | None:
    """Returns the last number in `text`, or None.

    >>> last_number("5 apples cost $1,234.50.")
    Decimal('1234.50')
    >>> last_number("10-4 = -6")
    Decimal('-6')
    """
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def boxed(text: str) -> str | None:
    """Returns what stands in the last \\boxed{...} of `text`, without spaces, or None.

    >>> boxed(r"So \\boxed{1}, no: $\\boxed{\\frac{1} {2}}$.")
    '\\\\frac{1}{2}'
    """
    start = text.rfind(math_worker.BOX)
    end = math_worker.box_end(text, start) if start >= 0 else None
    return None if end is None else "".join(text[start + len(math_worker.BOX) : end - 1].split())


def answer_of(kind: Verifier, response: str) -> str | None:
    """Returns what a reply answers, so that replies with the same answer have the same text; None if there is no
    answer, and for `format`. For `last_number` it is that number, for `exact_match` the whole reply, and for `math` the
    content of its last box, or else its last number, within `<answer>` tags if there are any."""
    if kind is Verifier.FORMAT:
        return None
    if kind is Verifier.EXACT_MATCH:
        return response.strip()
    box = None
    if kind is Verifier.MATH:
        response = math_worker.answered(response)
        box = boxed(response)
    number = last_number(response if box is None else "")
    return box if number is None else _shortest(number)


def _shortest(number: Decimal) -> str:
    """Returns the shortest text of a number, whatever its length: arithmetic on decimals would round it.

    >>> _shortest(Decimal("-12.50")), _shortest(Decimal("-0.0")), _shortest(Decimal("100"))
    ('-12.5', '0', '100')
    """
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def label_problem(kind: Verifier, label: Any, column: str | None = None) -> str | None:
    """Returns why the verifier `kind` cannot compare with `label`, which is of `column`, as a sentence; None
    if it can."""
    if kind is Verifier.FORMAT:
        return None
    if label is None:
        return (
            f"--reward.verifier {kind} compares with a label, and there is none: set --data.label_key to the column "
            "with the answer."
        )
    if isinstance(label, Mapping):
        names = [str(name) for name in label]
        name = "ground_truth" if "ground_truth" in names or not names else names[0]
        return (
            f"The label is a mapping of {', '.join(names) or 'nothing'}, but --reward.verifier {kind} compares with a "
            f"text or a number: name one of them by a dotted key, such as --data.label_key {column or 'COLUMN'}.{name}."
        )
    if isinstance(label, list | tuple):
        return (
            f"The label is the list {label!r}, but --reward.verifier {kind} compares with a text or a number: set "
            "--data.label_key to a column with one answer a row."
        )
    if kind is Verifier.LAST_NUMBER and _label_number(label) is None:
        return (
            f"The label {label!r} has no number, which --reward.verifier last_number compares with: "
            "set --data.label_key to a column of numbers."
        )
    return None


def _label_number(label: Any) -> Decimal | None:
    return Decimal(str(label)) if isinstance(label, (int, float)) else last_number(str(label))


class VerifierReward(RewardSource):
    """Scores replies with the built-in verifier `kind`.

    Args:
        kind: the verifier.
        timeout: seconds that one judgement of the math or format verifier may take; a reply that takes longer scores 0
            and counts in the metric `judge_timed_out`, one that breaks the judge in `judge_failed`.
        format_pattern: regular expression that the whole reply must match.
        isolation: isolation of the processes of these verifiers.
        unlabelled: a reply without a label that it can be compared with scores 0, for something else that judges it by
            its answer.

    Raises:
        ConfigurationError: the format verifier has no pattern, or one that is not a regular expression, or the machine
            cannot isolate judges.
    """

    def __init__(
        self,
        kind: Verifier,
        *,
        timeout: float,
        format_pattern: str | None = None,
        isolation: JudgeIsolation = JudgeIsolation.SANDBOX,
        unlabelled: bool = False,
    ) -> None:
        self._kind = kind
        self._unlabelled = unlabelled
        self._pattern = _checked(format_pattern) if kind is Verifier.FORMAT else ""
        worker = {Verifier.MATH: math_worker, Verifier.FORMAT: format_worker}.get(kind)
        self._pool = JudgePool(worker, timeout=timeout, isolation=isolation) if worker else None

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward of 0 or 1 for each request, in order.

        Raises:
            RewardError: a label is missing, or this verifier cannot compare with it.
        """
        return list(await asyncio.gather(*(self._judge(request) for request in requests)))

    def close(self) -> None:
        """Ends the worker processes; idempotent."""
        if self._pool is not None:
            self._pool.close()

    async def _judge(self, request: RewardRequest) -> Reward:
        label = request.label
        answer = answer_of(self._kind, request.response)
        problem = label_problem(self._kind, label)
        if problem is not None and self._unlabelled:
            return Reward(value=0.0, answer=answer)
        if problem is not None:
            raise RewardError(f"A prompt of {request.prompt.datasource!r}: {problem}")
        if self._pool is not None:
            verdict = await self._verdict(self._pool, str(label), request.response)
            return Reward(value=verdict.value, metrics=verdict.metrics, answer=answer)
        if self._kind is Verifier.LAST_NUMBER:
            return Reward(value=float(last_number(request.response) == _label_number(label)), answer=answer)
        return Reward(value=float(request.response.strip() == str(label).strip()), answer=answer)

    async def _verdict(self, pool: JudgePool, label: str, response: str) -> Verdict:
        if self._kind is Verifier.FORMAT:
            return await pool.judge(format_worker.matches, response, common=(self._pattern,))
        verdict = await pool.judge(math_worker.grade, label, response)
        # The label is checked without the reply, which could have forged the answer in its own judgement.
        if verdict.failed and (await pool.judge(math_worker.readable, label)) == Verdict(value=0.0):
            raise RewardError(
                f"The label {label!r} holds no mathematics that math-verify can read: set --data.label_key to a column "
                "of final answers, or choose another --reward.verifier."
            )
        return verdict


def _checked(pattern: str | None) -> str:
    if not pattern:
        raise ConfigurationError(
            "--reward.verifier format needs the pattern that a whole reply must match: set --reward.format_pattern."
        )
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigurationError(
            f"--reward.format_pattern is {pattern!r}, which is not a regular expression: {error}."
        ) from error
    return pattern

"""Built-in verifiers; the math verifier with real processes that hang and are killed."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgrad.adapters.rewards.verifiers import VerifierReward, answer_of
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, RewardError

TIMEOUT = 60.0
SHORT = 0.3
"""For a judgement that would take for ever."""
ENDLESS = "$9^{9^{9^{9}}}$"
"""Mathematics that evaluates for ever."""


def ask(response: str, label: Any) -> RewardRequest:
    prompt = Prompt(token_ids=(1,), text="?", label=label)
    return RewardRequest(prompt=prompt, response=response, stop_reason=StopReason.STOP)


async def value(kind: Verifier, response: str, label: Any, pattern: str | None = None) -> float:
    verifier = VerifierReward(kind, timeout=TIMEOUT, format_pattern=pattern)
    return (await verifier.score([ask(response, label)]))[0].value


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("7", "7"),
        ("First 3, then 4, so 7.", 7),
        ("It costs $1,234.50", "1234.5"),
        ("= -4", -4),
        ("\N{MINUS SIGN}4", "-4"),
        ("-$5", "-5"),
        ("10-4", "4"),
        ("7.0", "7"),
        ("+7", 7.0),
        (".5", 0.5),
        ("12,345,678", "12345678"),
        ("0.0000001", 1e-07),
        ("1e-07", "0.0000001"),
        ("It is 1.5e3.", 1500),
        ("so 72", "48/2 = 24\n#### 72"),
    ],
)
async def test_last_number_equal(response: str, label: Any) -> None:
    assert await value(Verifier.LAST_NUMBER, response, label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("7 or 8", "7"),
        ("", "7"),
        ("seven", "7"),
        ("-7", "7"),
        ("7.1", "7"),
        ("1,2", "12"),
        ("x-4", "-4"),
        ("1.5e3", "3"),
    ],
)
async def test_last_number_different(response: str, label: Any) -> None:
    assert await value(Verifier.LAST_NUMBER, response, label) == 0.0


@given(number=st.integers(-(10**12), 10**12), places=st.integers(0, 6))
async def test_last_number_reads_what_python_writes(number: int, places: int) -> None:
    for text in (f"{number:,}", f"{number:,.{places}f}", f"The answer is {number}."):
        assert await value(Verifier.LAST_NUMBER, text, str(number)) == 1.0
        assert await value(Verifier.LAST_NUMBER, text, str(number + 1)) == 0.0


@pytest.mark.parametrize(
    ("kind", "responses", "answer"),
    [
        (Verifier.LAST_NUMBER, ("7", "so 7.0", "= $7", "3 + 4 = 7.00"), "7"),
        (Verifier.LAST_NUMBER, ("1,000", "1000.0"), "1000"),
        (Verifier.LAST_NUMBER, ("0", "-0"), "0"),
        (Verifier.LAST_NUMBER, ("1" * 10**6, "1" * 10**6 + ".0"), "1" * 10**6),
        (Verifier.LAST_NUMBER, ("seven", ""), None),
        (Verifier.EXACT_MATCH, ("yes", " yes\n"), "yes"),
        (Verifier.MATH, (r"\boxed{3}, no: \boxed{\frac{1}{2}}", r"$\boxed{\frac{1} {2}}$."), r"\frac{1}{2}"),
        (Verifier.MATH, ("It is 12.", r"12.0 \boxed{12"), "12"),
        (Verifier.MATH, ("<answer>12</answer> of 15", "12 or <answer>\\boxed{12}</answer>"), "12"),
        (Verifier.MATH, ("no idea",), None),
        (Verifier.FORMAT, ("7",), None),
    ],
)
def test_replies_with_the_same_answer_have_the_same_text(
    kind: Verifier, responses: tuple[str, ...], answer: str | None
) -> None:
    assert {answer_of(kind, response) for response in responses} == {answer}


async def test_verdicts_have_the_answer() -> None:
    rewards = await VerifierReward(Verifier.LAST_NUMBER, timeout=TIMEOUT).score([ask("7", 8), ask("8.0", 8)])
    assert [(reward.value, reward.answer) for reward in rewards] == [(0.0, "7"), (1.0, "8")]


async def test_replies_without_a_label_have_an_answer_where_something_else_judges() -> None:
    verifier = VerifierReward(Verifier.LAST_NUMBER, timeout=TIMEOUT, unlabelled=True)
    rewards = await verifier.score([ask("It is 7.", None), ask("8", [8]), ask("8", 8)])
    assert [(reward.value, reward.answer) for reward in rewards] == [(0.0, "7"), (0.0, "8"), (1.0, "8")]


async def test_exact_match_ignores_the_space_around_and_nothing_else() -> None:
    assert await value(Verifier.EXACT_MATCH, " Paris\n", "Paris") == 1.0
    assert await value(Verifier.EXACT_MATCH, "7", 7) == 1.0
    assert await value(Verifier.EXACT_MATCH, "paris", "Paris") == 0.0
    assert await value(Verifier.EXACT_MATCH, "Paris.", "Paris") == 0.0


async def test_format_matches_the_whole_reply_across_lines_and_needs_no_label() -> None:
    pattern = "<think>.*</think>\\s*<answer>.*</answer>"
    assert await value(Verifier.FORMAT, "<think>a\nb</think>\n<answer>7</answer>", None, pattern) == 1.0
    assert await value(Verifier.FORMAT, "<think>a</think><answer>7</answer> bye", None, pattern) == 0.0


@pytest.mark.parametrize(("pattern", "message"), [(None, "set --reward"), ("(", "not a regular expression")])
def test_a_format_without_a_usable_pattern_is_refused(pattern: str | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{message}.*"):
        VerifierReward(Verifier.FORMAT, timeout=TIMEOUT, format_pattern=pattern)


@pytest.mark.parametrize("kind", [Verifier.LAST_NUMBER, Verifier.EXACT_MATCH])
async def test_a_missing_label_names_its_flag(kind: Verifier) -> None:
    with pytest.raises(RewardError, match=rf"{kind} .*--data.label_key"):
        await value(kind, "7", None)


@pytest.mark.parametrize(("reply", "worth"), [("So it is 72.", 1.0), ("72 and 24 are 96", 0.0)])
async def test_an_answer_of_gsm8k_is_its_last_number(reply: str, worth: float) -> None:
    assert await value(Verifier.LAST_NUMBER, reply, "48+24 = <<48+24=72>>72 clips.\n#### 72") == worth


@pytest.mark.parametrize("kind", [Verifier.LAST_NUMBER, Verifier.EXACT_MATCH])
@pytest.mark.parametrize("label", [{"ground_truth": "7"}, ["7"]])
async def test_a_label_of_several_values_is_refused(kind: Verifier, label: Any) -> None:
    with pytest.raises(RewardError, match=rf"verifier {kind} .*--data.label_key"):
        await value(kind, "7", label)


async def test_a_label_without_a_number_is_refused() -> None:
    with pytest.raises(RewardError, match=r"'seven' has no number.*--data.label_key"):
        await value(Verifier.LAST_NUMBER, "7", "seven")


@pytest.fixture(scope="module")
def math_verifier() -> Iterator[VerifierReward]:
    verifier = VerifierReward(Verifier.MATH, timeout=TIMEOUT)
    yield verifier
    verifier.close()


async def judge(verifier: VerifierReward, *requests: RewardRequest) -> list[Reward]:
    return await verifier.score(requests)


async def test_math_knows_equal_expressions_from_others(math_verifier: VerifierReward) -> None:
    cases = [
        ("so \\boxed{7.0}", "7", 1.0),
        ("The answer is 0.5", "\\frac{1}{2}", 1.0),
        ("$x(x+1)$", "$x^2+x$", 1.0),
        ("It is 1,234", "1234", 1.0),
        ("8", "7", 0.0),
        ("I do not know", "7", 0.0),
        ("\\boxed{" * 500, "7", 0.0),
    ]
    rewards = await judge(math_verifier, *(ask(response, label) for response, label, _ in cases))
    assert [reward.value for reward in rewards] == [expected for *_, expected in cases]
    assert all(reward.metrics == {"judge_timed_out": 0.0, "judge_failed": 0.0} for reward in rewards)


async def test_hanging_judgements_are_killed_and_the_others_go_on() -> None:
    """More of them than there are workers."""
    verifier = VerifierReward(Verifier.MATH, timeout=SHORT)
    requests = [ask(ENDLESS, "9^2")] * 5 + [ask("8", "7")]
    hung = await judge(verifier, *requests)
    assert [(reward.value, reward.metrics["judge_timed_out"]) for reward in hung[:5]] == [(0.0, 1.0)] * 5
    verifier.close()


async def test_labels_that_are_no_mathematics_and_missing_ones_are_refused(math_verifier: VerifierReward) -> None:
    with pytest.raises(RewardError, match=r"label '' holds no mathematics.*--data.label_key"):
        await judge(math_verifier, ask("7", ""))
    with pytest.raises(RewardError, match=r"math .*--data.label_key"):
        await judge(math_verifier, ask("7", None))


async def test_a_pattern_that_takes_for_ever_on_a_reply_fails_that_reply() -> None:
    verifier = VerifierReward(Verifier.FORMAT, timeout=SHORT, format_pattern="(a+)+b")
    hung, fine = await judge(verifier, ask("a" * 60, None), ask("aab", None))
    assert (hung.value, hung.metrics["judge_timed_out"]) == (0.0, 1.0)
    assert fine.value == 1.0 or fine.metrics["judge_timed_out"]  # a busy machine may be late with this one
    verifier.close()

"""The boundary around foreign code: one sentence whatever is raised, and the process as it was."""

import asyncio
import json
import pickle
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from rollgrad.adapters.rewards.answers import RewardParser
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.system.python_file import load_python_file
from rollgrad.application.foreign import error_place, error_text, foreign_code, shown
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import ConfigurationError, DataError, ForeignError, RewardError


class UnspeakableError(BaseException):
    def __str__(self) -> str:
        raise KeyError("no words")


def deep(left: int) -> int:
    return deep(left - 1) + 1


RAISED = [
    SystemExit(0),
    StopIteration(1),
    StopAsyncIteration(),
    UnspeakableError(),
    BaseException("odd"),
    MemoryError(),
    OverflowError("int too large to convert to float"),
    asyncio.CancelledError(),
    ExceptionGroup("several", [ValueError("one"), TypeError("two")]),
    ValueError("two\nlines"),
]


@pytest.mark.parametrize("error", RAISED, ids=[type(error).__name__ for error in RAISED])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_whatever_is_raised_becomes_the_refusal(error: BaseException, asynchronous: bool) -> None:
    def block() -> None:
        with foreign_code(lambda words: ForeignError(f"It raised {words}.")):
            raise error

    async def task() -> None:
        block()

    with pytest.raises(ForeignError, match=rf"^It raised {type(error).__name__}[^\n]*\.$") as caught:
        await task() if asynchronous else block()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [DataError("a sentence"), KeyboardInterrupt(), GeneratorExit()])
def test_what_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, foreign_code(ForeignError):
        raise error
    assert caught.value is error


async def test_a_real_cancellation_passes() -> None:
    async def wait() -> None:
        with foreign_code(ForeignError):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def test_long_and_unspeakable_values_are_shown() -> None:
    assert len(error_text(ValueError("x" * 10_000))) < 1100
    assert "int" in shown(10**6000)
    assert error_text(UnspeakableError()).startswith("UnspeakableError: (")


FILES = {
    "exit": "import sys\nsys.exit(0)",
    "base": "class Odd(BaseException):\n    def __str__(self): raise ValueError\nraise Odd",
    "deep": "def f(): f()\nf()",
    "syntax": "def f(:",
    "nul": "x = '\0'",
    "latin": b"x = '\xe4'",
    "interrupt": "raise StopIteration",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_imported(name: str, tmp_path: Path) -> None:
    text = FILES[name]
    file = tmp_path / "user.py"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=r"^--flag \S+ cannot be imported: [^\n]+$"):
        load_python_file(str(file), flag="--flag")
    assert not [name for name in sys.modules if name.startswith("rollgrad_user_user")]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    loaded = []
    for folder in ("agents", "rewards"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "mine.py"
        file.write_text(f"class Part:\n    of: 'Whole'\n\nclass Whole:\n    place = {folder!r}\n")
        loaded.append(load_python_file(str(file), flag="--flag"))
    for module, folder in zip(loaded, ("agents", "rewards"), strict=True):
        assert sys.modules[module.Part.__module__] is module
        assert get_type_hints(module.Part)["of"].place == folder
        assert pickle.loads(pickle.dumps(module.Whole)) is module.Whole


REQUEST = RewardRequest(prompt=Prompt(token_ids=(1,), text="go"), response="x", stop_reason=StopReason.STOP)


class Odd:
    def __repr__(self) -> str:
        raise SystemExit(1)

    def __float__(self) -> float:
        raise SystemExit(2)

    def reshape(self, *shape: int) -> "Odd":
        raise SystemExit(3)


ANSWERS = [
    10**400,
    [10**400],
    [10**6000],
    {"rewards": [1.0], "extra_logs": [{"a": 1}]},
    {"rewards": [1.0], "extra_logs": 3},
    {"rewards": [1.0], "extra_logs": {"a": "text"}},
    {"rewards": [1.0], "extra_logs": {"a": [10**400]}},
    {"rewards": {"a": [1.0], "b": None}},
    {"rewards": {10**6000: "x"}},
    {"rewards": [1.0], "scores": {"a": 1}},
    {"rewards": "1.0"},
    Odd(),
    [Odd()],
    {"rewards": [Odd()]},
    {1: 2},
    float("nan"),
    [[1.0], [2.0, 3.0]],
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
async def test_an_answer_that_is_none(answer: object) -> None:
    with pytest.raises(RewardError, match=r"^The server [^\n]+$"):
        RewardParser("The server").parse(answer, 1)

    def reward_func(queries: object, prompts: object, labels: object) -> object:
        return answer

    with pytest.raises(RewardError, match=r"^reward_func [^\n]+$"):
        await FunctionReward(reward_func, timeout=60.0).score([REQUEST])


async def test_what_a_reward_function_raises() -> None:
    for error in [*RAISED, KeyboardInterrupt()]:

        def reward_func(queries: object, prompts: object, labels: object, error: BaseException = error) -> object:
            raise error

        async def later(queries: object, prompts: object, labels: object, error: BaseException = error) -> object:
            raise error

        functions = [reward_func] if isinstance(error, KeyboardInterrupt) else [reward_func, later]
        for function in functions:
            with pytest.raises(RewardError, match=r"^(reward_func|later) raised [^\n]+$"):
                await FunctionReward(function, timeout=60.0, name=function.__name__).score([REQUEST])


async def test_a_reward_function_that_calls_itself_for_ever() -> None:
    def reward_func(queries: object, prompts: object, labels: object) -> int:
        return deep(10**9)

    with pytest.raises(RewardError, match="RecursionError"):
        await FunctionReward(reward_func, timeout=60.0).score([REQUEST])


def test_the_line_of_a_users_own_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("import json\n\n\ndef reward_func(queries, prompts, labels):\n    return json.loads(labels[0])\n")
    source = FunctionReward(load_python_file(str(file), flag="--reward.function_path").reward_func, timeout=60)
    prompt = Prompt(token_ids=(1,), text="go", label="{")
    request = RewardRequest(prompt=prompt, response="x", stop_reason=StopReason.STOP)
    with pytest.raises(RewardError, match=r"raised JSONDecodeError: Expecting .* \(reward\.py, line 5\)$"):
        asyncio.run(source.score([request]))
    file.write_text("import json\nwrong = undefined\n")
    with pytest.raises(ConfigurationError, match=r"NameError: name 'undefined' is not defined \(reward\.py, line 2\)$"):
        load_python_file(str(file), flag="--reward.function_path")


def test_an_error_of_a_library_alone_has_no_place() -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("[")
    assert raised.value.__traceback__ is not None
    assert error_place(raised.value).startswith(" (test_foreign.py, line ")
    assert error_place(raised.value.with_traceback(raised.value.__traceback__.tb_next)) == ""

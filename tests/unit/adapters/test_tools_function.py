"""Python functions as tools."""

import asyncio
import dataclasses
import enum
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from typing import IO, Annotated, Any, Literal

import pytest
from PIL import Image
from pydantic import BaseModel, Field
from structlog.testing import capture_logs

from rollgrad.adapters.chat.image_files import image_bytes, opened
from rollgrad.adapters.tools.function import THREADS, FunctionTool, tool
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.errors import ConfigurationError, EngineError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Person(BaseModel):
    name: str


async def call(function: Callable[..., Any], /, **arguments: Any) -> ToolResult:
    return await FunctionTool(function).call(arguments)


async def text(function: Callable[..., Any], /, **arguments: Any) -> str:
    result = await call(function, **arguments)
    assert not result.is_error, result.content
    return result.content


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """Looks up the weather.

    The forecast is for a few days.

    Args:
        city (str): where, as a name
            or a post code: both work.
        days: how many.

    Returns:
        A sentence.
    """
    return f"{city} {days} {unit}"


def test_schema_and_descriptions_come_from_the_signature_and_the_docstring() -> None:
    found = FunctionTool(weather)
    assert found.name == "weather"
    assert found.description == "Looks up the weather.\n\nThe forecast is for a few days."
    assert found.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where, as a name or a post code: both work."},
            "days": {"type": "integer", "default": 1, "description": "how many."},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


async def test_arguments_are_coerced_and_defaults_are_the_functions() -> None:
    assert await text(weather, city="Ulm", days="3") == "Ulm 3 C"


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ({}, ["`city` is missing"]),
        ({"city": "Ulm", "days": "many"}, ["`days`: Input should be a valid integer"]),
        ({"city": "Ulm", "unit": "K"}, ["`unit`: Input should be 'C' or 'F'"]),
        ({"city": "Ulm", "town": "Ulm"}, ["`town` is unknown"]),
        ({"days": None, "argument_0": "Ulm"}, ["`city` is missing", "`days`", "`argument_0` is unknown"]),
    ],
)
async def test_wrong_arguments_are_told(arguments: dict[str, Any], problems: list[str]) -> None:
    result = await FunctionTool(weather).call(arguments)
    assert result.is_error
    assert result.content.startswith("The arguments of 'weather' are wrong: ")
    assert all(problem in result.content for problem in problems)


async def test_at_most_five_problems_are_told() -> None:
    def many(a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None: ...

    assert (await call(many)).content.count("is missing") == 5


async def test_rich_types_are_built() -> None:
    def rich(when: date, colour: Colour, points: list[Point], who: Person, of: tuple[int, str] | None = None) -> str:
        return f"{when:%d.%m.%Y} {colour.name} {points[0]} {who.name} {of}"

    arguments = {"when": "2024-02-29", "colour": "red", "points": [{"x": "1"}], "who": {"name": "Ada"}, "of": [1, "a"]}
    assert await text(rich, **arguments) == "29.02.2024 RED Point(x=1, y=0.0) Ada (1, 'a')"


async def test_limits_in_annotations_hold_and_are_in_the_schema() -> None:
    def dice(sides: Annotated[int, Field(ge=2, description="how many")]) -> int:
        return sides

    assert FunctionTool(dice).parameters["properties"]["sides"] == {
        "type": "integer",
        "minimum": 2,
        "description": "how many",
    }
    assert "greater than or equal to 2" in (await call(dice, sides=1)).content


async def test_names_that_pydantic_keeps_for_itself_are_fine() -> None:
    def odd(copy: int, _private: int, schema: int, model_config: int) -> int:
        return copy + _private + schema + model_config

    assert await text(odd, copy=1, _private=2, schema=3, model_config=4) == "10"


async def test_an_argument_without_a_type_takes_anything() -> None:
    def anything(value, other=None):  # type: ignore[no-untyped-def]
        return [value, other]

    assert await text(anything, value={"a": [1, None]}) == '[{"a":[1,null]},null]'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        (True, "true"),
        ({"a": 1, "ä": [1.5, None]}, '{"a":1,"ä":[1.5,null]}'),
        (Point(x=1), '{"x":1,"y":0.0}'),
        (Person(name="Ada"), '{"name":"Ada"}'),
        (date(2024, 2, 29), '"2024-02-29"'),
        (float("nan"), "NaN"),
    ],
)
async def test_what_is_not_text_becomes_json(value: Any, expected: str) -> None:
    assert await text(lambda_named(lambda: value)) == expected


async def test_an_asynchronous_function_in_a_plain_decorator_is_awaited() -> None:
    async def look(place: str) -> str:
        return f"seen: {place}"

    @functools.wraps(look)
    def traced(**arguments: Any) -> Any:
        return look(**arguments)

    assert await call(traced, place="here") == ToolResult(content="seen: here")


async def test_an_image_of_pillow_is_an_image() -> None:
    red, blue = (Image.new("RGB", (3, 2), color) for color in ("red", "blue"))
    alone, among = await call(lambda_named(lambda: red)), await call(lambda_named(lambda: ["look:", blue, 3]))
    assert (alone.content, among.content) == ("[image]", "look:\n[image]\n3")
    assert [opened(image_bytes(uri)).getpixel((0, 0)) for result in (alone, among) for uri in result.images] == [
        (255, 0, 0),
        (0, 0, 255),
    ]


async def test_an_image_is_written_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Picture:
        def convert(self, mode: str) -> "Picture":
            return self

        def save(self, file: IO[bytes], format: str) -> None:
            threads.append(threading.current_thread())

    async def value() -> object:
        return [Picture()]

    assert (await call(value)).content == "[image]"
    (thread,) = threads
    assert thread is not threading.current_thread()


def lambda_named(function: Callable[[], Any]) -> Callable[[], Any]:
    function.__name__ = "value"
    return function


async def test_a_result_is_passed_on() -> None:
    result = ToolResult(content="done", terminates=True)
    assert await call(lambda_named(lambda: result)) == result


async def test_a_tool_that_fails_again_and_again_does_not_fill_the_log() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    made = FunctionTool(broken)
    with capture_logs() as logs:
        for _ in range(9):
            assert (await made.call({})).is_error
    assert [log["times"] for log in logs] == [1, 2, 4, 8]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, TimeoutError])
async def test_an_exception_is_named_and_its_details_are_logged_only(
    error: type[BaseException], asynchronous: bool
) -> None:
    def broken() -> None:
        raise error("hunter2")

    async def broken_later() -> None:
        raise error("hunter2")

    function: Callable[..., Any] = broken_later if asynchronous else broken
    with capture_logs() as logs:
        result = await call(function)
    assert result == ToolResult(content=f"The tool {function.__name__!r} failed: {error.__name__}.", is_error=True)
    assert [(log["event"], log["tool"]) for log in logs] == [("tool_failed", function.__name__)]
    assert "hunter2" in repr(logs[0]["exc_info"])


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_the_model_has_no_part_in_is_raised(asynchronous: bool) -> None:
    def lost() -> None:
        raise EngineError("The search server is down.")

    async def lost_later() -> None:
        lost()

    with capture_logs() as logs, pytest.raises(EngineError, match=r"^The search server is down\.$"):
        await call(lost_later if asynchronous else lost)
    assert logs == []


async def test_what_cannot_become_json_is_a_failure() -> None:
    result = await call(lambda_named(lambda: object()))
    assert result == ToolResult(content="The tool 'value' failed: PydanticSerializationError.", is_error=True)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_call_has_a_deadline(asynchronous: bool) -> None:
    release = threading.Event()

    def stuck() -> None:
        release.wait(60)

    async def stuck_later() -> None:
        await asyncio.sleep(60)

    made = FunctionTool(stuck_later if asynchronous else stuck, name="stuck", timeout=0.1)
    with capture_logs() as logs:
        result = await made.call({})
        await made.call({})
        await made.call({})  # which is not told: a tool that is always late would fill the log
    release.set()
    late = {"event": "tool_timed_out", "log_level": "warning", "tool": "stuck", "seconds": 0.1}
    assert logs == [{**late, "times": 1}, {**late, "times": 2}]
    assert result == ToolResult(content="The tool 'stuck' gave no answer within 0.1 s.", is_error=True)


async def test_threads_are_bounded_and_come_back() -> None:
    running, most, lock = 0, 0, threading.Lock()
    release = threading.Event()

    def count() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        release.wait(60)
        with lock:
            running -= 1
        return 1

    made = FunctionTool(count)
    calls = [asyncio.create_task(made.call({})) for _ in range(2 * THREADS)]
    while running < THREADS:
        await asyncio.sleep(0.01)
    release.set()
    results = list(await asyncio.gather(*calls))
    assert most == THREADS
    assert [result.content for result in results] == ["1"] * (2 * THREADS)


async def test_a_tool_serves_one_event_loop_after_another() -> None:
    def work(n: int) -> int:
        time.sleep(0.001)
        return n

    made = FunctionTool(work)

    async def scenario() -> list[ToolResult]:
        return list(await asyncio.gather(*(made.call({"n": n}) for n in range(3 * THREADS))))

    expected = [ToolResult(content=str(n)) for n in range(3 * THREADS)]
    assert [await scenario() for _ in range(2)] == [expected, expected]


async def test_threads_that_hang_let_later_calls_wait_not_pile_up() -> None:
    release = threading.Event()
    started: list[None] = []

    def hang() -> str:
        started.append(None)
        release.wait(60)
        return "free"

    made = FunctionTool(hang, timeout=0.3)
    late = await asyncio.gather(*(made.call({}) for _ in range(THREADS + 3)))
    async with asyncio.timeout(60):
        while len(started) < THREADS:
            await asyncio.sleep(0.01)
    assert len(started) == THREADS
    made._timeout = 60.0
    release.set()
    late, free = list(late), await made.call({})
    assert all(result.is_error for result in late)
    assert free == ToolResult(content="free")


def test_a_hanging_function_does_not_keep_the_program_alive() -> None:
    program = (
        "import asyncio, time\n"
        "from rollgrad.adapters.tools.function import FunctionTool\n"
        "def hang(): time.sleep(600)\n"
        "print(asyncio.run(FunctionTool(hang, timeout=0.1).call({})).content)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "The tool 'hang' gave no answer within 0.1 s."


async def test_cancelling_a_call_cancels_it() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    calling = asyncio.create_task(FunctionTool(hang).call({}))
    await asyncio.sleep(0.05)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    release.set()


async def test_the_decorator_takes_a_name_and_a_description() -> None:
    @tool(name="plus", description="Adds.", timeout=5.0)
    async def add(a: int, b: int) -> int:
        return a + b

    assert (add.name, add.description) == ("plus", "Adds.")
    assert (await add.call({"a": 1, "b": 2})).content == "3"


async def test_methods_and_callable_objects_are_functions() -> None:
    class Shop:
        def price(self, item: str) -> str:
            """Tells the price."""
            return f"{item}: 3"

        async def __call__(self, item: int) -> int:
            return item + 1

    assert await text(Shop().price, item="pear") == "pear: 3"
    assert FunctionTool(Shop()).name == "Shop"
    assert await text(Shop(), item="1") == "2"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda *values: None, r"\*values"),
        (lambda **values: None, r"\*\*values"),
        (lambda value, /: None, "value"),
    ],
)
def test_arguments_without_a_name_are_refused(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'odd' takes {problem}"):
        FunctionTool(function, name="odd")


def test_a_type_without_a_schema_is_refused() -> None:
    def takes(value: threading.Lock) -> None: ...  # type: ignore[valid-type]
    def unknown(value: "NoSuchType") -> None: ...  # type: ignore[name-defined]  # noqa: F821
    def function(value: Callable[[], int]) -> None: ...

    for refused in (takes, unknown, function):
        with pytest.raises(ConfigurationError, match="no JSON schema"):
            FunctionTool(refused)


def test_a_name_that_models_do_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pass name="):
        FunctionTool(lambda: None)


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="timeout=0"):
        FunctionTool(weather, timeout=0.0)

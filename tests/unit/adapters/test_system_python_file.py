"""Python that a user names: files with others beside them, and modules."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgrad.adapters.openrlhf.loading import load_agent_file
from rollgrad.adapters.rewards.function import load_reward_function
from rollgrad.adapters.system.python_file import load_python
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.tool_box import ToolBox

FLAG = "--flag"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a package `lab_of_mine`, which Python does not look for there by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "lab_of_mine").mkdir()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lab_of_mine", "beside_it")]:
        del sys.modules[name]


def test_a_file_imports_what_lies_beside_it_and_in_the_working_directory(lab: Path) -> None:
    (lab / "lab_of_mine" / "__init__.py").touch()
    (lab / "lab_of_mine" / "scale.py").write_text("FACTOR = 2.0\n")
    (lab / "rewards").mkdir()
    (lab / "rewards" / "beside_it.py").write_text("OFFSET = 1.0\n")
    (lab / "rewards" / "mine.py").write_text(
        "from lab_of_mine.scale import FACTOR\n\n"
        "def reward_func(queries, prompts, labels):\n"
        "    from beside_it import OFFSET\n"
        "    return [FACTOR + OFFSET for _ in queries]\n"
    )
    assert load_reward_function("rewards/mine.py")(["a", "b"], [], []) == [3.0, 3.0]


def test_a_file_beside_a_users_file_hides_no_package(lab: Path) -> None:
    (lab / "tomllib.py").write_text("raise AssertionError('that of Python is meant')\n")
    (lab / "mine.py").write_text("import tomllib\n")
    sys.modules.pop("tomllib", None)
    load_python("mine.py", flag=FLAG)


def test_modules_are_named_as_files_are(lab: Path) -> None:
    (lab / "lab_of_mine" / "rewards.py").write_text("def accuracy(queries, prompts, labels): return [0.5]\n")
    (lab / "lab_of_mine" / "tools.py").write_text(
        "import rollgrad\n\n@rollgrad.tool\ndef weather(city: str) -> str:\n    'Tells the weather.'\n    return city\n"
    )
    assert load_reward_function("lab_of_mine.rewards:accuracy")([], [], []) == [0.5]
    assert [tool.name for tool in ToolBox("lab_of_mine.tools")._tools] == ["weather"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("lab_of_mine.nothing", "but there is no such file and no module of this name: name a file"),
        ("no_such_lab", "no module of this name: name a file"),
        ("lab_of_mine.rewards.accuracy", r"\(did you mean lab_of_mine.rewards:accuracy\?\)"),
        ("lab_of_mine.broken", "cannot be imported: ModuleNotFoundError: No module named 'absent_one'"),
    ],
)
def test_a_module_that_is_not_there_is_told_from_one_that_lacks_another(lab: Path, place: str, message: str) -> None:
    (lab / "lab_of_mine" / "rewards.py").write_text("def accuracy(): pass\n")
    (lab / "lab_of_mine" / "broken.py").write_text("import absent_one\n")
    with pytest.raises(ConfigurationError, match=message):
        load_python(place, flag=FLAG)


AGENTS = """
class World:
    async def reset(self, prompt): return ""
    async def step(self, action): ...
    async def close(self): pass

class Half:
    async def reset(self, prompt): return ""

def solve(task): return "4"

number = 3
"""


def test_a_class_or_function_of_any_name_plays(lab: Path) -> None:
    (lab / "agents.py").write_text(AGENTS)
    assert load_agent_file("agents.py:World").environment.__name__ == "World"  # type: ignore[union-attr]
    assert load_agent_file("agents.py:solve").program.__name__ == "solve"  # type: ignore[union-attr]
    for name, message in (
        ("Half", "a class without step, close"),
        ("number", "no class Env"),
        ("gone", "no class Env"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_agent_file(f"agents.py:{name}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Environment:\n    async def reset(self, prompt): return ''", "a class without step, close"),
        ("class Environment(World):\n    def __init__(self, size): ...", "wants arguments, but one is made for each"),
        ("from rollgrad.domain.ports.environment import Environment", r"no class Environment .*\(it defines World,"),
        ("def run_agent(task, client): return '4'", "cannot be called with the task alone"),
        ("def run_agent(): return '4'", "cannot be called with the task alone"),
    ],
)
def test_what_no_episode_could_be_played_with_is_refused(lab: Path, text: str, message: str) -> None:
    (lab / "agents.py").write_text(f"{AGENTS}\n{text}\n")
    with pytest.raises(ConfigurationError, match=message):
        load_agent_file("agents.py")


@pytest.mark.parametrize(
    "text", ["async def run_agent(task, tries=3): ...", "def run_agent(*tasks): ...", "run_agent = print"]
)
def test_a_program_may_take_more_than_the_task(lab: Path, text: str) -> None:
    (lab / "agents.py").write_text(f"{AGENTS}\n{text}\n")
    assert load_agent_file("agents.py").program is not None

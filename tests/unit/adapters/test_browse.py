"""Reading of runs for people: filters, the index of rollouts, single rollouts with their tokens, notes."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.adapters.tracking.browse import trajectory
from rollgrad.adapters.tracking.browse.filters import EXAMPLES, Kind, parse_filter
from rollgrad.adapters.tracking.browse.index import Rollouts, RunIndex
from rollgrad.adapters.tracking.browse.notes import read_notes, write_note
from rollgrad.adapters.tracking.trajectory_files import read_rows, read_trajectories, trajectory_files
from rollgrad.domain.errors import DataError, FilterError
from rollgrad.entrypoints.reporting import ASIDE
from tests.fakes import kept_run
from tests.kept_rollouts import group, usual_run, write_rollouts

KINDS = {
    "reward": Kind.NUMBER,
    "turns": Kind.INTEGER,
    "response": Kind.TEXT,
    "prompt": Kind.TEXT,
    "star": Kind.FLAG,
    "tag": Kind.TEXTS,
    "part.format": Kind.NUMBER,
}
ROWS: list[dict[str, Any]] = [
    {"reward": reward, "turns": turns, "response": response, "prompt": "Ask?", "star": star, "tag": tags}
    for reward, turns, response, star, tags in [
        (0.0, 1, "I am Sorry", False, []),
        (1.0, 3, 'a "quoted" text', True, ["hack", "odd"]),
        (None, None, None, False, ["odd"]),
        (-2.5, 4, "stop", True, []),
        (0.5, 2, "", False, ["hack"]),
    ]
]


class Columns:
    """Rows in memory."""

    table = pa.Table.from_pylist(ROWS)

    def column(self, name: str) -> pa.ChunkedArray:
        return self.table[name]

    def containing(self, name: str, part: str) -> pa.ChunkedArray:
        return pc.match_substring(self.table[name], part, ignore_case=True)


def chosen(condition: str) -> list[int]:
    """Rows that match."""
    wanted = parse_filter(condition, KINDS)
    assert wanted is not None
    return [row for row, matches in enumerate(wanted.condition(Columns()).to_pylist()) if matches]


Test = tuple[str, Callable[[dict[str, Any]], bool | None]]
"""A filter, and what it means: None where a number is missing."""


def compared(name: str, operator: str, value: float) -> Test:
    means = {
        "=": lambda x: x == value,
        "!=": lambda x: x != value,
        "<": lambda x: x < value,
        "<=": lambda x: x <= value,
        ">": lambda x: x > value,
        ">=": lambda x: x >= value,
    }[operator]
    return f"{name} {operator} {value}", lambda row: None if row[name] is None else means(row[name])


def both(first: Test, word: str, second: Test) -> Test:
    def means(row: dict[str, Any]) -> bool | None:
        found = [first[1](row), second[1](row)]
        deciding = word == "or"
        return deciding if deciding in found else None if None in found else not deciding

    return f"({first[0]}) {word} ({second[0]})", means


def negated(test: Test) -> Test:
    return f"not ({test[0]})", lambda row: None if test[1](row) is None else not test[1](row)


LEAVES = st.one_of(
    st.builds(
        compared,
        st.sampled_from(["reward", "turns"]),
        st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
        st.sampled_from([-2.5, 0, 0.5, 1, 2, 3]),
    ),
    st.sampled_from(
        [
            ("star", lambda row: row["star"]),
            ("reward is null", lambda row: row["reward"] is None),
            ("turns is not null", lambda row: row["turns"] is not None),
            ("tag = hack", lambda row: "hack" in row["tag"]),
            ("turns in (1, 4)", lambda row: None if row["turns"] is None else row["turns"] in (1, 4)),
            ("response contains SORRY", lambda row: "sorry" in (row["response"] or "").lower()),
        ]
    ),
)
TESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.builds(negated, inner), st.builds(both, inner, st.sampled_from(["and", "or"]), inner)),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(TESTS)
def test_a_filter_chooses_what_it_says(test: Test) -> None:
    text, means = test
    assert chosen(text) == [row for row, values in enumerate(ROWS) if means(values)]


def test_and_binds_more_than_or() -> None:
    assert chosen("turns = 1 or turns = 3 and reward = 0") == chosen("turns = 1")
    assert chosen("(turns = 1 or turns = 3) and reward = 0") == chosen("turns = 1")
    assert chosen("not star and reward = 0.5") == chosen("turns = 2")


def test_texts_are_written_with_quotes_or_without() -> None:
    assert chosen("response = stop") == chosen("response = 'stop'") == chosen('"STOP"') == [3]
    assert chosen(r'response contains "\"quoted\""') == [1]
    assert chosen('"ask?"') == [0, 1, 2, 3, 4]
    assert parse_filter("  ", KINDS) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rewrd < 1", 'no column "rewrd" at character 1: did you mean reward?'),
        ("nothing", 'no column "nothing" at character 1: there are part.format, prompt, '),
        ("reward <", "ends, where a number, as reward is one, is expected"),
        ("reward < stop", "has stop at character 10, where a number"),
        ("reward % 3", "has '%' at character 8, which is no part of one"),
        ("reward < 1 reward", "has reward at character 12, where and, or or the end"),
        ('response = "sto', "text at character 12 has no end"),
        ("(star", "ends, where ) is expected"),
        ("star < true", "compares star by <, but it has no order"),
        ("reward contains 1", "asks what reward contains, which is no text"),
        ("response = and", "has and at character 12, where a text in quotes"),
        ("star and", "ends, where a column is expected"),
        ("turns in 3", "has 3 at character 10, where ( is expected"),
        ("reward is 3", "has 3 at character 11, where null is expected"),
        ("__import__", 'no column "__import__"'),
        ("(" * 5000, "has 5000 characters"),
        ("(" * 1000, "nests more than 50 levels"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, sentence: str) -> None:
    with pytest.raises(FilterError, match=re.escape(sentence)) as caught:
        parse_filter(text, KINDS)
    assert "\n" not in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(
    st.text(max_size=40) | st.lists(st.sampled_from(list("()\"'<=!. -1e") + list(KINDS) + ["and", "not"])).map(" ".join)
)
def test_any_text_is_a_filter_or_a_mistake(text: str) -> None:
    try:
        wanted = parse_filter(text, KINDS)
    except FilterError:
        return
    assert wanted is None or len(wanted.condition(Columns())) == len(ROWS)


def test_the_examples_of_the_page_are_filters(tmp_path: Path) -> None:
    rollouts = RunIndex(usual_run(tmp_path)).rollouts()
    for text, _ in EXAMPLES:
        rollouts.find(text)


def test_rollouts_are_listed_filtered_and_sorted(tmp_path: Path) -> None:
    rollouts = RunIndex(usual_run(tmp_path)).rollouts()
    listed = rollouts.rows(rollouts.find(""))
    assert [row["key"] for row in listed[:3]] == ["eval/2/0/0/0", "step/2/2/20/0", "step/2/2/21/0"]
    assert len(listed) == len(rollouts) == 12
    found = rollouts.rows(rollouts.find("reward = 1 and kind = update", "step,-action_tokens"))
    assert [row["response"] for row in found] == ["seven", "7", "Seven!"]
    assert [row["response"] for row in rollouts.rows(rollouts.find("text contains SEVEN", "step"))] == [
        "seven",
        "Seven!",
    ]
    by_reward = [row["reward"] for row in rollouts.rows(rollouts.find("step = 1", "-reward"))]
    assert by_reward == [1.0, 1.0, 0.0, 0.0, 0.0, None]
    (failed,) = rollouts.rows(rollouts.find("failure is not null"))
    assert (failed["key"], failed["failure_message"], failed["group_size"]) == ("step/1/0/9/-1", "It hung.", 4)
    taught_nothing = rollouts.rows(rollouts.find("zero_spread"))
    assert {row["response"] for row in taught_nothing} == {"no", "never"}
    assert [row["response"] for row in rollouts.rows(rollouts.find("part.format = 0.25"))] == ["yes"]
    with pytest.raises(FilterError, match='no column "rewards"'):
        rollouts.find("", "-rewards")


def test_a_group_without_spread_that_has_advantages_taught_something(tmp_path: Path) -> None:
    rows = [
        kept_run.row(
            kept_run.Vocabulary(), group=number, sample=sample, parts=[(0, ["a"]), (1, ["b"])], advantage=value
        )
        for number, values in enumerate([(0.0, 1e-9), (-0.5, -0.5), (None, None)])
        for sample, value in enumerate(values)
    ]
    kept_run.write_rows(tmp_path / "trajectories" / "step-000001.parquet", rows)
    rollouts = RunIndex(tmp_path).rollouts()
    assert rollouts.table["group_spread"].to_pylist() == [0.0] * 6
    assert rollouts.table["zero_spread"].to_pylist() == [True, True, False, False, True, True]


def test_each_role_of_a_group_has_a_spread_of_its_own(tmp_path: Path) -> None:
    """The sides of a game have opposite rewards, which says nothing of whether one of them learns."""
    rows = [
        kept_run.row(kept_run.Vocabulary(), sample=sample, parts=[(0, ["a"]), (1, ["b"])], reward=reward)
        | {"role": role}
        for sample, second in enumerate((-1.0, 0.0))
        for role, reward in (("first", 1.0), ("second", second))
    ]
    kept_run.write_rows(tmp_path / "trajectories" / "step-000001.parquet", rows)
    rollouts = RunIndex(tmp_path).rollouts()
    assert rollouts.table["group_spread"].to_pylist() == [0.0, 1.0] * 2
    assert rollouts.table["group_size"].to_pylist() == [2] * 4
    assert [row["reward"] for row in rollouts.rows(rollouts.find("role = second", "reward"))] == [-1.0, 0.0]


def test_groups_of_other_steps_with_the_same_number_are_others(tmp_path: Path) -> None:
    for step, rewards in ((1, (0.0, 1.0)), (2, (3.0, 3.0, 3.5))):
        rows = [
            kept_run.row(kept_run.Vocabulary(), step=step, sample=sample, parts=[(0, ["a"]), (1, ["b"])], reward=reward)
            for sample, reward in enumerate(rewards)
        ]
        kept_run.write_rows(tmp_path / "trajectories" / f"step-{step:06d}.parquet", rows)
    table = RunIndex(tmp_path).rollouts().table
    assert table["group_size"].to_pylist() == [2, 2, 3, 3, 3]
    assert table["group_spread"].to_pylist() == [1.0, 1.0, 0.5, 0.5, 0.5]


def test_a_broken_file_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    index = RunIndex(usual_run(tmp_path))
    assert not index.rollouts().problems
    path = trajectory_files(tmp_path)[1]
    whole = path.read_bytes()
    other = pa.table({"step": ["one"]}).replace_schema_metadata({"rollgrad.trajectories": "1"})
    for content in (b"", whole[:100], whole[:-50], b"PAR1" + b"\x00" * 50 + b"PAR1", _parquet(other)):
        path.write_bytes(content)
        rollouts = index.rollouts()
        assert len(rollouts.problems) == 1, content
        assert path.name in rollouts.problems[0]
        assert 0 < len(rollouts) < 12
        assert rollouts.rows(rollouts.find("text contains eight"))
    path.write_bytes(whole)
    assert len(index.rollouts()) == 12


def test_a_file_without_kinds_is_shown_beside_others(tmp_path: Path) -> None:
    index = RunIndex(usual_run(tmp_path))
    other = pa.table({"step": [1, 1]}).replace_schema_metadata({"rollgrad.trajectories": "1"})
    trajectory_files(tmp_path)[1].write_bytes(_parquet(other))
    table = index.rollouts().table
    assert table["group_size"].filter(pc.is_null(table["kind"])).to_pylist() == [1, 1]
    assert set(table["kind"].to_pylist()) >= {None, "update"}


def whole(rollouts: Rollouts, key: str) -> dict[str, Any]:
    (found,) = trajectory.trajectories(rollouts, [key])
    return found


def _parquet(table: pa.Table) -> bytes:
    from pyarrow import parquet

    stream = pa.BufferOutputStream()
    parquet.write_table(table, stream)
    content: bytes = stream.getvalue().to_pybytes()
    return content


def test_a_run_that_goes_on_shows_new_files_and_no_removed_ones(tmp_path: Path) -> None:
    index = RunIndex(usual_run(tmp_path))
    assert index.rollouts() is index.rollouts()
    write_rollouts(tmp_path, {3: [group(8, {"new": 1.0})]})
    assert [row["step"] for row in index.rollouts().rows(index.rollouts().find("response = new"))] == [3]
    trajectory_files(tmp_path)[0].unlink()
    assert len(index.rollouts()) == 12


def test_files_without_later_columns_are_read(tmp_path: Path) -> None:
    path = trajectory_files(usual_run(tmp_path))[1]
    table = read_trajectories(path)
    later = ["messages", "baseline", "response_start", "reward_parts", "token_value", "token_entropy"]
    later += ["token_clipped", "answer", "feedback"]
    path.write_bytes(_parquet(table.drop_columns(later)))
    rollouts = RunIndex(tmp_path).rollouts()
    assert (rollouts.problems, len(rollouts)) == ((), 12)
    assert [row["response"] for row in rollouts.rows(rollouts.find("reward = 1 and step = 1"))] == ["seven", "7"]
    shown = whole(rollouts, rollouts.keys[1])
    assert (shown["tokens"]["value"], shown["messages"], shown["reward_parts"]) == (None, None, {})
    assert (shown["tokens"]["entropy"], shown["tokens"]["clipped"]) == (None, None)
    assert (shown["answer"], shown["feedback"]) == (None, None)


def test_all_texts_of_a_filter_are_looked_for_in_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = RunIndex(usual_run(tmp_path)).rollouts()
    read = []

    def counted(path: Path, columns: Sequence[str]) -> pa.Table:
        read.append((path, tuple(columns)))
        return read_trajectories(path, columns)

    monkeypatch.setattr("rollgrad.adapters.tracking.browse.index.read_trajectories", counted)
    condition = '"seven" or response contains "7" and not prompt contains "seven"'
    found = rollouts.rows(rollouts.find(condition))
    assert {row["response"] for row in found} >= {"seven", "7"}
    assert sorted(read) == [(path, ("prompt", "response")) for path in sorted(rollouts.files)]
    assert rollouts.rows(rollouts.find(condition, "step")) != []
    assert len(read) == len(rollouts.files), "a page of the list asks for the same as the one before"


def test_a_list_needs_the_beginnings_of_responses_alone(tmp_path: Path) -> None:
    path = tmp_path / "trajectories" / "step-000001.parquet"
    long = kept_run.row(kept_run.Vocabulary(), parts=[(0, ["a"]), (1, ["b"])], response="so " * 1000)
    kept_run.write_rows(path, [long])
    path.write_bytes(_parquet(read_trajectories(path).drop_columns(["response"])))
    (row,) = RunIndex(tmp_path).rollouts().rows([0])
    assert row["response"] == "so " * 100


def test_a_run_without_files_of_rollouts_shows_its_samples(tmp_path: Path) -> None:
    sample = {"step": 1, "prompt": "How?", "response": "So \ud800", "label": "7", "reward": 0.5, "stop_reason": "stop"}
    lines = [
        json.dumps(sample),
        json.dumps(sample | {"step": 2, "response": "Thus", "feedback": "Why?"}),
        '{"step": 3, "pro',
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    rollouts = RunIndex(tmp_path).rollouts()
    rows = rollouts.rows(rollouts.find("reward > 0", "step"))
    assert [row["response"] for row in rows] == ["So \\ud800", "Thus"]
    assert [row["feedback"] for row in rows] == [None, "Why?"]
    assert whole(rollouts, rows[1]["key"])["tokens"] is None
    assert len(rollouts.rows(rollouts.find('"thus"'))) == 1
    assert len(RunIndex(tmp_path / "elsewhere").rollouts()) == 0


def test_points_of_many_rollouts_are_taken_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = RunIndex(usual_run(tmp_path)).rollouts()
    points = rollouts.points("kind = update", "action_tokens", "reward", "stop_reason")
    assert (points["matched"], points["shown"]) == (10, 10)
    place = points["keys"].index("step/1/0/1/0")
    assert (points["x"][place], points["y"][place], points["color"][place]) == (11, 0.0, "stop")
    monkeypatch.setattr("rollgrad.adapters.tracking.browse.index.MOST_POINTS", 4)
    few = rollouts.points("kind = update", "action_tokens", "reward", None)
    assert (few["matched"], few["shown"]) == (10, 4)
    assert few["keys"] == [points["keys"][row] for row in (0, 2, 5, 7)]
    with pytest.raises(FilterError, match='no column "tag" to draw'):
        rollouts.points("", "tag", "reward", None)


def test_points_without_a_finite_number_are_null(tmp_path: Path) -> None:
    odd = kept_run.row(kept_run.Vocabulary(), parts=[(0, ["a"]), (1, ["b"])], metrics=[("odd", float("inf"))])
    kept_run.write_rows(tmp_path / "trajectories" / "step-000001.parquet", [odd])
    points = RunIndex(tmp_path).rollouts().points("", "metric.odd", "step", None)
    assert (points["x"], points["y"]) == ([None], [1])


def test_a_rollout_is_shown_as_it_is_stored(tmp_path: Path) -> None:
    rollouts = RunIndex(usual_run(tmp_path)).rollouts()
    for path in trajectory_files(tmp_path):
        for stored in read_trajectories(path).to_pylist():
            word = "step" if stored["kind"] == "update" else "eval"
            branch = -1 if stored["branch"] is None else stored["branch"]
            shown = whole(rollouts, f"{word}/{stored['step']}/{stored['group_id']}/{stored['sample_id']}/{branch}")
            assert (shown["prompt"], shown["response"], shown["label"]) == (
                stored["prompt"],
                stored["response"],
                stored["label"],
            )
            tokens = shown["tokens"]
            if stored["token"] is None:
                assert tokens is None
                continue
            assert tokens["id"] == stored["token"]
            assert [tokens["text"]["texts"][index] for index in tokens["text"]["index"]] == stored["token_text"]
            for name in ("kind", "turn", "version", "logprob", "trainer_logprob", "advantage", "weight", "reward"):
                assert tokens[name] == stored[f"token_{name}"]


def test_the_tokens_of_a_step_add_up_to_its_loss(tmp_path: Path) -> None:
    rollouts = RunIndex(usual_run(tmp_path)).rollouts()
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for metrics in logged:
        keys = [key for key in rollouts.keys if key.startswith(f"step/{metrics['step']}/") and not key.endswith("-1")]
        shown = [whole(rollouts, key) for key in keys]
        products = [
            weight * advantage
            for row in shown
            for weight, advantage in zip(row["tokens"]["weight"], row["tokens"]["advantage"], strict=True)
        ]
        assert -sum(products) == pytest.approx(metrics["policy/policy_loss"], abs=1e-6)
        for row in shown:
            assert row["step_totals"]["loss"] == pytest.approx(metrics["policy/policy_loss"], abs=1e-6)
            assert row["step_totals"]["signal"] == pytest.approx(sum(map(abs, products)))


def test_a_group_is_shown_with_its_neighbours(tmp_path: Path) -> None:
    rollouts = RunIndex(usual_run(tmp_path)).rollouts()
    shown = whole(rollouts, "step/1/0/1/0")
    assert [row["key"] for row in shown["group"]] == [*(f"step/1/0/{sample}/0" for sample in range(3)), "step/1/0/9/-1"]
    assert (shown["previous"], shown["next"]) == ("step/1/0/0/0", "step/1/0/2/0")
    tree = trajectory.group(rollouts, "step", 1, 0)
    assert (tree["prompt"], tree["label"]) == ("How much? ", "7")
    assert [row["tokens"] and len(row["tokens"]["id"]) for row in tree["rows"]] == [16, 21, 12, None]
    for ask in (
        lambda: whole(rollouts, "step/9/0/0/0"),
        lambda: trajectory.group(rollouts, "step", 9, 0),
        lambda: trajectory.group(rollouts, "steps", 1, 0),
        lambda: trajectory.replies_to(rollouts, "nothing"),
    ):
        with pytest.raises(DataError):
            ask()


def test_replies_to_one_prompt_are_shown_over_the_evaluations(tmp_path: Path) -> None:
    rollouts = RunIndex(usual_run(tmp_path)).rollouts()
    found = trajectory.compared(rollouts)
    (prompt,) = found["prompts"]
    assert (found["steps"], prompt["scores"], prompt["change"], prompt["flips"]) == ([0, 2], [0.0, 1.0], 1.0, 1)
    replies = trajectory.replies_to(rollouts, prompt["prompt_id"])
    assert replies["prompt"] == "Held out? "
    assert [(step["step"], step["replies"][0]["response"]) for step in replies["steps"]] == [(0, "at 0"), (2, "at 2")]


def test_rows_of_any_row_group_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    from pyarrow import parquet

    path = trajectory_files(usual_run(tmp_path))[1]
    table = read_trajectories(path)
    parquet.write_table(table, path, row_group_size=2)
    for numbers in ([0], [5, 1], [3, 3, 0], list(range(len(table)))[::-1], []):
        assert read_rows(path, numbers, ["sample_id", "token"]).to_pylist() == [
            {name: table[name][number].as_py() for name in ("sample_id", "token")} for number in numbers
        ]
    with pytest.raises(DataError, match="fewer rows"):
        read_rows(path, [len(table)], ["step"])


def test_notes_are_kept_and_filtered(tmp_path: Path) -> None:
    index = RunIndex(usual_run(tmp_path))
    write_note(tmp_path, "step/1/0/0/0", {"star": True})
    write_note(tmp_path, "step/1/0/0/0", {"tags": ["hack", "hack", "odd"], "note": "why?"})
    with (tmp_path / "notes.jsonl").open("a") as file:
        file.write('{"key": "step/1/0/1/0", "st')  # the page was killed
    write_note(tmp_path, "step/1/0/2/0", {"star": True})
    write_note(tmp_path, "step/1/0/2/0", {"star": False})
    rollouts = index.rollouts()
    (starred,) = rollouts.rows(rollouts.find("star"))
    assert (starred["key"], starred["tags"], starred["note"]) == ("step/1/0/0/0", ["hack", "odd"], "why?")
    assert len(rollouts.find("tag = odd")) == len(rollouts.find("note contains WHY")) == 1
    before = (tmp_path / "notes.jsonl").read_bytes()
    for change in (
        {"star": 1},
        {"tags": "hack"},
        {"tags": [""]},
        {"tags": ["x" * 101]},
        {"note": 5},
        {"note": "x" * 10_001},
    ):
        with pytest.raises(DataError):
            write_note(tmp_path, "step/1/0/0/0", change)
    assert (tmp_path / "notes.jsonl").read_bytes() == before
    assert set(read_notes(tmp_path)) == {"step/1/0/0/0", "step/1/0/2/0"}


def test_two_browsers_that_change_a_note_keep_both_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_the_other(file: Any, kind: int) -> None:
        with (tmp_path / "notes.jsonl").open("a") as other:
            other.write(json.dumps({"key": "step/1/0/0/0", "star": True}) + "\n")

    monkeypatch.setattr("rollgrad.adapters.tracking.browse.notes.fcntl.flock", wait_for_the_other)
    write_note(tmp_path, "step/1/0/0/0", {"tags": ["odd"]})
    kept = read_notes(tmp_path)["step/1/0/0/0"]
    assert (kept.star, kept.tags) == (True, ("odd",))


def test_reading_needs_no_torch_and_the_command_no_pandas(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from rollgrad.entrypoints.ui.without_pandas import WithoutPandas
import rollgrad.adapters.servers.ui
from rollgrad.entrypoints.ui.runs import Runs

sys.meta_path.insert(0, WithoutPandas())
found = Runs(Path({str(usual_run(tmp_path / "run"))!r})).view("run").trajectories("reward > 0", "-reward", 0, 10)
print(found["matched"], {{"torch", "pandas"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "5 set()\n"


@pytest.mark.parametrize(
    "code",
    [ASIDE, "import sys\nfrom rollgrad.entrypoints.cli.main import main\nassert main(['report', sys.argv[1]]) == 0"],
)
def test_a_report_is_written_without_torch_and_pandas(tmp_path: Path, code: str) -> None:
    run = usual_run(tmp_path / "run")
    code += "\nprint({'torch', 'pandas'} & sys.modules.keys(), 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(run), "a run"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set() True\n")
    assert (run / "report.html").exists()

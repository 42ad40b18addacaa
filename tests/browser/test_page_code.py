"""The page's modules without its screens: differences, trees, scales, filters, numbers as text."""

import json
import random
from typing import Any

import pytest

from tests.browser.conftest import Page
from tests.fakes.kept_run import STEPS

pytestmark = pytest.mark.browser


@pytest.fixture
def code(page: Page) -> Any:
    """Calls an exported function of a module for each of several lists of arguments."""

    def call(module: str, name: str, *calls: Any) -> list[Any]:
        script = """async ([module, name, calls]) => {
            const used = (await import('./' + module))[name];
            return calls.map(given => used(...given));
        }"""
        return page.run_code(script, [module, name, [list(given) for given in calls]])

    page.open("#/")
    return call


def test_differences_have_all_of_both_texts_and_what_is_common(code: Any) -> None:
    chance = random.Random(0)
    texts = [" ".join(chance.choices(("one", "two", "three", "4", "5.\n"), k=chance.randint(0, 30))) for _ in range(80)]
    pairs = [*zip(texts[::2], texts[1::2], strict=True), ("", "a"), ("a b", "a b"), ("a", "")]
    for (before, after), parts in zip(pairs, code("diff.js", "wordDiff", *pairs), strict=True):
        assert "".join(text for kind, text in parts if kind <= 0) == before
        assert "".join(text for kind, text in parts if kind >= 0) == after
    assert code("diff.js", "wordDiff", ("the cat sat", "the dog sat"))[0] == [
        *([0, "the "], [-1, "cat"], [1, "dog"], [0, " sat"]),
    ]


def test_differences_of_long_texts_without_anything_in_common_end(code: Any) -> None:
    before, after = " ".join(map(str, range(5000))), " ".join(str(-number) + "x" for number in range(5000))
    parts = code("diff.js", "wordDiff", (before, after))[0]
    assert "".join(text for kind, text in parts if kind <= 0) == before


def test_trees_have_each_sequence_and_shared_beginnings_once(code: Any) -> None:
    chance = random.Random(1)
    groups = [[chance.choices((1, 2), k=chance.randint(1, 6)) for _ in range(chance.randint(1, 6))] for _ in range(60)]

    def leaves(node: Any, sequences: Any, begun: list[int]) -> list[tuple[int, list[int]]]:
        begun = begun + sequences[node["members"][0]][node["from"] : node["to"]]
        if not node["children"]:
            return [(member, begun) for member in node["members"]]
        nexts = [sequences[child["members"][0]][child["from"] : child["from"] + 1] for child in node["children"]]
        assert len({tuple(token) for token in nexts}) == len(nexts)  # they part here, and not before
        return [leaf for child in node["children"] for leaf in leaves(child, sequences, begun)]

    for sequences, tree in zip(groups, code("tree.js", "treeOf", *[(group,) for group in groups]), strict=True):
        assert sorted(leaves(tree, sequences, [])) == sorted(enumerate(sequences))
    assert code("tree.js", "treeOf", ([],)) == [None]


def test_scales_are_symmetric_and_ignore_single_outliers(code: Any) -> None:
    values = [-1.0, -0.5, 0.0, 0.5, 1.0] * 30 + [1000.0]
    (scale,) = code("scales.js", "scaleOf", (values, "diverging"))
    assert (scale["low"], scale["high"]) == (-1, 1)
    shades = code("scales.js", "colour", *[(value, scale) for value in (-5, -1, -0.5, -0.01, 0, 0.01, 0.5, 1, 5, None)])
    assert shades == ["n8", "n8", "n4", "n1", "", "p1", "p4", "p8", "p8", ""]
    assert code("scales.js", "scaleOf", ([None, None], "diverging"), ([], "sequential")) == [None, None]
    (ratio,) = code("scales.js", "scaleOf", ([0.9, 1.05], "diverging", 1))
    assert (ratio["low"], ratio["high"]) == pytest.approx((0.95, 1.05))
    (one,) = code("scales.js", "scaleOf", ([2.0, 2.0], "sequential"))
    assert code("scales.js", "colour", (2.0, one), (0.0, one)) == ["q8", "q1"]


def test_tokens_stay_readable_on_every_shade(page: Page) -> None:
    """WCAG's contrast of 4.5 for text, of ink and of quiet text, on each shade and ground of both themes."""
    script = """async () => {
        const { legend } = await import('./scales.js');
        const least = {};
        const rgb = text => text.match(/[\\d.]+/g).map(Number);
        const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        const light = channels => channels.slice(0, 3).map(linear)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const shades = ['diverging', 'sequential']
            .flatMap(kind => legend({ kind, low: -1, high: 1 }).map(([shade]) => shade));
        for (const theme of ['light', 'dark']) {
            document.documentElement.dataset.theme = theme;
            const box = document.body.appendChild(document.createElement('div'));
            box.className = 'flow';
            const ground = rgb(getComputedStyle(box).backgroundColor);
            for (const shade of shades) {
                const span = box.appendChild(document.createElement('span'));
                span.className = 'tok ' + shade;
                const [r, g, b, alpha = 1] = rgb(getComputedStyle(span).backgroundColor);
                const mixed = [r, g, b].map((c, i) => c * alpha + ground[i] * (1 - alpha));
                const [one, two] = [light(rgb(getComputedStyle(span).color)), light(mixed)].sort((a, b) => b - a);
                least[theme + ' ' + shade] = (one + 0.05) / (two + 0.05);
            }
            for (const name of ['soft', 'failure', 'good', 'idle']) {
                const text = box.appendChild(document.createElement('span'));
                text.className = name;
                const [one, two] = [light(rgb(getComputedStyle(text).color)), light(ground)].sort((a, b) => b - a);
                least[theme + ' ' + name] = (one + 0.05) / (two + 0.05);
            }
            box.remove();
        }
        return least;
    }"""
    page.open("#/")
    contrast = page.run_code(script)
    assert len(contrast) > 50
    assert {name: ratio for name, ratio in contrast.items() if ratio < 4.5} == {}


def test_a_report_filters_as_the_server_does(page: Page) -> None:
    filters = (
        "",
        "reward < 0.5 and turns = 1",
        "stop_reason = length",
        "step >= 3 and step != 4 and kind = update",
        'response contains "LET US"',
        "advantage is null",
        "label is not null and action_tokens > 20",
        '"what is 9"',
        "not zero_spread and kind = update",
        "part.format > 0.4",
        "datasource = 'sums' and group_id = 203",
    )
    page.open("#/r/sums")
    script = """async filter => {
        const { matcher, sorter } = await import('./filter.js');
        const ask = async filter => (await (await fetch('api/run/sums/trajectories?' + new URLSearchParams(
            { filter, size: 1000, sort: '-reward,step,group_id,sample_id' }))).json()).rows;
        const all = await ask('');
        const mine = all.filter(matcher(filter, all)).sort(sorter('-reward,step,group_id,sample_id'));
        return [mine.map(row => row.key), (await ask(filter)).map(row => row.key)];
    }"""
    for given in filters:
        mine, servers = page.run_code(script, given)
        assert mine == servers, given
        assert mine, given


def test_a_tab_in_the_background_keeps_no_connection(page: Page) -> None:
    page.open("#/")
    script = """async () => {
        let hidden = true;
        Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });
        const turn = value => { hidden = value; document.dispatchEvent(new Event('visibilitychange')); };
        const pause = () => new Promise(done => setTimeout(done, 10));
        const [asked, heard, own] = [[], [], window.fetch];
        window.fetch = (path, options) => { asked.push(options.signal); return own(path, options); };
        const stop = (await (await import('./source.js')).openSource()).listen('sums', state => heard.push(state));
        await pause();
        const before = asked.length;
        turn(false);
        while (!heard.length) await pause();
        turn(true);
        const ended = asked[0].aborted;
        stop();
        window.fetch = own;
        delete document.hidden;
        return [before, asked.length, ended];
    }"""
    assert page.run_code(script) == [0, 1, True]


def test_a_page_without_the_token_says_where_it_belongs(page: Page) -> None:
    page.open("#/")
    script = """async () => {
        const own = window.fetch;
        window.fetch = async () => new Response('{"error": {"message": "send the header"}}', { status: 401 });
        const source = await (await import('./source.js')).openSource();
        const said = await source.runs().catch(error => error.message);
        window.fetch = own;
        return said;
    }"""
    assert "#token=" in page.run_code(script)


def test_numbers_are_short_and_signs_are_minus_signs(code: Any) -> None:
    values = {0: "0", 0.5: "0.5", -1234.5678: "−1235", 12345: "12,345", 1e-9: "1.00e−9", 0.333333: "0.3333"}
    assert code("text.js", "number", *[(value,) for value in values]) == list(values.values())
    assert code("text.js", "number", (None,)) == ["–"]
    durations = {3.21: "3.2 s", 65: "1 min 5 s", 7260: "2 h 1 min", 200_000: "2 d 7 h"}
    assert code("text.js", "duration", *[(value,) for value in durations]) == list(durations.values())


def test_numbers_of_an_axis_tell_each_from_its_neighbours(code: Any) -> None:
    axes = [([6.158, 6.1585, 6.159], 0.0005), ([0, 0.25, 0.5], 0.25), ([100, 100.25], 0.25), ([-1e-9, 0], 1e-9)]
    expected = [["6.158", "6.1585", "6.159"], ["0", "0.25", "0.5"], ["100", "100.25"], ["−1.0e−9", "0"]]
    assert code("charts.js", "labels", *axes) == expected


def test_scores_that_are_not_0_or_1_have_a_chart(code: Any) -> None:
    def titles(mean: list[float]) -> list[str]:
        series = {"eval/pass@1": {"steps": [0, 4], "values": [0, 0]}, "eval/mean@2": {"steps": [0, 4], "values": mean}}
        return [panel["title"] for panel in code("panels.js", "drawn", (series,))[0]]

    assert titles([0.25, 5.5]) == ["Evaluation", "Held-out score"]
    assert titles([0, 0]) == ["Evaluation"]


@pytest.mark.parametrize(
    ("sets", "shown"), [(0, ["pass@1"]), (2, ["all", "set-0/hard", "set-1/hard"]), (9, ["pass@1"])]
)
def test_several_held_out_datasets_have_a_curve_each(code: Any, sets: int, shown: list[str]) -> None:
    names = ["eval/pass@1", *(f"eval/set-{number}/hard/pass@1" for number in range(sets))]
    series = {name: {"steps": [0], "values": [0.5]} for name in (*names, "eval/set-0/hard/pass@1_stderr")}
    (panel,) = code("panels.js", "drawn", (series,))[0]
    assert panel["title"] == "Evaluation"
    assert list(panel["curves"].values()) == shown


def test_quantities_are_those_of_the_file(page: Page) -> None:
    """Ratio, mismatch, and share of the step's gradient, against numpy's."""
    import numpy

    page.open("#/")
    row = json.loads(
        page.run_code(f"async () => (await fetch('api/run/sums/trajectory/step/{STEPS}/{STEPS}50/0/0')).text()")
    )
    tokens = row["tokens"]
    found = page.run_code(
        """async tokens => {
            const { QUANTITIES } = await import('./quantities.js');
            return Object.fromEntries(Object.entries(QUANTITIES).filter(([, q]) => tokens[q.needs])
                .map(([name, q]) => [name, tokens.kind.map((_, index) => q.of(tokens, index))]));
        }""",
        tokens,
    )
    sampled = numpy.array(tokens["kind"]) == 1
    difference = numpy.array(tokens["trainer_logprob"]) - numpy.array(tokens["logprob"])
    of = lambda name: numpy.array(found[name], dtype=float)[sampled]  # noqa: E731
    numpy.testing.assert_allclose(of("ratio"), numpy.exp(difference[sampled]))
    numpy.testing.assert_allclose(of("mismatch"), difference[sampled])
    strength = numpy.abs(numpy.array(tokens["weight"]) * numpy.array(tokens["advantage"])) * numpy.exp(difference)
    numpy.testing.assert_allclose(of("share"), strength[sampled])
    assert not numpy.array(found["share"], dtype=float)[~sampled].any()
    assert "".join(tokens["text"]["texts"][index] for index in tokens["text"]["index"]).startswith("user\nUse the tool")


def test_a_conversation_begins_with_what_the_model_saw(code: Any) -> None:
    rendered = "<|user|>\nWhat is 3 x 4?\n<|assistant|>\n"
    asked = [{"role": "user", "content": "What is 3 x 4?"}]
    pictured = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    row = {"prompt": rendered, "messages": asked}

    def of(text: str) -> list[dict[str, Any]]:
        return [{"kind": 0, "text": text}, {"kind": 1, "text": "12"}]

    with_tools = f"<|system|>\nmultiply(a, b)\n{rendered}"
    cases = [
        (row, of(rendered)),
        ({**row, "prompt": rendered.replace("3 x 4", "***")}, of(rendered.replace("3 x 4", "******"))),
        (row, of(with_tools)),
        ({"prompt": rendered, "messages": None}, of(rendered)),
        ({"prompt": rendered, "messages": pictured}, of(rendered + "<image><image>")),
        (row, []),  # a failed episode
    ]
    assert code("trajectory.js", "openingOf", *cases) == [
        [["user", "What is 3 x 4?"]],
        [["user", "What is 3 x 4?"]],
        [["prompt", with_tools]],
        [["prompt", rendered]],
        [["user", json.dumps(pictured[0]["content"], indent=1)]],
        [["user", "What is 3 x 4?"]],
    ]

"""The page of runs in a browser: each screen on a phone and a desk, hostile texts, keys, links, and what it shows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.tracking.trajectory_files import read_trajectories
from tests.browser.conftest import DESK, PATIENCE, PHONE, Page, opened, serving
from tests.fakes.kept_run import (
    HOSTILE,
    LONG_LINE,
    SAMPLES,
    STEPS,
    Vocabulary,
    learned,
    row,
    write_rows,
    write_run,
)

pytestmark = pytest.mark.browser

LEARNED = "#/r/sums/t/2/201/1"
"""Address of a rollout whose group taught something."""
SCREENS = {
    "runs": "#/",
    "overlay": "#/?with=sums/other",
    "overview": "#/r/sums",
    "trajectories": "#/r/sums/t?scatter=reward",
    "conversation": f"#/r/sums/t/{STEPS}/{STEPS}50/0",
    "tokens": f"{LEARNED}?tab=tokens&token=20",
    "tree": f"{LEARNED}?tab=tree",
    "numbers": f"{LEARNED}?tab=numbers",
    "raw": f"{LEARNED}?tab=raw",
    "compare": "#/r/sums/compare",
}
NAMELESS = """() => [...document.querySelectorAll('button, input, select, a, summary, [role=img]')]
    .filter(e => !(e.textContent.trim() || e.ariaLabel || (e.labels && e.labels.length))).map(e => e.outerHTML)"""


@pytest.mark.parametrize("screen", SCREENS)
def test_each_screen_fits_on_a_phone_and_a_desk_in_both_themes(screen: str, page: Page) -> None:
    page.open(SCREENS[screen])
    for width, height in (DESK, PHONE):
        page.page.set_viewport_size({"width": width, "height": height})
        for theme in ("light", "dark"):
            page.page.emulate_media(color_scheme=theme)
            page.page.wait_for_function("theme => document.documentElement.dataset.theme === theme", arg=theme)
            page.page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
            assert len(page.page.inner_text("main")) > 20
    assert page.page.evaluate(NAMELESS) == []


def test_hostile_texts_are_texts(page: Page) -> None:
    title = page.open("#/r/other").title()
    for index, text in enumerate(HOSTILE):
        for tab in ("conversation", "tokens", "tree", "numbers", "raw"):
            address = f"#/r/other/t/{STEPS}/{900 + index}/0?tab={tab}"
            shown = page.open(address).locator("main")
            assert shown.locator("script, img, b.x, style").count() == 0
            assert page.page.title() == title
        page.open(f"#/r/other/t/{STEPS}/{900 + index}/0")
        seen = page.page.inner_text(".message.assistant .text")
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\ufeff]", seen)
        assert all(part in seen for part in re.findall(r"[\x20-\x7e]+", text))
    page.open("#/r/other/t?filter=datasource = hostile")
    assert page.page.locator("main script, main img").count() == 0


def test_control_characters_are_written_out(page: Page) -> None:
    page.open(f"#/r/other/t/{STEPS}/902/0")
    assert "␛[31mred␛[0m and ␀ NUL" in page.page.inner_text(".message.assistant")
    page.open(f"#/r/other/t/{STEPS}/903/0")
    assert "⟨RLO⟩right to left⟨PDF⟩ ⟨RLM⟩⟨BOM⟩" in page.page.inner_text(".message.assistant")
    shown = page.run_code("async () => (await import('./text.js')).visible('a\\ud800b \\u{e0041}')")
    assert shown == "a⟨U+D800⟩b ⟨U+E0041⟩"


def test_a_line_of_a_megabyte_is_shown_when_asked_for(page: Page) -> None:
    page.open(f"#/r/other/t/{STEPS}/{900 + len(HOSTILE)}/0")
    reply = page.page.locator(".message.assistant .text")
    assert len(reply.inner_text()) == 20_000
    page.page.locator(".message.assistant button").click()
    assert page.page.evaluate("document.querySelector('.message.assistant .text').textContent.length") > 2 * len(
        LONG_LINE
    )


def test_what_a_tool_wrote_at_length_is_folded(browser: Any, tmp_path: Path) -> None:
    output = [token for line in range(60) for token in (f"line {line}", "\n")]
    parts = [(0, ["What is in the file?"]), (1, ["cat file"]), (2, output), (1, ["Sixty lines."])]
    vocabulary = Vocabulary()
    rows = [row(vocabulary, group=1, sample=sample, parts=parts, seed=sample) for sample in range(2)]
    rows[1]["token"][-1] += 1  # the last reply is another one
    learned(rows)
    write_rows(tmp_path / "agent/trajectories/step-000001.parquet", rows)
    (tmp_path / "agent/metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    with serving(tmp_path) as address, opened(browser, address) as page:
        page.open("#/r/agent/t/1/1/0")
        written = page.page.locator(".message.environment")
        assert "line 15" in written.inner_text()
        assert "line 16" not in written.inner_text()
        assert page.page.locator(".message.assistant h2").first.inner_text().startswith("assistant turn 0")
        written.get_by_role("button", name="Show all 61 lines").click()
        assert "line 59" in written.inner_text()
        page.open("#/r/agent/t/1/1/1")
        assert "line 59" not in written.inner_text(), "another trajectory is folded again"
        page.page.get_by_role("button", name="Show all lines of every message").click()
        assert "line 59" in written.inner_text()


def test_failed_episodes_say_why(page: Page) -> None:
    page.open("#/r/other/t?filter=failure is not null")
    page.page.locator(".virtual .row a").click()
    page.settle()
    assert "failed: environment" in page.page.inner_text("h1")
    assert HOSTILE[1] in page.page.inner_text(".message.failure")


def test_what_the_reward_says_of_a_reply_stands_below_it(page: Page) -> None:
    page.open(f"#/r/other/t/{STEPS}/900/0")
    assert f"answer {HOSTILE[0]}" in page.page.inner_text("h1")
    *_, said = page.page.locator(".message").all_inner_texts()
    assert said.split("\n", 1)[0] == "reward feedback"
    assert HOSTILE[1] in said


def test_a_link_to_a_token_shows_its_numbers(page: Page) -> None:
    page.open(f"{LEARNED}?tab=tokens&token=20")
    tokens = page.run_code("async () => (await (await fetch('api/run/sums/trajectory/step/2/201/1/0')).json()).tokens")
    numbers = page.page.locator(".numbers")
    assert "token 20" in numbers.inner_text()
    assert f"{tokens['logprob'][20]:.3f}".replace("-", "−") in numbers.inner_text()
    page.page.keyboard.press("ArrowRight")
    page.page.wait_for_function("() => location.hash.includes('token=21')")
    assert "token 21" in numbers.inner_text()
    page.page.locator(".flow [data-i='15']").click()
    page.page.wait_for_function("() => location.hash.includes('token=15')")
    page.page.go_back()  # tokens replace each other, so that going back leaves the trajectory
    page.page.wait_for_function("() => !location.hash.includes('token=')")


def test_tokens_are_coloured_by_each_number_that_they_have(page: Page) -> None:
    page.open(f"#/r/sums/t/{STEPS}/{STEPS}50/0?tab=tokens")
    offered = page.page.locator(".tokenbar select option").evaluate_all("all => all.map(e => e.value)")
    assert offered == ["advantage", "share", "logprob", "entropy", "ratio", "mismatch", "weight", "reward", "version"]
    for name in offered:
        page.page.select_option(".tokenbar select", name)
        page.page.wait_for_function("name => location.hash.includes('by=' + name)", arg=name)
        kinds = page.page.locator(".flow .tok.environment").count()
        assert kinds == 10
    page.page.select_option(".tokenbar select", "ratio")
    classes = set(page.page.locator(".flow .tok").evaluate_all("all => all.map(e => e.className)"))
    assert any(" p" in name for name in classes)
    assert any(" n" in name for name in classes)
    assert re.search(r"0\.8\d+ centre 1 1\.1", page.page.inner_text(".legend").replace("\n", " "))


def test_tokens_without_weight_are_crossed_out(page: Page) -> None:
    page.open("#/r/sums/t/1/101/3?tab=tokens")
    marked = page.page.locator(".flow .tok.masked")
    assert marked.count() == 9
    assert "line-through" in marked.first.evaluate("e => getComputedStyle(e).textDecoration")


def test_a_token_whose_ratio_was_clipped_is_framed(page: Page) -> None:
    page.open(f"{LEARNED}?tab=tokens")
    clipped = page.page.locator(".flow .tok.clipped")
    assert clipped.count() == 1
    assert "dotted" in clipped.evaluate("e => getComputedStyle(e).outline")
    clipped.click()
    page.page.wait_for_function("() => document.querySelector('.numbers').innerText.includes('ratio clipped')")


def test_a_group_is_a_tree(page: Page) -> None:
    page.open(f"{LEARNED}?tab=tree")
    text = page.page.inner_text(".tree")
    assert text.count("What is 48 + 35?") == 1
    assert page.page.locator(".leaf").count() == 4
    assert page.page.locator(".leaf[aria-current]").inner_text().startswith("sample 1")
    page.page.locator(".leaf").first.click()
    page.page.wait_for_function("() => location.hash.includes('tab=tree') && !location.hash.includes('/201/1')")
    page.open("#/r/sums/t/2/202/0?tab=tree")
    assert "Taught nothing." in page.page.inner_text(".banner")


def test_the_sum_over_tokens_of_weight_times_loss_is_the_logged_loss(page: Page, kept_runs: Path) -> None:
    logged = [json.loads(line) for line in (kept_runs / "sums/metrics.jsonl").read_text().splitlines()]
    page.open(SCREENS["numbers"])
    code = """async steps => {
        const { policyLoss } = await import('./quantities.js');
        const { tokensOfStep } = await import('./trajectory.js');
        const { openSource } = await import('./source.js');
        const source = await openSource();
        const sums = [];
        for (const step of steps) sums.push(policyLoss(await tokensOfStep(source, 'sums', step)));
        return sums;
    }"""
    steps = list(range(1, STEPS + 1))
    expected = [logged[step]["policy/policy_loss"] for step in steps]
    assert any(abs(loss) > 1e-3 for loss in expected)
    assert page.run_code(code, steps) == pytest.approx(expected, abs=1e-9)
    page.page.get_by_role("button", name="Add up the step").click()
    page.settle()
    shown = page.page.inner_text(".sum").replace("−", "-")
    assert float(shown.split()[0]) == pytest.approx(expected[1], rel=1e-4)
    assert "16 trajectories" in shown


def test_numbers_are_those_that_the_file_adds_up_to(page: Page, kept_runs: Path) -> None:
    """Advantage, versions and rewards by turn, of a rollout that taught something and of one of two turns."""
    for step, group, sample in ((2, 201, 1), (STEPS, STEPS * 100 + 50, 0)):
        rows = read_trajectories(kept_runs / f"sums/trajectories/step-{step:06d}.parquet").to_pylist()
        (stored,) = (row for row in rows if (row["group_id"], row["sample_id"]) == (group, sample))
        tokens = list(
            zip(*(stored[f"token_{name}"] for name in ("turn", "advantage", "version", "reward")), strict=True)
        )
        sampled = [each for each in tokens if each[0] >= 0]
        page.open(f"#/r/sums/t/{step}/{group}/{sample}?tab=numbers")
        tables = page.page.locator("table.figures").evaluate_all(
            "all => all.map(e => [...e.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText)))"
        )
        shown = {name: value.replace("−", "-") for name, value in tables[0]}
        advantages = [advantage for _, advantage, _, _ in sampled]
        assert float(shown["advantage (mean)"]) == pytest.approx(sum(advantages) / len(advantages), rel=1e-4)
        versions = [version for _, _, version, _ in sampled]
        assert int(shown["updates behind the oldest token"]) == min(versions)
        assert int(shown["updates behind the newest token"]) == max(versions)
        rewards = {turn: sum(each[3] for each in sampled if each[0] == turn) for turn, *_ in sampled}
        assert float(shown["reward"]) == pytest.approx(sum(rewards.values()))
        assert [(int(turn), float(reward)) for turn, _, reward in (tables[1:] or [[]])[0]] == (
            list(rewards.items()) if len(rewards) > 1 else []
        )


def test_a_run_of_an_earlier_version_opens(browser: Any, kept_runs: Path, tmp_path: Path) -> None:
    """It has nothing but metrics, and a text of each step."""
    old = tmp_path / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text((kept_runs / "sums/metrics.jsonl").read_text())
    sample = {"step": 3, "prompt": "What is 2 + 5?", "response": "It is 7.", "label": "7", "reward": 1.0}
    (old / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    with serving(tmp_path) as address, opened(browser, address) as page:
        page.open("#/r/old")
        assert page.page.locator("figure.chart canvas").count() >= 6
        page.open('#/r/old/t?filter=response contains "it is"')
        page.page.locator(".virtual .row a").click()
        page.page.locator(".message.assistant", has_text="It is 7.").wait_for()
        for tab in ("tokens", "tree", "numbers", "raw"):
            page.open(f"#/r/old/t/3/0/0?tab={tab}")
            assert page.page.inner_text("main")


def test_keys(page: Page) -> None:
    page.open("#/r/sums/t?filter=step = 2 and kind = update")
    page.page.locator(".row[aria-rowindex='3']").wait_for()  # a key that is pressed before there are rows does nothing
    keys = page.page.keyboard
    keys.press("j")
    keys.press("j")
    page.page.locator(".row.active").wait_for()
    assert page.page.get_attribute(".row.active", "aria-rowindex") == "3"
    keys.press("Enter")
    page.page.locator(".headline").wait_for()
    first, place = page.page.url, page.page.inner_text(".crumbs")
    keys.press("j")
    page.page.wait_for_function("place => document.querySelector('.crumbs').innerText !== place", arg=place)
    page.page.wait_for_function("() => document.querySelector('.crumbs button').disabled === false")
    keys.press("k")
    page.page.wait_for_function("url => location.href === url", arg=first)
    keys.press("g")
    page.page.locator(".tree").first.wait_for()
    keys.press("g")
    page.page.locator(".conversation").wait_for()
    keys.press("2")
    page.page.locator(".flow").wait_for()
    keys.press("]")
    page.page.wait_for_function("() => location.hash.startsWith('#/r/sums/t/3/')")
    page.page.locator(".flow").wait_for()
    keys.press("[")
    page.page.wait_for_function("() => location.hash.startsWith('#/r/sums/t/2/')")
    keys.press("?")
    assert page.page.locator("dialog[open]").count() == 1
    keys.press("Escape")
    keys.press("/")
    page.page.wait_for_function("() => location.hash.startsWith('#/r/sums/t')")
    page.page.locator(".row").first.wait_for()  # as above
    keys.press("/")
    keys.type("reward = 1")
    page.page.wait_for_function("() => location.hash.includes('reward')")


def test_keys_of_a_focused_control_are_its_own(page: Page) -> None:
    page.open(f"{LEARNED}?tab=tokens&token=20")
    page.page.get_by_role("tab", name="Tokens").focus()
    page.page.keyboard.press("ArrowRight")
    page.page.wait_for_function("() => location.hash.includes('tab=tree')")
    assert "token=20" in page.page.url


def test_a_token_in_the_address_is_kept_and_removed(browser: Any, served: str) -> None:
    sent: list[str | None] = []
    with opened(browser, served) as page:
        page.page.on("request", lambda asked: "/api/" in asked.url and sent.append(asked.headers.get("authorization")))
        page.page.goto(f"{served}#token=a%20secret")
        page.settle()
        assert "secret" not in page.page.url
        page.page.reload()
        page.settle()
    assert set(sent) == {"Bearer a secret"}


def test_stars_and_notes_are_kept(page: Page) -> None:
    page.open(LEARNED)
    page.page.locator(".headline").wait_for()
    page.page.keyboard.press("s")
    page.page.locator(".crumbs button[aria-pressed=true]").wait_for()
    page.page.get_by_label("Tags").fill("good, short")
    page.page.get_by_label("Note").fill("<b>why</b>")
    page.page.get_by_role("button", name="Save").click()
    page.page.get_by_text("Saved").wait_for()
    page.open("#/r/sums/t?filter=star")
    assert "1 of" in page.page.inner_text(".counted")
    page.page.locator(".virtual .row a").click()
    page.page.locator(".note").wait_for()
    assert page.page.get_by_label("Note").input_value() == "<b>why</b>"
    assert page.page.get_by_label("Tags").input_value() == "good, short"


def test_a_filter_finds_rows_or_says_what_is_wrong(page: Page) -> None:
    page.open("#/r/sums/t")
    page.page.locator(".expression").fill("reward = 0 and stop_reason = length")
    page.page.wait_for_function("() => document.querySelector('.counted')?.textContent.startsWith('6 of')")
    page.page.get_by_role("button", name="cut off").click()  # the same condition: it is taken away
    page.page.wait_for_function("() => !location.hash.includes('length')")
    page.page.locator(".expression").fill("rewrd > 1")
    page.page.locator(".problem").wait_for()
    assert "rewrd" in page.page.inner_text(".problem")
    page.problems.clear()  # the browser logs the answer 400


def test_findings_curves_and_settings_are_searched(page: Page) -> None:
    page.open("#/r/sums")
    assert page.page.locator("figure.chart canvas").count() >= 6
    page.page.get_by_label("Search metrics").fill("policy loss")
    page.page.locator("figure.chart").first.wait_for()
    page.page.wait_for_function("() => document.querySelectorAll('figure.chart').length === 1")
    assert "policy/policy_loss" in page.page.inner_text("figure.chart")
    page.page.get_by_text("Settings").click()
    page.page.get_by_label("Search settings").fill("lr")
    page.page.wait_for_function("() => document.querySelectorAll('.settings tr').length === 1")


def test_runs_are_laid_over_each_other(page: Page) -> None:
    page.open("#/")
    for box in page.page.locator("tbody input[type=checkbox]").all():
        box.check()
    page.page.locator("figure.chart").first.wait_for()
    assert "actor.adam.lr" in page.page.inner_text(".settings")
    assert "prompt_dataset" not in page.page.inner_text(".settings")


def test_runs_of_any_name_look_alike_in_all_charts(browser: Any, tmp_path: Path) -> None:
    """Also one that has other metrics than the first, and one whose name turns text around."""
    names = ("lr=1,seed=2", "\u202e<b>odd", "of examples")
    for name in names:
        (tmp_path / name).mkdir()
        metric = "train/loss" if name == names[-1] else "reward/mean"
        rows = [{"step": step, metric: 0.5, "time/step_s": 2.0} for step in (1, 2)]
        rows[0] |= {"eval/pass@1": 0.0, "eval/mean@1": 0.0}
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(tmp_path) as address, opened(browser, address) as page:
        page.open("#/")
        for box in page.page.locator("tbody input[type=checkbox]").all():
            box.check()
        page.page.locator("figure.chart", has_text="train/loss").wait_for()
        colours: dict[str, set[str]] = {}
        for row in page.page.locator(".u-series ~ .u-series").all():  # not the first, of steps
            label = row.locator(".u-label").inner_text()
            marker = row.locator(".u-marker").evaluate("marker => getComputedStyle(marker).borderColor")
            colours.setdefault(label, set()).add(marker)
        assert set(colours) == {names[0], "⟨RLO⟩<b>odd", names[2]}
        assert len(set.union(*colours.values())) == len(names), "each run has one colour of its own"
        page.open("#/r/of%20examples")
        assert page.page.locator("figcaption").all_inner_texts()[0].startswith("Evaluation"), "it was 0 all the time"
        legend = page.page.inner_text("figure.chart:has-text('Time per step') .u-legend")
        assert "".join(legend.split()) == "step2all2"
        assert "None yet" in page.page.inner_text(".findings")


def test_the_list_and_runs_side_by_side_follow_those_that_go_on(browser: Any, tmp_path: Path) -> None:
    for name in ("done", "live"):
        write_run(tmp_path / name, steps=2)
    context = browser.new_context()  # whose clock is another one
    with serving(tmp_path) as address:
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.clock.install()
        page.goto(f"{address}#/?with=done/live")
        page.locator("figure.chart").first.wait_for()
        with (tmp_path / "live/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 31, "reward/mean": 0.125}) + "\n")
        page.clock.run_for(15_000)
        page.locator("td", has_text="31").first.wait_for()
        page.locator('[aria-label*="to 0.125 at step 31"]').wait_for()
        context.close()


@pytest.mark.parametrize("later", ["findings", "metrics"])
def test_a_run_begins_with_its_name_whatever_is_answered_last(page: Page, later: str) -> None:
    page.open("#/")
    held: list[Any] = []
    pattern = re.compile(rf"/api/run/sums/{later}")
    page.page.route(pattern, lambda route: held.append(route))
    page.page.evaluate("location.hash = '#/r/sums'")
    first = page.page.locator("figure.chart" if later == "findings" else ".findings").first
    first.wait_for()
    for request in held:
        request.continue_()
    page.page.unroute(pattern)
    page.page.locator(".findings").wait_for()
    page.page.locator("figure.chart").first.wait_for()
    titles = page.page.locator("main h1, main h2").all_inner_texts()
    assert [title.split()[0] for title in titles[:3]] == ["sums", "Findings", "Curves"]


def test_two_moments_of_a_prompt_are_compared_word_by_word(page: Page) -> None:
    page.open("#/r/sums/compare")
    replies = page.run_code("""async () => {
        const { prompts } = await (await fetch('api/run/sums/compare')).json();
        const one = prompts.find(prompt => prompt.prompt.includes('48 + 35'));
        const { steps } = await (await fetch('api/run/sums/compare/' + one.prompt_id)).json();
        return steps.map(step => step.replies[0].response);
    }""")
    page.page.locator(".prompts button", has_text="48 + 35").click()
    page.page.locator(".sliders").wait_for()
    page.page.get_by_role("slider", name="From").fill("0")
    for place in range(1, len(replies)):
        page.page.locator(".slider input").nth(1).fill(str(place))
        page.page.wait_for_function(
            "text => document.querySelector('.replies')?.innerText.includes(text)", arg=f"step {place * 2}"
        )
        if replies[place] != replies[0]:
            before = page.page.locator(".diff").evaluate(
                "e => [...e.childNodes].filter(n => n.nodeName !== 'INS').map(n => n.textContent).join('')"
            )
            after = page.page.locator(".diff").evaluate(
                "e => [...e.childNodes].filter(n => n.nodeName !== 'DEL').map(n => n.textContent).join('')"
            )
            assert (before, after) == (replies[0], replies[place])


def test_new_rewards_are_shown_against_the_old_ones(browser: Any, tmp_path: Path) -> None:
    from rollgrad.adapters.tracking.browse.rescored import summary, with_changes, write_rescored

    write_run(tmp_path / "judged", steps=2)
    keys = [f"step/2/201/{sample}/0" for sample in range(SAMPLES)]
    rows = with_changes({"key": key, "old": 0.0, "new": float(key == keys[1])} for key in keys)
    content = {"reward": "format", "rows": rows, "summary": summary(rows)}
    write_rescored(tmp_path / "judged", "2026-08-01T10-00-00", content)
    with serving(tmp_path) as address, opened(browser, address) as page:
        page.open("#/r/judged")
        page.page.get_by_role("link", name="2026-08-01T10-00-00").click()
        page.page.locator(".figures").wait_for()
        assert "4 rollouts, 3 with the same reward" in page.page.inner_text(".facts")
        page.page.get_by_role("button", name="another reward").click()
        assert page.page.locator(".figures tbody tr").count() == 1
        page.page.get_by_role("link", name=keys[1]).click()
        page.page.wait_for_function("() => location.hash.startsWith('#/r/judged/t/2/201/1')")


def test_a_new_step_appears_while_the_run_goes_on(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "live", steps=2)
    with serving(tmp_path) as address, opened(browser, address) as page:
        page.open("#/r/live")
        with (tmp_path / "live/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "reward/mean": 0.125}) + "\n")
        page.page.locator('[aria-label*="to 0.125 at step 3"]').wait_for()


def test_a_list_of_ten_thousand_rows_has_few_of_them_in_the_document(page: Page) -> None:
    page.open("#/r/sums/t")
    code = """async () => {
        const { html, render } = await import('./vendor/preact.js');
        const { VirtualList } = await import('./virtual.js');
        const place = document.getElementById('page');
        render(null, place);
        const row = (index, style) => html`<div class="row" style=${style}>row ${index}</div>`;
        const rows = { count: 10000, height: 36, row, need: () => {}, active: null, label: "" };
        render(html`<${VirtualList} ...${rows} />`, place);
        scrollTo(0, 1e7);
    }"""
    page.run_code(code)
    page.page.get_by_text("row 9999", exact=True).wait_for()
    assert page.page.locator(".row").count() < 80


def test_pictures_are_taken_of_a_run(browser: Any, kept_runs: Path, tmp_path: Path) -> None:
    from scripts.page_pictures import take_pictures

    taken = take_pictures(browser, kept_runs / "sums", tmp_path, ("tokens", "compare"))  # each takes a second
    assert len(taken) == 2
    assert all(picture.stat().st_size > 5_000 for picture in taken)

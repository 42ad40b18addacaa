"""`report.html`: the same page in one file, opened from the disk."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.tracking.browse.index import RunIndex
from tests.browser.conftest import PHONE, Page, opened
from tests.fakes.kept_run import HOSTILE, STEPS

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(
    kept_runs: Path, tmp_path_factory: pytest.TempPathFactory, whole_reports: Callable[[pytest.MonkeyPatch], None]
) -> Path:
    from rollgrad.entrypoints.ui.report import write_run_report

    with pytest.MonkeyPatch.context() as patch:
        whole_reports(patch)
        return write_run_report(kept_runs / "other", tmp_path_factory.mktemp("reports") / "report.html")


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Page]:
    with opened(browser, report.as_uri()) as made:
        yield made


def test_a_report_opens_from_the_disk_with_every_screen(page: Page, report: Path) -> None:
    assert report.stat().st_size < 3_000_000
    learned = "#/r/other/t/2/201/1"
    begun = page.open("#/").inner_text("main")
    assert "other" in begun
    assert "when this report was written" in begun
    assert page.page.locator("figure.chart canvas").count() >= 6
    for address in ("#/r/other/t?scatter=reward", learned, "#/r/other/compare"):
        page.open(address)
        assert page.page.locator("main .problem").count() == 0
        assert len(page.page.inner_text("main")) > 50
    page.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    page.open(f"{learned}?tab=tokens&token=14")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert "token 14" in page.page.inner_text(".numbers")
    page.open(f"{learned}?tab=tree")
    assert page.page.locator(".leaf").count() == 4
    page.open(f"{learned}?tab=numbers")
    assert "Minus the sum of weight" in page.page.inner_text("main")
    assert page.page.get_by_role("button", name="Star").count() == 0  # nothing can be written


def test_a_report_filters_sorts_and_compares(page: Page, kept_runs: Path) -> None:
    page.open("#/r/other/t?filter=kind = update and reward = 0&sort=action_tokens")
    lengths = [int(text) for text in page.page.locator(".virtual .tokens").all_inner_texts()]
    assert lengths == sorted(lengths)
    assert set(page.page.locator(".virtual .reward").all_inner_texts()) == {"0"}
    page.open('#/r/other/t?filter=response contains "x x"')  # which comes after a megabyte
    assert page.page.locator(".virtual .row").count() == 1
    total = len(RunIndex(kept_runs / "other").rollouts())
    assert page.page.inner_text(".counted") == f"1 of {total} trajectories", "of all that the run has"
    page.open("#/r/other/t?filter=rewrd > 1")
    assert 'no column "rewrd"' in page.page.inner_text(".problem")
    page.open("#/r/other/compare")
    page.page.locator(".prompts button", has_text="48 + 35").click()
    page.page.locator(".replies .text").last.wait_for()


def test_hostile_texts_are_texts_in_a_report(page: Page) -> None:
    for index, text in enumerate(HOSTILE[:2]):
        page.open(f"#/r/other/t/{STEPS}/{900 + index}/0")
        assert text in page.page.inner_text(".message.assistant")
    assert page.page.locator("main script, main img").count() == 0
    assert page.page.title() != "taken"


def test_a_report_opens_in_a_frame_that_keeps_nothing(browser: Any, report: Path) -> None:
    """As notebooks show HTML files: without an origin, so that the browser refuses to remember anything."""
    frame = report.with_name("frame.html")
    frame.write_text(f'<main></main><iframe sandbox="allow-scripts" src="{report.name}"></iframe>')
    with opened(browser, report.parent.as_uri()) as page:
        page.page.goto(frame.as_uri())
        inside = page.page.frame_locator("iframe")
        inside.locator("figure.chart").first.wait_for()
        inside.get_by_role("button", name="Use the dark theme").click()
        inside.locator("html[data-theme=dark]").wait_for(state="attached")

"""Takes the pictures of docs/run_page.md, of a run that has evaluations.

    python scripts/page_pictures.py RUN docs/images

Those of tokens are of made-up rollouts, with all marks that a token can have; without a run these alone are taken.

    python scripts/page_pictures.py docs/images
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser.conftest import DESK, PHONE, Page, opened, serving, started
from tests.fakes.kept_run import write_run

PICTURES = {
    "overview": ("#/r/{run}", DESK, "light"),
    "overview-phone": ("#/r/{run}", PHONE, "dark"),
    "trajectories": ("#/r/{run}/t?filter=kind = update&scatter=reward", DESK, "dark"),
    "trajectories-phone": ("#/r/{run}/t?filter=kind = update", PHONE, "light"),
    "tokens": ("{chosen}?tab=tokens&by=logprob&token={token}", DESK, "light"),
    "tokens-phone": ("{chosen}?tab=tokens&by=logprob&token={token}", PHONE, "dark"),
    "tree": ("{chosen}?tab=tree", DESK, "light"),
    "compare": ("#/r/{run}/compare?prompt={prompt}", DESK, "dark"),
}
"""Pictures by name: address, width and height in pixels, theme."""
OF_TOKENS = ("tokens", "tokens-phone")
"""Pictures of made-up rollouts."""
HEIGHTS = {"tokens": 560, "tree": 640, "compare": 560}
"""Pixels of those that would end in empty ground."""
CHOICE = """async run => {
    const ask = async path => (await fetch(`api/run/${run}/${path}`)).json();
    const learned = 'kind = update and not zero_spread';
    const { rows } = await ask('trajectories?size=1&sort=-action_tokens&filter=' + encodeURIComponent(learned));
    const [, step, group, sample] = rows[0].key.split('/');
    const { tokens } = await ask('trajectory/' + rows[0].key);
    const unlikely = tokens.kind.reduce((best, kind, i) =>
        kind === 1 && (best < 0 || tokens.logprob[i] < tokens.logprob[best]) ? i : best, -1);
    const { prompts } = await ask('compare');
    prompts.sort((a, b) => b.change - a.change);
    return { run, chosen: `#/r/${run}/t/${step}/${group}/${sample}`, token: unlikely, prompt: prompts[0].prompt_id };
}"""
"""Chooses the longest rollout of a group that taught something, its least likely token, and the prompt that improved
most."""


def take_pictures(browser: Any, run: Path, directory: Path, names: Iterable[str] = PICTURES) -> list[Path]:
    """Writes `page-NAME.png` for each of the names of PICTURES; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    taken = []
    with serving(run) as address, opened(browser, address) as page:
        page.open("#/")
        chosen = page.run_code(CHOICE, run.resolve().name)
        for name in names:
            place, (width, height), theme = PICTURES[name]
            page.page.set_viewport_size({"width": width, "height": HEIGHTS.get(name, height)})
            page.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            page.open(place.format(**chosen))
            taken.append(directory / f"page-{name}.png")
            picture(page, taken[-1])
    return taken


def picture(page: Page, path: Path) -> None:
    """Takes one picture, of 256 colours."""
    from PIL import Image

    page.page.evaluate("scrollTo(0, 0)")
    page.page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    *trained, to = map(Path, sys.argv[1:])
    with TemporaryDirectory() as scratch, started() as chromium:
        for its in trained:
            take_pictures(chromium, its, to, [name for name in PICTURES if name not in OF_TOKENS])
        write_run(Path(scratch) / "sums")
        take_pictures(chromium, Path(scratch) / "sums", to, OF_TOKENS)

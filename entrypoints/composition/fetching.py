"""Makes what fetches images that rows name by URL, and names the directory of what is kept for later runs."""

import os
from pathlib import Path

from rollgrad.adapters.data.fetched_images import FetchedImages
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.application.settings.sections.examples import RowsConfig
from rollgrad.application.settings.sections.images import FetchImages


def own_cache() -> Path:
    """Returns the directory of what is kept for later runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollgrad"


def make_fetched_images(data: DataConfig | RowsConfig) -> FetchedImages | None:
    """Returns what fetches the images of rows; None where the settings have none fetched."""
    if data.fetch_images is FetchImages.NEVER:
        return None
    return FetchedImages(own_cache() / "images", any_address=data.fetch_images is FetchImages.ANY)

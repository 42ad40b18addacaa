"""Settings of the images of rows, which several sections have."""

from enum import StrEnum
from typing import Any

from rollgrad.domain.settings import Condition, setting


class FetchImages(StrEnum):
    """Addresses from which images that rows name by URL are fetched."""

    NEVER = "never"
    PUBLIC = "public"
    """Those of the public network."""
    ANY = "any"
    """Those of this machine and of its own network, too."""


WITH_IMAGES = Condition(
    lambda here, run: here.image_key is not None,
    "data.image_key is not set, which images are read from",
    "set --data.image_key",
)


def fetch_setting() -> Any:
    """Returns the setting `fetch_images` of rows that may have images."""
    return setting(
        FetchImages.NEVER,
        "Addresses from which images that rows name by URL (http, https) are fetched, once, before the first step: "
        "never; public, those of the public network; or any, also those of this machine and its own network. They are "
        "kept in rollgrad/images in XDG_CACHE_HOME or ~/.cache.",
        only_if=WITH_IMAGES,
    )

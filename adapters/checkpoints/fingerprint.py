"""Fingerprints, which identify a model whatever its name is; importable without torch.

Does not own: where models come from.
"""

import hashlib
from pathlib import Path

PROBES, PROBE_BYTES = 16, 2**16
"""Number of evenly spread places in a file of weights that are hashed, and bytes at each. A few are enough: training
changes every weight."""

Fingerprint = dict[str, str | None]
"""`config` and `weights`, each None where there is no such file on this machine."""


def model_fingerprint(name_or_path: str, *, whole: bool = False) -> Fingerprint:
    """Returns the sha256 of a model's configuration, and that of names, sizes and probes of its files of weights; with
    `whole` of all that the files hold, which also tells models apart that share most weights. A model of the hub is
    looked up in this machine's cache."""
    directory = _directory(name_or_path)
    if directory is None:
        return {"config": None, "weights": None}
    settings = directory / "config.json"
    files = sorted(path for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))
    weights = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        weights.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            if whole:
                weights.update(hashlib.file_digest(opened, "sha256").digest())
                continue
            for probe in range(PROBES):
                opened.seek(probe * max(0, size - PROBE_BYTES) // (PROBES - 1))
                weights.update(opened.read(PROBE_BYTES))
    return {
        "config": hashlib.sha256(settings.read_bytes()).hexdigest() if settings.is_file() else None,
        "weights": weights.hexdigest() if files else None,
    }


def _directory(name_or_path: str) -> Path | None:
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        settings = try_to_load_from_cache(name_or_path, "config.json")
    except HFValidationError:  # not a name of the hub: loading the model reports that
        return None
    return Path(settings).parent if isinstance(settings, str) else None

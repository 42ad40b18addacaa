"""The README of a trained model, as the Hugging Face hub shows it: `hf upload me/name runs/ppo/model` needs no more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rollgrad
from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.entrypoints.config_io import changed_settings, yaml_text
from rollgrad.entrypoints.redaction import known_secrets, redact

CARD_FILE = "README.md"
MARK = "Trained with rollgrad"
"""Words by which a card of ours is known; another README of a model is never replaced."""

PRIVATE = ("data", "eval", "reward", "agent", "ref", "ckpt", "logger", "cluster", "teacher")
PRIVATE_KEYS = ("model_name_or_path", "server_urls")
"""Sections of settings, and settings of other sections, that say where things lie, which concerns nobody else."""


def write_model_card(
    model: Path, config: Any, *, steps: int, before: Mapping[str, float], after: Mapping[str, float]
) -> None:
    """Writes the README of a trained model into its directory, unless there is another one.

    Args:
        model: directory of the model.
        config: settings of the run, of which those that name files and servers are left out.
        steps: number of steps that the run took.
        before: evaluation before training.
        after: evaluation after it.

    Raises:
        OSError: it cannot be written.
    """
    path = model / CARD_FILE
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    initial = config.actor.model_name_or_path
    local = Path(initial).exists()
    metadata = {"library_name": "transformers", "tags": ["rollgrad"]} | ({} if local else {"base_model": initial})
    public = {
        name: {key: value for key, value in section.items() if key not in PRIVATE_KEYS}
        for name, section in changed_settings(config).items()
        if name not in PRIVATE
    }
    shown = yaml_text({name: section for name, section in public.items() if section})
    parts = [
        f"---\n{yaml_text(metadata)}---",
        f"# {model.absolute().parent.name}",
        f"{MARK} {rollgrad.__version__} in "
        f"{steps} {'step' if steps == 1 else 'steps'} from {Path(initial).name if local else initial}.",
    ]
    if after:
        rows = [f"| `{name}` | {before.get(name, float('nan')):.4g} | {value:.4g} |" for name, value in after.items()]
        parts.append("\n".join(["| held-out | before | after |", "|---|---|---|", *rows]))
    parts.append(f"Settings other than the defaults:\n\n```yaml\n{redact(shown, known_secrets())}```")
    replace_file(path, ("\n\n".join(parts) + "\n").encode())

"""The section `ckpt`: what is written where."""

import re
from enum import StrEnum

from attrs import define

from rollgrad.domain.control.best_model import Best
from rollgrad.domain.settings import COUNT, DIRECTORY, PERIOD, POSITIVE, Condition, Range, setting

LONGEST_REPOSITORY = 96
"""Characters of a name that the hub takes."""

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

SAVES_STATES = Condition(
    lambda here, run: here.state_minutes is not None or here.state_steps > 0,
    "no training states are saved",
    "set --{at}state_steps",
)

KEEPS_BEST = Condition(lambda here, run: here.best_metric, "no best model is kept", "set --{at}best_metric")


class Resume(StrEnum):
    """Whether a run continues from the training state in its directory."""

    NEVER = "never"
    """It starts anew."""
    ALWAYS = "always"
    """It continues; without a training state it is refused."""
    AUTO = "auto"
    """It continues if there is a training state, else it starts anew: for jobs that are started again and again."""

    @classmethod
    def _missing_(cls, value: object) -> "Resume | None":
        """True and False, as the setting was before it knew auto."""
        return {True: cls.ALWAYS, False: cls.NEVER}.get(value) if isinstance(value, bool) else None


@define(kw_only=True)
class CheckpointConfig:
    """Output of a run, and its places."""

    output_dir: str = setting(
        "./runs/rollgrad",
        "Directory of the run: model, metrics, report. One that holds another run is refused.",
        DIRECTORY,
    )
    overwrite: bool = setting(False, "Remove the run that output_dir holds, when the new one begins.")
    save_steps: int = setting(
        -1, "Steps between model checkpoints; -1 saves only at the end, however the run ends.", PERIOD
    )
    state_minutes: float | None = setting(
        30.0,
        "Minutes between training states (weights, optimizer, position; about 12 bytes a parameter), from which "
        "resume continues. The first is saved after 5 minutes at the latest, the last one at the run's end, however it "
        "ends. None, without state_steps, saves none.",
        POSITIVE,
    )
    state_steps: int = setting(
        -1, "Steps between training states, besides state_minutes; -1 goes by time alone.", PERIOD
    )
    async_save: bool = setting(
        False,
        "Go on training while a training state is written. It is copied to the CPU's memory first (about 12 bytes a "
        "parameter, under DeepSpeed all of it in the first process); a run that is killed meanwhile continues from the "
        "state before.",
        only_if=SAVES_STATES,
    )
    state_dir: str | None = setting(None, "Directory of the training states; default: output_dir.", DIRECTORY)
    keep_states: int = setting(
        2,
        "Newest training states that are kept; there is one more while one is written. With two, the older one is left"
        " if the newest is broken.",
        COUNT,
    )
    keep_models: int | None = setting(None, "Newest models of save_steps that are kept; None keeps all.", COUNT)
    keep_models_gib: float | None = setting(
        None,
        "Most GiB that the models of save_steps take together: after one is saved the oldest are removed, but never "
        "the newest. None sets no limit.",
        POSITIVE,
    )
    best_metric: str | None = setting(
        None,
        "Metric of the evaluations, such as eval/pass@1 or eval/loss, by which the best model so far is kept in "
        "output_dir/best: the highest value, of a loss or divergence the lowest. None keeps no best model.",
    )
    best_value: Best = setting(
        Best.AUTO,
        "Which value of best_metric is the best: the highest, the lowest, or auto: of losses, divergences, failures "
        "and truncated replies the lowest, of others the highest.",
        only_if=KEEPS_BEST,
    )
    early_stopping_patience: int | None = setting(
        None,
        "End the run when best_metric has been no better in this many evaluations in a row; model is then the last "
        "one, best the best one. None trains to the end.",
        COUNT,
        only_if=KEEPS_BEST,
    )
    push_to_hub: str | None = setting(
        None,
        "Repository of the Hugging Face hub, as me/name, that gets the model when the run has finished: the best one, "
        "with best_metric, else the last. A repository that is not there is made, and is private. The token is that of "
        "HF_TOKEN or of hf auth login; an upload that fails leaves the run as it is.",
        Range(
            lambda name: bool(REPOSITORY.fullmatch(name)) and len(name) <= LONGEST_REPOSITORY,
            f"a name such as me/name, of letters, digits, -, _ and ., of at most {LONGEST_REPOSITORY} characters",
        ),
    )
    resume: Resume = setting(
        Resume.NEVER,
        "Continue the run in output_dir from its training state: never, always (an error without one), or auto: if "
        "there is one. The bare flag means always.",
        converter=Resume,
    )

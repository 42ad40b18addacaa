"""The section `logger`: where metrics go."""

from attrs import define

from rollgrad.domain.settings import NOT_NEGATIVE, setting


@define(kw_only=True)
class LoggerConfig:
    """Sinks of metrics besides metrics.jsonl in the output directory."""

    tensorboard_dir: str | None = setting(None, "TensorBoard log directory (extra: tracking).")
    console: bool = setting(True, "Progress bar on a terminal and a table at the end.")
    log_samples: int = setting(1, "Sampled texts written to samples.jsonl each step.", NOT_NEGATIVE)
    trajectories_max_gib: float = setting(
        2.0,
        "Most GiB of trajectories/, which has all rollouts token by token; the oldest are removed beyond. 0 writes "
        "none.",
        NOT_NEGATIVE,
    )

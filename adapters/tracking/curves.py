"""Learning curves of a run in one image, `curves.png`.

Invariant: only metrics that were logged are shown. Does not own: their meaning and measurement.
"""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.tracking.console import EVAL_MEAN, PASSED
from rollgrad.adapters.tracking.metrics_file import Series, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@frozen
class Panel:
    """One chart."""

    title: str
    unit: str
    curves: Mapping[str, str]
    """From each metric to its name in the legend."""
    sparse: bool = False
    """Whether it is measured rarely, so that each point is marked."""
    stacked: bool = False
    """Whether the curves are parts of the last one."""
    unless_zero: bool = False
    """Whether it is left out if it is always 0, like the divergence of a policy from itself."""

    def drawn(self, series: Mapping[str, Series]) -> bool:
        """Returns whether the chart has something to show."""
        values = [value for key in self.curves for value in series.get(key, {}).values()]
        return any(values) if self.unless_zero else bool(values)


PANELS = (
    Panel("Reward", "mean of the rollout", {"reward/mean": "reward"}),
    Panel("Evaluation", "pass@1 on held-out prompts", {"eval/pass@1": "pass@1"}, sparse=True),
    Panel("Response length", "mean tokens", {"rollout/response_length_mean": "length"}),
    Panel("Truncated replies", "share of the rollout", {"rollout/truncated_share": "truncated"}),
    Panel("Entropy", "nats per token", {"rollout/entropy": "entropy"}),
    Panel(
        "KL divergence",
        "nats per token",
        {"policy/ref_kl": "to reference", "policy/approx_kl": "to old policy"},
        unless_zero=True,
    ),
    Panel("Gradient norm", "before clipping", {"policy/grad_norm": "gradient norm"}),
    Panel("Training loss", "mean of the optimizer step", {"train/loss": "loss"}),
    Panel("Held-out loss", "mean of the held-out examples", {"eval/loss": "loss"}, sparse=True),
    Panel("Accuracy", "share of tokens, pairs or replies", {"train/accuracy": "training"}),
    Panel("Held-out accuracy", "share of tokens, pairs or replies", {"eval/accuracy": "held out"}, sparse=True),
    Panel("Judged steps", "share of steps", {"train/step_accuracy": "right", "train/error_f1": "F1 of errors"}),
    Panel("Held-out judged steps", "share of steps", {"eval/step_accuracy": "right"}, sparse=True),
    Panel(
        "Rewards", "beta x log-ratio, or score", {"train/chosen_reward": "chosen", "train/rejected_reward": "rejected"}
    ),
    Panel("Rewards", "beta x log-ratio", {"train/desirable_reward": "good", "train/undesirable_reward": "bad"}),
    Panel("Divergence from the teacher", "nats per token", {"train/divergence": "training"}),
    Panel("Held-out divergence", "nats per token", {"eval/divergence": "divergence"}, sparse=True),
    Panel("Gradient norm", "before clipping", {"train/grad_norm": "gradient norm"}),
    Panel("Learning rate", "of the optimizer step", {"train/lr": "learning rate"}),
    Panel(
        "Time per step",
        "seconds",
        {"time/generate_s": "generation", "time/update_s": "update", "time/step_s": "other"},
        stacked=True,
    ),
)
COLORS = ("#4f7cff", "#f0883e", "#a3abb9")
"""First, second and third curve of a panel."""
_INK = "#59616f"
"""Text and axes."""
_SMOOTH_FROM = 16
"""Curves of at least this many points are drawn faintly, with their running mean on top."""
_SMOOTH_SHARE = 12
"""The running mean spans this fraction of the curve."""
_LEGEND_ROOM = 1.15
"""Height of a panel with a legend over that of its curves."""
_STYLE: Any = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 10.0,
    "grid.alpha": 0.18,
    "grid.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def _mean_score(series: Mapping[str, Series]) -> Panel:
    """Returns the panel of mean scores in evaluations, which says more than the share that passes where scores are not
    0 or 1."""
    passed = series.get(PASSED)
    means = {
        key: key.removeprefix("eval/")
        for key, values in series.items()
        if key.startswith(EVAL_MEAN) and values != passed
    }
    return Panel("Held-out score", "mean of the held-out replies", means, sparse=True)


def draw_curves(metrics_path: Path, image: Path, *, title: str) -> Path:
    """Draws the curves of metrics.jsonl on white into a PNG, and returns its path. A step that was logged twice (a
    continued run) counts with its last values.

    Raises:
        OSError: a file cannot be read or written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = read_metrics(metrics_path)
    panels = [panel for panel in (*PANELS[:2], _mean_score(series), *PANELS[2:]) if panel.drawn(series)]
    columns = 2 if len(panels) <= 4 else 4
    rows = -(-len(panels) // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.7 * columns, 2.7 * rows + 0.5), dpi=150, facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color="#20242c")
        grid = figure.subplots(rows, columns, squeeze=False).ravel() if panels else ()
        for axes, panel in zip(grid, panels, strict=False):
            axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color="#20242c")
            _draw(axes, panel, series)
            axes.set_ylabel(panel.unit, fontsize=9)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        canvas: Any = FigureCanvasAgg(figure)  # `Figure.savefig` would draw twice
        drawn = BytesIO()
        canvas.print_png(drawn)
    replace_file(image, drawn.getvalue())  # on a full disk the older image stays
    return image


def _draw(axes: "Axes", panel: Panel, series: Mapping[str, Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    present = {key: name for key, name in panel.curves.items() if series.get(key)}
    if panel.stacked and list(panel.curves)[-1] in present:
        _draw_stack(axes, present, series)
    else:
        for color, (key, name) in zip(COLORS, present.items(), strict=False):
            steps, values = list(series[key]), list(series[key].values())
            if panel.sparse or len(values) < _SMOOTH_FROM:
                axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=4, label=name)
            else:
                axes.plot(steps, values, color=color, linewidth=1.0, alpha=0.3)
                axes.plot(steps, _running_mean(values), color=color, linewidth=2.0, label=name)
    axes.set_xlabel("step", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.margins(x=0.02, y=0.1)
    axes.grid(axis="y")
    axes.tick_params(length=0)
    if len(present) > 1:
        axes.set_ylim(top=axes.get_ylim()[1] * _LEGEND_ROOM)
        axes.legend(loc="upper left", ncols=len(present), handlelength=1.2, columnspacing=1.2, borderaxespad=0.0)


def _draw_stack(axes: "Axes", present: Mapping[str, str], series: Mapping[str, Series]) -> None:
    """Draws the parts of the last metric from the bottom up, and its remainder on top."""
    *parts, total = present
    steps = [step for step in series[total] if all(step in series[part] for part in parts)]
    layers = [[series[part][step] for step in steps] for part in parts]
    rest = [max(0.0, series[total][s] - sum(layer[i] for layer in layers)) for i, s in enumerate(steps)]
    axes.stackplot(steps, *layers, rest, colors=COLORS, labels=list(present.values()), alpha=0.85)


def _running_mean(values: list[float]) -> list[float]:
    """Returns the centred running mean; at both ends over the available part of the window."""
    reach = max(1, len(values) // _SMOOTH_SHARE // 2)
    windows = (values[max(0, index - reach) : index + reach + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]

"""The picture of a training: what is accepted, over its time."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from mtp_gguf.gguf_tools.files.output import write_whole

from .trainer import Evaluation

_INCHES, _DPI = (8.0, 4.5), 150


def draw_training(evaluations: Sequence[Evaluation], target: Path) -> None:
    """Write a PNG with a line for each position, in place of an older one. Needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    minutes = [evaluation.seconds / 60 for evaluation in evaluations]
    positions = zip(*(evaluation.rates for evaluation in evaluations), strict=True)
    for position, rates in enumerate(positions, 1):
        shown = [100 * rate for rate in rates]
        axes.plot(minutes, shown, marker=".", label=f"draft {position}")
    axes.set(xlabel="minutes of training", ylabel="drafts accepted (%)", ylim=(0, 100))
    axes.legend()
    out = BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    write_whole(target, out.getvalue())

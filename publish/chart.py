"""The picture of a model card: acceptance by position, the files side by side."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from mtp_gguf.gguf_tools.heads.acceptance import Acceptance

CHART = "acceptance.png"
_INCHES, _DPI = (8.0, 3.5), 150


def draw_acceptance(recorded: Mapping[str, Any]) -> bytes | None:
    """Return a PNG of the greedy acceptance of each file; None without files or matplotlib.

    The lines at the bars are intervals of 95 %. recorded: as in a release's record, by file name.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)
    except ImportError:
        return None
    if not recorded:
        return None
    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(recorded)
    for place, (name, fields) in enumerate(recorded.items()):
        counts = Acceptance.of(fields).greedy
        rates = [100 * rate for rate in counts.rates]
        low, high = zip(*(counts.interval(at) for at in range(len(rates))), strict=True)
        margins = (
            [rate - 100 * end for rate, end in zip(rates, low, strict=True)],
            [100 * end - rate for rate, end in zip(rates, high, strict=True)],
        )
        at = [position + (place + 0.5) * width - 0.4 for position in range(1, len(rates) + 1)]
        axes.bar(at, rates, width, yerr=margins, label=name, error_kw={"alpha": 0.5})
    axes.set(xlabel="position in the draft", ylabel="drafts accepted (%)", ylim=(0, 100))
    axes.set_xticks(range(1, len(rates) + 1))
    axes.legend(fontsize="small")
    out = BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()

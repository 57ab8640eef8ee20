"""Charts as images inside the page: SVG by matplotlib, in a data address, so that nothing of one reaches the page around it."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.rollout.page.markup import Html, tag

MAX_POINTS = 1_000
"""Of one line; a longer one is thinned out evenly, its last point kept."""
Points = Sequence[tuple[float, float]]


def chart(title: str, lines: Mapping[str, Points], x_label: str = "step") -> Html:
    """Lines over steps.

    Args:
        lines: label -> (x, y) in order; labels and the title are text of the run and stand as they are.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    # names of metrics are no formulas; text stays text; equal charts are equal bytes
    settings: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "burnish", "font.size": 9.0}
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(figsize=(5.2, 2.9), constrained_layout=True)
        for label, points in lines.items():
            points = thinned(points)
            marker = "." if len(points) < 30 else None
            # a label that begins with _ would be left out of the legend
            axes.plot([x for x, _ in points], [y for _, y in points], label=f" {label}", marker=marker, linewidth=1.2)
        axes.set(title=title, xlabel=x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return tag("img", src=f"data:image/svg+xml;base64,{data}", alt=title)


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most MAX_POINTS of them."""
    stride = -(-len(points) // MAX_POINTS) if points else 1
    kept = list(points[::stride])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]

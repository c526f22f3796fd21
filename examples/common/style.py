"""Look and helpers of the jobs' pictures."""

import json
import os
import sys

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
except ImportError as error:
    sys.exit(f"{error}; pip install matplotlib")

INK, SOFT, GRID = "#22262e", "#6b7280", "#e4e7ec"
TEAL, RED, OCHRE = "#1f7a8c", "#d1495b", "#c8963e"

plt.rcParams.update({
    "font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "axes.grid": True,
    "grid.color": GRID, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "legend.frameon": False, "savefig.dpi": 130,
})


def read_lines(path):
    with open(path) as lines:
        return [json.loads(line) for line in lines if line.strip()]


def label_ends(axes, x, ends, gap=0.055):
    """Writes each curve's name at its right end, pushed apart by `gap` where they would touch."""
    height = -np.inf
    for value, text, color, weight in sorted(end for end in ends if np.isfinite(end[0])):
        height = max(value, height + gap)
        axes.annotate(text, (x, height), xytext=(6, 0), textcoords="offset points", color=color,
                      weight=weight, va="center", fontsize=9, annotation_clip=False)


def save(figure, folder, name, **options):
    path = os.path.join(folder, name)
    figure.savefig(path, **options)
    plt.close(figure)
    return path


def main(usage, drawings):
    """Draws what the folder named on the command line holds: `drawings` are (file name, function of the folder)."""
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.exit(usage)
    drawn = [function(sys.argv[1]) for source, function in drawings
             if os.path.exists(os.path.join(sys.argv[1], source))]
    drawn = [path for path in drawn if path]
    if not drawn:
        sys.exit(f"{sys.argv[1]} holds nothing to draw")
    print(", ".join(drawn))

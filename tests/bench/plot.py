"""Draws time against input size of what `compare` left in a folder.

    python plot.py FOLDER

results.json becomes times.png.
"""

import os
import pathlib
import sys
import textwrap

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "examples" / "common")]
import report  # noqa: E402
from style import INK, OCHRE, RED, SOFT, TEAL, main, np, plt, save  # noqa: E402

# Of a norm with a pass for sums and a pass to apply, each way: x; x, y; x, dy; x, dy, dx.
PASSES = 8
TRIAD_PASSES = 3

# Contestant: name, colour, marker, line, width.
STYLES = {
    "eager_gather": ("gather and norm, Python and gloo", "#9b7fb8", "v", "-", 1.3),
    "eager": ("recipe, Python and gloo", "#6d4c91", "^", "-", 1.3),
    "by_hand": ("recipe, MPI", SOFT, "d", "-", 1.3),
    "aten": ("ATen, not synchronised", RED, "o", "-", 1.6),
    "ours": ("ours", TEAL, "s", "-", 2.4),
    "streaming": ("streaming loop", OCHRE, "D", "-", 1.6),
    "limit": ("memory limit", INK, None, "--", 1.3),
}


def limit_times(case):
    """What the passes take at the rate of the triad on arrays of the same size, in the same run."""
    return [taken * PASSES / TRIAD_PASSES for taken in case["times"].get("triad", [])]


def curve(cases, contestant):
    """Megabytes and medians; sizes of equal bytes are joined by their geometric mean."""
    by_size = {}
    for case in cases:
        times = limit_times(case) if contestant == "limit" else case["times"].get(contestant)
        if times:
            by_size.setdefault(case["bytes"] / 1e6, []).append(np.median(times))
    sizes = sorted(by_size)
    return sizes, [by_size[size] for size in sizes]


def spread(values, gap):
    """The ascending values moved as little as brings neighbours `gap` apart: clusters keep their middle."""
    clusters = []
    for value in values:
        clusters.append([value])
        while len(clusters) > 1 and start(clusters[-1], gap) < start(clusters[-2], gap) + gap * len(clusters[-2]):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    return [start(cluster, gap) + i * gap for cluster in clusters for i in range(len(cluster))]


def start(cluster, gap):
    return sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2


def label_curves(axes, ends, gap):
    """Names at the right ends of the curves."""
    ends = sorted(ends)
    for height, (_, x, text, color, weight) in zip(spread([np.log10(end[0]) for end in ends], gap), ends):
        axes.annotate(text, (x, 10**height), xytext=(8, 0), textcoords="offset points", color=color, weight=weight,
                      va="center", fontsize=8.5, annotation_clip=False)


def draw_panel(axes, cases, title, extent):
    ends = []
    for contestant, (name, color, marker, line, width) in STYLES.items():
        sizes, values = curve(cases, contestant)
        if not sizes:
            continue
        middle = [np.exp(np.mean(np.log(each))) for each in values]
        axes.plot(sizes, middle, color=color, linestyle=line, linewidth=width, zorder=3 if contestant == "ours" else 2)
        if marker:
            points = [(size, value) for size, each in zip(sizes, values) for value in each]
            axes.scatter(*zip(*points), color=color, marker=marker, s=18, zorder=4 if contestant == "ours" else 3)
        ends.append((middle[-1], sizes[-1], name, color, "bold" if contestant == "ours" else "normal"))
    axes.set(xscale="log", yscale="log", xlabel="input of one rank (MB)", ylabel="forward + backward (µs)", ylim=extent)
    axes.set_title(title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    label_curves(axes, ends, gap=np.log10(extent[1] / extent[0]) * 0.042)


def draw(folder):
    results = report.load(os.path.join(folder, "results.json"))
    panels = [(title, report.select(results, kind=kind, layout=layout, dtype="Float"))
              for title, kind, layout in (("Batch norm, contiguous", "SyncBatchNorm", "contiguous"),
                                          ("Batch norm, channels-last", "SyncBatchNorm", "channels_last"),
                                          ("Layer norm of split rows", "LayerNorm", "contiguous"),
                                          ("RMS norm of split rows", "RMSNorm", "contiguous"))]
    panels = [(title, cases) for title, cases in panels if cases]
    if not panels:
        return None
    times = [value for _, cases in panels for name in STYLES for each in curve(cases, name)[1] for value in each]
    extent = min(times) / 1.6, max(times) * 1.6
    rows = (len(panels) + 1) // 2
    columns = min(2, len(panels))
    figure, axes = plt.subplots(rows, columns, figsize=(7.2 * columns, 4.6 * rows + 0.7), squeeze=False,
                                layout="constrained")
    for panel, (title, cases) in zip(axes.flat, panels):
        draw_panel(panel, cases, title, extent)
    for panel in list(axes.flat)[len(panels):]:
        panel.set_visible(False)
    caption = (f"{report.hardware(results)}. Float, medians of the slowest rank. Points at one size are inputs of "
               f"different shape. Memory limit: {PASSES} passes over an input's worth of memory (forward x, x, y; "
               "backward x, dy, x, dy, dx) at the rate of z = x + s·y on arrays of that size in the same run, where small "
               "ones lie in the caches. Streaming loop: contiguous in all panels.")
    figure.supxlabel(textwrap.fill(caption, 92 * columns), x=0.01, ha="left", fontsize=8.5, color=SOFT)
    return save(figure, folder, "times.png", bbox_inches="tight")


if __name__ == "__main__":
    main(__doc__, (("results.json", draw),))

"""Draws what a run of the language model left in a folder.

    python plots.py FOLDER

metrics.jsonl becomes curves.png.
"""

import os
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "common"))
from style import OCHRE, RED, SOFT, TEAL, label_ends, main, np, plt, read_lines, save  # noqa: E402


def draw_curves(folder):
    lines = read_lines(os.path.join(folder, "metrics.jsonl"))
    run = [line for line in lines if line["kind"] == "run"][-1]
    steps = [line for line in lines if line["kind"] == "step"]
    checks = [line for line in lines if line["kind"] == "validation"]
    results = [line for line in lines if line["kind"] == "result"]
    if not steps:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained",
                                         gridspec_kw={"width_ratios": [1.6, 1]})
    draw_loss(left, run, steps, checks, results)
    draw_gradient(right, steps)

    recipe = run["recipe"]
    grid = f"{run['data_ranks']} x {run['tensor_ranks']} ranks"
    figure.suptitle(
        f"{recipe['layers']} layers of {recipe['hidden']}, {recipe['placement']} {recipe['norm']} norm, residual stream "
        f"{recipe['residual']}, {run['parameters'] / 1e6:.2f} M parameters, {grid}", x=0.01, ha="left", fontsize=12)
    return save(figure, folder, "curves.png")


def draw_loss(axes, run, steps, checks, results):
    """Cross-entropy a token; on the right its axis in nats a byte, by the bytes a held-out token has on average."""
    x = np.array([line["step"] for line in steps])
    axes.plot(x, [line["loss"] for line in steps], color=TEAL, lw=1.2, alpha=0.9)
    last = np.mean([line["loss"] for line in steps[-5:]])
    ends = [(last, f"training {last:.2f}", TEAL, "normal")]
    scores = [(line["step"], line["held_out"]) for line in checks + results[-1:]]
    if scores:
        at, held_out = zip(*scores)
        values = [each["nats_per_token"] for each in held_out]
        axes.plot(at, values, color=RED, lw=2.2, marker="o", ms=4)
        ends.append((values[-1], f"held out {values[-1]:.2f}", RED, "bold"))
        length = held_out[-1]["bytes"] / held_out[-1]["tokens"]
        unigram = run["unigram_nats_per_byte"] * length
        axes.axhline(unigram, color=SOFT, lw=1, ls="--")
        axes.annotate("token counts alone", (x[-1], unigram), xytext=(0, 4), textcoords="offset points",
                      ha="right", color=SOFT, fontsize=9)
        if length > 1:
            byte = axes.secondary_yaxis("right", functions=(lambda y: y / length, lambda y: y * length))
            byte.set_ylabel("nats a byte", color=SOFT)
            byte.spines["right"].set_visible(False)
            byte.tick_params(pad=84, length=0)
    low, high = axes.get_ylim()
    label_ends(axes, x[-1], ends, gap=0.05 * (high - low))
    axes.set(title="Cross-entropy", xlabel="step", ylabel="nats a token", xlim=(0, x[-1]))


def draw_gradient(axes, steps):
    x = [line["step"] for line in steps]
    axes.plot(x, [line["grad_norm"] for line in steps], color=OCHRE, lw=1.2)
    axes.set(title="Gradient", xlabel="step", ylabel="norm before clipping", xlim=(0, x[-1]), ylim=(0, None))
    rate = axes.twinx()
    rate.plot(x, [line["lr"] for line in steps], color=SOFT, lw=1, ls=":")
    rate.set_ylabel("learning rate (dotted)", color=SOFT)
    rate.set_ylim(bottom=0)
    rate.grid(False)


if __name__ == "__main__":
    main(__doc__, [("metrics.jsonl", draw_curves)])

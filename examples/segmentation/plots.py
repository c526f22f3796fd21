"""Draws what a run of the segmentation example left in a folder.

    python plots.py FOLDER

metrics.jsonl becomes curves.png, predictions.json and .bin become predictions.png, compare.json becomes compare.png.
"""

import json
import os
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "common"))
from style import INK, OCHRE, RED, SOFT, TEAL, label_ends, main, np, plt, read_lines, save  # noqa: E402

from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

NORMS = {"batch": ("batch norm", RED, "o"),
         "sync": ("sync norm", TEAL, "s"),
         "group": ("group norm", OCHRE, "^")}


def visible(rgb):
    """A class colour dark or light enough to be read as a line on white."""
    color = np.array(rgb) / 255
    light = color @ [0.299, 0.587, 0.114]
    return tuple(color * 0.8) if light > 0.75 else tuple(color)


def draw_curves(folder):
    lines = read_lines(os.path.join(folder, "metrics.jsonl"))
    run = [line for line in lines if line["kind"] == "run"][-1]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    if not epochs:
        return None
    x = [line["epoch"] for line in epochs]
    marker = "o" if len(x) < 12 else None
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")

    left.plot(x, [line["loss"] for line in epochs], color=TEAL, lw=2, marker=marker)
    left.set(title="Training loss", xlabel="epoch", ylabel="cross-entropy")
    left.set_ylim(bottom=0)
    rate = left.twinx()
    rate.plot(x, [line["lr"] for line in epochs], color=SOFT, lw=1, ls=":")
    rate.set_ylabel("learning rate (dotted)", color=SOFT)
    rate.set_ylim(bottom=0)
    rate.grid(False)

    ends = []
    for index, (name, color) in enumerate(zip(run["classes"], run["colors"])):
        iou = [line["test"]["iou"][index] for line in epochs]
        iou = [np.nan if value is None else value for value in iou]
        right.plot(x, iou, color=visible(color), lw=1.3, marker=marker, ms=3)
        ends.append((iou[-1], f"{name} {iou[-1]:.2f}", visible(color), "normal"))
    miou = [line["test"]["miou"] for line in epochs]
    right.plot(x, miou, color=INK, lw=2.6, marker=marker)
    ends.append((miou[-1], f"mean {miou[-1]:.3f}", INK, "bold"))
    label_ends(right, x[-1], ends)
    right.set(title="Held-out pictures", xlabel="epoch", ylabel="intersection over union", ylim=(0, 1.02))
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)

    recipe = run["recipe"]
    images = recipe["batch-per-rank"] * run["ranks"]
    ranks = f"{run['ranks']} rank{'s' if run['ranks'] > 1 else ''}"
    norm = "no" if recipe["norm"] == "none" else recipe["norm"]
    figure.suptitle(f"U-Net, {norm} norm, {ranks} x {recipe['batch-per-rank']} = {images} images a step",
                    x=0.01, ha="left", fontsize=12)
    return save(figure, folder, "curves.png")


def draw_predictions(folder):
    with open(os.path.join(folder, "predictions.json")) as file:
        about = json.load(file)
    planes = np.fromfile(os.path.join(folder, "predictions.bin"), np.uint8).reshape(about["shape"])
    images, truth, predicted = planes[:, :-2], planes[:, -2], planes[:, -1]
    colors = np.array(about["colors"]) / 255
    classes = ListedColormap(colors)
    count, height, width = truth.shape

    figure, axes = plt.subplots(4, count, figsize=(1.62 * count + 0.5, 1.62 * 4 * height / width + 0.9),
                                squeeze=False, layout="constrained", facecolor="#0b0d11")
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.01, hspace=0.01)
    for column in range(count):
        counted = truth[column] != about["ignored"]
        wrong = counted & (truth[column] != predicted[column])
        picture = images[column].transpose(1, 2, 0).astype(float) / 255
        gray = picture.mean(axis=2)
        rows = [picture if picture.shape[2] == 3 else gray, np.where(counted, truth[column], 0), predicted[column]]
        for row, content in enumerate(rows):
            style = {"cmap": "gray", "vmin": 0, "vmax": 1} if row == 0 else {
                "cmap": classes, "vmin": -0.5, "vmax": len(colors) - 0.5, "interpolation": "nearest"}
            axes[row, column].imshow(content, **style)
        axes[3, column].imshow(mark_errors(gray, wrong), interpolation="nearest")
        axes[3, column].set_xlabel(f"{100 * wrong.sum() / max(1, counted.sum()):.1f} % wrong",
                                   color="#c9ced6", fontsize=9)
        axes[0, column].set_title(about["names"][column], color="#c9ced6", fontsize=9,
                                  loc="center", weight="normal")
    for row, name in enumerate(["image", "truth", "prediction", "errors"]):
        axes[row, 0].set_ylabel(name, color="white", fontsize=11)
    for each in axes.flat:
        each.set(xticks=[], yticks=[])
        each.grid(False)
        for spine in each.spines.values():
            spine.set_visible(False)
    patches = [Patch(facecolor=color, edgecolor="#5b616b", label=name)
               for name, color in zip(about["classes"], colors)]
    patches.append(Patch(facecolor="#ff3b5c", label="wrong class"))
    figure.legend(handles=patches, loc="outside lower center", ncols=min(6, len(patches)),
                  labelcolor="#e6e9ee", fontsize=9)
    return save(figure, folder, "predictions.png", facecolor=figure.get_facecolor())


def mark_errors(gray, wrong):
    """The picture, dimmed, with wrong pixels in red."""
    shown = np.repeat(0.55 * gray[..., None], 3, axis=2)
    shown[wrong] = np.array([255, 59, 92]) / 255
    return shown


def draw_compare(folder):
    with open(os.path.join(folder, "compare.json")) as file:
        about = json.load(file)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for norm, (label, color, marker) in NORMS.items():
        rows = [row for row in about["rows"] if row["norm"] == norm]
        batches = np.array([row["batch_per_rank"] for row in rows])
        scores = np.array([row["miou"] for row in rows])
        shared = batches * (about["ranks"] if norm == "sync" else 1)
        panels = [(left, batches)] + ([(right, shared)] if norm != "group" else [])
        for axes, x in panels:
            # A small shift keeps the error bars of the norms apart.
            at = x * (1 + 0.03 * (list(NORMS).index(norm) - 1))
            spread = scores.std(axis=1, ddof=1) if scores.shape[1] > 1 else None
            axes.errorbar(at, scores.mean(axis=1), spread, color=color, marker=marker, ms=7, lw=2, capsize=3,
                          label=label)
            axes.scatter(np.repeat(at * 1.025, scores.shape[1]), scores.ravel(), s=14, color=color,
                         alpha=0.55, lw=0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.xaxis.set_minor_locator(plt.NullLocator())
    left.set(title="By batch", xlabel="images a rank", ylabel="test mIoU", xticks=[1, 2, 4])
    right.set(title="By what the statistics see", xlabel="images that share statistics")
    right.set_xticks(sorted({1, 2, 4, about["ranks"], 2 * about["ranks"], 4 * about["ranks"]}))
    left.legend(loc="best")
    seeds = len(about["rows"][0]["miou"])
    figure.suptitle(f"{about['ranks']} ranks, {about['pictures']} images seen in every run; dots are seeds"
                    + (", bars their standard deviation" if seeds > 1 else ""), x=0.01, ha="left", fontsize=11)
    return save(figure, folder, "compare.png")


if __name__ == "__main__":
    main(__doc__, [("metrics.jsonl", draw_curves), ("predictions.json", draw_predictions), ("compare.json", draw_compare)])

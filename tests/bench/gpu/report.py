#!/usr/bin/env python3
"""Joins the results of bench_gpu and peers.py to tables in Markdown. Needs nothing but Python itself.

usage: report.py OURS.json [PEERS.json]    (to standard output)
"""

import json
import sys

STEPS = ("moments", "apply", "backward_sums", "backward_apply")
BANDWIDTH_BAR, BANDWIDTH_FROM = 0.9, 64e6  # of the copy's, from this size of the input in bytes
PEER_BAR = 1.0                             # of the time of torch's kernel for the same step

# What of ours does the work of which of torch's.
PEERS = {
    "batch_norm_stats": ("moments",),
    "batch_norm_elemt": ("apply",),
    "batch_norm_backward_reduce": ("backward_sums",),
    "batch_norm_backward_elemt": ("backward_apply",),
    "native_forward": ("moments", "apply"),
    "native_backward": ("backward_sums", "backward_apply"),
    "cudnn_forward": ("moments", "apply"),
    "cudnn_backward": ("backward_sums", "backward_apply"),
}


def key(case):
    return case["norm"], case["layout"], case["dtype"], tuple(case["shape"])


def to_copy(case, step):
    """The step's bandwidth over the copy's."""
    return case["gb_per_s"][step] / case["gb_per_s"]["copy"]


def to_peer(case, peers, name):
    """Our time over the peer's, or None where it was not measured."""
    time = peers.get(key(case), {}).get(name)
    return sum(case["us"][step] for step in PEERS[name]) / time if time else None


def marked(value, met):
    return f"{value:.2f}" if met else f"**{value:.2f}**"


def cell_to_copy(case, step):
    ratio = to_copy(case, step)
    return f"{case['gb_per_s'][step]:.0f} ({marked(ratio, case['bytes'] < BANDWIDTH_FROM * 0.97 or ratio >= BANDWIDTH_BAR)})"


def cell_to_peer(case, peers, name):
    ratio = to_peer(case, peers, name)
    return "" if ratio is None else marked(ratio, round(ratio, 2) <= PEER_BAR)


def table(head, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def label(case):
    return [case["layout"].replace("_", "-"), case["dtype"].lower(), f"{case['bytes'] / 1e6:.0f}"]


def bars(cases, peers):
    """How many of the bars are met: (met, of) for the copy's and for torch's."""
    large = [to_copy(case, step) >= BANDWIDTH_BAR
             for case in cases if case["bytes"] >= BANDWIDTH_FROM * 0.97 for step in STEPS]
    ratios = [to_peer(case, peers, name) for case in cases for name in PEERS]
    torch = [round(ratio, 2) <= PEER_BAR for ratio in ratios if ratio is not None]
    return (sum(large), len(large)), (sum(torch), len(torch))


def markdown(ours, peers_results=None):
    peers = {key(case): case["us"] for case in peers_results["cases"]} if peers_results else {}
    cases, context = ours["cases"], ours["context"]
    (near_copy, copies), (not_slower, compared) = bars(cases, peers)
    parts = [f"{context['gpu']}, driver {context['driver']}, CUDA {context['runtime']}, LibTorch {context['torch']}, "
             f"{context['date']}.\n\nBandwidth in GB/s and, in brackets, over that of a copy of the input from device to "
             f"device; our time over that of torch's kernel for the same step. Bold misses its bar: {near_copy} of "
             f"{copies} at {BANDWIDTH_BAR} of the copy or more from {BANDWIDTH_FROM / 1e6:.0f} MB up, {not_slower} of "
             f"{compared} not slower than torch."]
    for norm in dict.fromkeys(case["norm"] for case in cases):
        of_norm = [case for case in cases if case["norm"] == norm]
        names = [name for name in PEERS if any(to_peer(case, peers, name) is not None for case in of_norm)]
        head = ["memory", "dtype", "MB", "copy", *(step.replace("_", " ") for step in STEPS),
                *("to " + name for name in names)]
        rows = [[*label(case), f"{case['gb_per_s']['copy']:.0f}", *(cell_to_copy(case, step) for step in STEPS),
                 *(cell_to_peer(case, peers, name) for name in names)] for case in of_norm]
        parts.append(f"## {norm}\n\n{table(head, rows)}")
    failed = [case for case in (peers_results or {"cases": []})["cases"] if "error" in case]
    if failed:
        parts.append("Not measured by peers.py:\n" + "\n".join(
            f"- {' '.join([case['norm'], *label(case)])} MB: {case['error']}" for case in failed))
    return "\n\n".join(parts) + "\n"


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    loaded = []
    for path in sys.argv[1:]:
        with open(path) as file:
            loaded.append(json.load(file))
    print(markdown(*loaded), end="")


if __name__ == "__main__":
    main()

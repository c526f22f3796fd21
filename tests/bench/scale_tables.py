#!/usr/bin/env python3
"""Writes the tables of scale.md from the JSON that scale_report left in a folder: tests/bench/scale_tables.py OUT."""

import json
import pathlib
import sys

import scale_model


def lines_of(folder, name):
    """The figures in one file by their names, or None where it was not measured."""
    path = folder / name
    if not path.exists():
        return None
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]) + "\n"


CHANNELS = 256  # of scale_report's counters


def counters(lines):
    names = list(dict.fromkeys(line["name"] for line in lines))
    ranks = sorted({line["ranks"] for line in lines})
    by_key = {(line["name"], line["ranks"]): line for line in lines}
    rows = []
    for name in names:
        handed_in = {(by_key[name, p]["collectives"], by_key[name, p]["bytes_handed_in"]) for p in ranks}
        if len(handed_in) != 1:
            sys.exit(f"{name}: what a rank hands in depends on the ranks: {sorted(handed_in)}")
        collectives, size = handed_in.pop()
        if name == "SyncBatchNorm" and size != sum(scale_model.payloads(2 * CHANNELS)):
            sys.exit(f"{name} hands in {size} bytes, the model says {scale_model.payloads(2 * CHANNELS)}: correct it")
        sent = [f"{by_key[name, p]['bytes_sent']:.0f}" for p in ranks]
        expected = [f"{2 * (p - 1) / p * size:.0f}" for p in ranks]
        rows.append([name, collectives, size] + [f"{s} ({e})" for s, e in zip(sent, expected)])
    return table(["norm", "collectives", "bytes handed in"] + [f"bytes sent, P = {p} (2(P-1)/P)" for p in ranks], rows)


def delay(lines):
    delays = [key[len("us_at_"):] for key in lines[0] if key.startswith("us_at_")]
    rows = []
    for line in lines:
        times = [f"{line['us_at_' + d]:.0f}" for d in delays]
        rows.append([line["name"]] + times + [f"{line['slope']:.2f}", line["collectives"]])
    return table(["step, us, at a delay of"] + [d + " us" for d in delays] + ["slope", "collectives"], rows)


SETTINGS = {
    "latency": "one machine",
    "two_hosts-yield-yes": "two hosts",
    "two_hosts-yield-no": "two hosts, waiting ranks keep their core",
    "two_hosts-doubling": "two hosts, recursive doubling",
}
SHOWN = (" over ", " 1024 B")


def latency(folder):
    """Every setting that was measured side by side: median and 99th percentile, and what communication adds."""
    measured = {name: lines_of(folder, name + ".json") for name in SETTINGS}
    measured = {name: {line["name"]: line for line in lines} for name, lines in measured.items() if lines is not None}
    head = ["us: p50, p99 (added to p50 of self)"] + [SETTINGS[name] for name in measured]
    rows = []
    for what in (name for name in next(iter(measured.values())) if any(part in name for part in SHOWN)):
        row = [what]
        for lines in measured.values():
            line = lines[what]
            added = f" ({line['added_us']:.0f})" if line.get("added_us") else ""
            row.append(f"{line['p50_us']:.0f}, {line['p99_us']:.0f}{added}")
        rows.append(row)
    return table(head, rows)


def overlap(folder):
    rows = []
    for name, network in [("overlap", "this machine's memory"), ("overlap-5gbit", "5 Gbit/s"),
                          ("overlap-2gbit", "2 Gbit/s")]:
        times = {line["name"]: line["ms"] for line in lines_of(folder, name + ".json")}
        parts = times["compute"] + times["communicate"]
        rows.append([network] + [f"{times[way]:.1f}" for way in ("overlapped", "in turn", "compute", "communicate")]
                    + [f"{times['overlapped'] / times['in turn']:.2f}", f"{times['overlapped'] / parts:.2f}"])
    return table(["ms a step; network", "overlapped", "in turn", "compute", "communicate", "overlapped / in turn",
                  "/ sum of parts"], rows)


def model(lines):
    """The model's table with what was measured between two hosts."""
    fit = next(line for line in lines if line["name"] == "MPI_Allreduce fit")
    flags = ["--alpha-us", f"{fit['alpha_us']:.1f}", "--beta-ns-per-byte", f"{fit['beta_ns_per_byte']:.2f}"]
    return "tests/bench/scale_model.py " + " ".join(flags) + "\n\n" + scale_model.text(flags)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    sections = [("Counters", counters(lines_of(folder, "counters.json"))),
                ("Added delay", delay(lines_of(folder, "delay.json"))),
                ("Added time", latency(folder)),
                ("Overlap", overlap(folder))]
    hosts = lines_of(folder, "two_hosts-yield-yes.json")
    if hosts is not None:
        sections.append(("Model", model(hosts)))
    print("\n".join(f"### {title}\n\n{text}" for title, text in sections))


if __name__ == "__main__":
    main()

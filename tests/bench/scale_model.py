#!/usr/bin/env python3
"""A model, not a measurement: what a norm's two all-reduces cost on many ranks.

    tests/bench/scale_model.py
    tests/bench/scale_model.py --alpha-us 2 --beta-ns-per-byte 0.08 --ranks 8,64,512,1000

Between two ranks a message of n bytes takes alpha + beta n (Hockney's model). On P ranks an all-reduce then takes

    tree      2 ceil(log2 P) (alpha + beta n)           a binomial reduction, then a broadcast
    doubling  ceil(log2 P) (alpha + beta n)             recursive doubling, every rank exchanging in every step
    ring      2 (P - 1) alpha + 2 (P - 1)/P beta n      reduce-scatter, then all-gather, round a ring

(Thakur, Rabenseifner and Gropp 2005; for P no power of two doubling takes up to two steps more, which are left out.) A
norm waits for one all-reduce forward and one backward, each of

    8 (2 C + 4) bytes   SyncBatchNorm of C channels; 2 words less backward
    8 (2 T + 4) bytes   layer norm of T rows;        8 (T + 4) bytes RMS norm of T rows

whatever P is; above 32 KiB the MPI communicator lets the ranks meet first, which is one more all-reduce, of 32 bytes.
Nothing else is in the model: no waiting for the slowest of P ranks, no sharing of links, no computation.
Prints the table of scale.md, microseconds that a norm waits forward and backward together.
"""

import argparse
import math

# Measured between two network namespaces of one machine, over TCP: tests/bench/two_hosts, line "MPI_Allreduce fit".
ALPHA_US = 26.8
BETA_NS = 0.95

WORD = 8
HEADER = 4  # tag, its square, count, need of a gradient; backward only the first two
MEETING = 32
LARGE = 32 * 1024


def tree(ranks, size, alpha, beta):
    return 2 * math.ceil(math.log2(ranks)) * (alpha + beta * size)


def doubling(ranks, size, alpha, beta):
    return math.ceil(math.log2(ranks)) * (alpha + beta * size)


def ring(ranks, size, alpha, beta):
    return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * beta * size


ALGORITHMS = {"tree": tree, "doubling": doubling, "ring": ring}


def payloads(words):
    """Bytes of a norm's all-reduce forward and backward."""
    return WORD * (words + HEADER), WORD * (words + HEADER - 2)


def norm(algorithm, ranks, words, alpha, beta):
    """Microseconds that one norm waits, forward and backward."""
    sizes = list(payloads(words))
    sizes += [MEETING for size in sizes if size > LARGE]
    return sum(algorithm(ranks, size, alpha, beta) for size in sizes)


def rows_of(arguments):
    """(name, words on the wire) of the norms in the table."""
    rows = [(f"SyncBatchNorm, {c} channels", 2 * c) for c in arguments.channels]
    for count in arguments.rows:
        rows.append((f"layer norm, {count} rows", 2 * count))
        rows.append((f"RMS norm, {count} rows", count))
    return rows


def table(arguments):
    beta = arguments.beta_ns_per_byte * 1e-3
    head = ["norm", "bytes forward"] + [f"{name}, P={p}" for p in arguments.ranks for name in ALGORITHMS]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name, words in rows_of(arguments):
        cells = [name, str(payloads(words)[0])]
        for ranks in arguments.ranks:
            for algorithm in ALGORITHMS.values():
                cells.append(f"{norm(algorithm, ranks, words, arguments.alpha_us, beta):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def counts(smallest):
    def parse(text):
        values = [int(part) for part in text.split(",")]
        if min(values) < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}")
        return values

    return parse


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha-us", type=float, default=ALPHA_US, help="latency of a message (%(default)s)")
    parser.add_argument("--beta-ns-per-byte", type=float, default=BETA_NS, help="inverse bandwidth (%(default)s)")
    parser.add_argument("--ranks", type=counts(2), default=[8, 1000], help="8,1000")
    parser.add_argument("--channels", type=counts(1), default=[64, 256, 2048], help="64,256,2048")
    parser.add_argument("--rows", type=counts(1), default=[512, 8192], help="512,8192")
    return parser.parse_args(words)


def text(words=None):
    """What the program prints for these arguments."""
    arguments = parse(words)
    title = f"alpha {arguments.alpha_us} us, beta {arguments.beta_ns_per_byte} ns a byte; us a norm, a model"
    return f"{title}\n\n{table(arguments)}\n"


if __name__ == "__main__":
    print(text(), end="")

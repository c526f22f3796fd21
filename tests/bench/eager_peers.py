"""What people write in Python: norms over several processes in eager tensor operations and gloo.

    tests/support/python tests/bench/eager_peers.py [-n PROCESSES] [--repetitions N] [--filter REGEX] [-o FILE]

The same inputs as the C++ benchmarks', under the same names, one thread a process. Writes JSON in the form of Google
Benchmark's, times of the slowest process; see README.md in this folder.

  eager         SyncBatchNorm: means and mean squares averaged by an all-reduce, the published recipe of naive
                synchronised batch norm; LayerNorm, RMSNorm: the same over each rank's columns
  eager_gather  LayerNorm, RMSNorm: rows gathered, normalised by PyTorch's own layer, own columns cut out
"""

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

IMAGES = [(2, 64, 7, 7), (2, 64, 56, 56), (2, 256, 28, 28), (2, 1024, 14, 14), (2, 256, 56, 56), (16, 128, 28, 28),
          (2, 64, 200, 304)]
ROWS = [(1, 8192), (32, 8192), (512, 4096), (2048, 1024), (2048, 4096)]


class SumOverRanks(torch.autograd.Function):
    """Sum of all processes' values; its gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx, local):
        total = local.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class GatherColumns(torch.autograd.Function):
    """Joins the processes' columns; backward sums the gradients of the whole rows and keeps the own columns."""

    @staticmethod
    def forward(ctx, own):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total)
        return own_columns(total).contiguous()


def own_columns(whole):
    return whole.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def sync_batch_norm(x, weight, bias, running_mean, running_var, eps=1e-5, momentum=0.1):
    """Equal batches on all processes."""
    local = torch.cat([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
    mean, mean_square = (SumOverRanks.apply(local) / dist.get_world_size()).chunk(2)
    variance = mean_square - mean.square()
    with torch.no_grad():
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance, momentum)
    scale = weight * torch.rsqrt(variance + eps)
    shift = bias - mean * scale
    return x * scale[:, None, None] + shift[:, None, None]


def split_rms_norm(x, weight, eps=1e-6):
    mean_square = SumOverRanks.apply(x.square().mean(-1, keepdim=True)) / dist.get_world_size()
    return x * torch.rsqrt(mean_square + eps) * weight


def split_layer_norm(x, weight, bias, eps=1e-5):
    local = torch.cat([x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)], -1)
    mean, mean_square = (SumOverRanks.apply(local) / dist.get_world_size()).chunk(2, -1)
    return (x - mean) * torch.rsqrt(mean_square - mean.square() + eps) * weight + bias


def gathered(x, norm):
    return own_columns(norm(GatherColumns.apply(x)))


def with_gradient(compute, x, gradient):
    """Output and input gradient."""
    y = compute(x)
    return y.detach(), torch.autograd.grad(y, x, gradient)[0]


class Case:
    """One way to compute one norm: `compute` makes the output from the leaf x; `expected` is another way to the output
    and the gradient of x, from x and the gradient of the output."""

    def __init__(self, name, x, parameters, compute, expected):
        self.name, self.x, self.parameters, self.compute, self.expected = name, x, parameters, compute, expected
        self.gradient = torch.randn(x.shape).contiguous(memory_format=format_of(x))

    def step(self):
        self.compute(self.x).backward(self.gradient)
        for leaf in (self.x, *self.parameters):
            leaf.grad = None

    def check(self):
        for ours, other in zip(with_gradient(self.compute, self.x, self.gradient),
                               self.expected(self.x, self.gradient)):
            difference = (ours - other).abs().max().item()
            if not difference < 1e-3:
                raise RuntimeError(f"{self.name}: results differ by {difference}, so there is nothing to time")


def format_of(x):
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


def leaf(shape, memory_format=torch.contiguous_format):
    return torch.randn(shape).contiguous(memory_format=memory_format).requires_grad_()


def all_batches(own):
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    return torch.cat(parts)


def whole_batch_norm(x, gradient):
    """PyTorch's own batch norm of all processes' batches, and this process's part of the results."""
    results = with_gradient(lambda whole: F.batch_norm(whole, None, None, training=True),
                            all_batches(x).requires_grad_(), all_batches(gradient))
    return [result.chunk(dist.get_world_size())[dist.get_rank()] for result in results]


def image_case(shape, memory_format):
    channels = shape[1]
    weight, bias = torch.ones(channels, requires_grad=True), torch.zeros(channels, requires_grad=True)
    running = torch.zeros(channels), torch.ones(channels)
    layout = "channels_last" if memory_format == torch.channels_last else "contiguous"
    return Case(f"SyncBatchNorm/{'x'.join(map(str, shape))}/{layout}/Float/eager", leaf(shape, memory_format),
                (weight, bias), lambda x: sync_batch_norm(x, weight, bias, *running), whole_batch_norm)


def row_cases(rows, hidden):
    own = hidden // dist.get_world_size()
    weight, bias = torch.ones(own, requires_grad=True), torch.zeros(own, requires_grad=True)
    whole_weight, whole_bias = torch.ones(hidden, requires_grad=True), torch.zeros(hidden, requires_grad=True)
    every = (weight, bias, whole_weight, whole_bias)

    def layer_split(x):
        return split_layer_norm(x, weight, bias)

    def layer_gather(x):
        return gathered(x, lambda whole: F.layer_norm(whole, (hidden,), whole_weight, whole_bias))

    def rms_split(x):
        return split_rms_norm(x, weight)

    def rms_gather(x):
        return gathered(x, lambda whole: F.rms_norm(whole, (hidden,), whole_weight, 1e-6))

    x = leaf((rows, own))
    return [Case(f"{norm}/{rows}x{hidden}/contiguous/Float/{name}", x, every, compute,
                 lambda x, gradient, other=other: with_gradient(other, x, gradient))
            for norm, name, compute, other in (("LayerNorm", "eager", layer_split, layer_gather),
                                               ("LayerNorm", "eager_gather", layer_gather, layer_split),
                                               ("RMSNorm", "eager", rms_split, rms_gather),
                                               ("RMSNorm", "eager_gather", rms_gather, rms_split))]


def makers():
    """Functions that make the cases, one input at a time."""
    for shape in IMAGES:
        for memory_format in (torch.contiguous_format, torch.channels_last):
            yield lambda shape=shape, memory_format=memory_format: [image_case(shape, memory_format)]
    for rows, hidden in ROWS:
        yield lambda rows=rows, hidden=hidden: row_cases(rows, hidden)


def sample(case, calls):
    """Median time of a call on the slowest process in microseconds, after one untimed call."""
    case.step()
    taken = torch.zeros(calls, dtype=torch.float64)
    for i in range(calls):
        dist.barrier()
        start = time.perf_counter()
        case.step()
        taken[i] = time.perf_counter() - start
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return statistics.median(taken.tolist()) * 1e6


def measure(case, options):
    case.check()
    calls = max(1, min(10, (4 << 20) // (case.x.numel() * 4)))
    times = [sample(case, calls) for _ in range(options.repetitions)]
    if dist.get_rank() == 0:
        print(f"{case.name:58} {statistics.median(times):12.1f} us", file=sys.stderr, flush=True)
    return [{"name": case.name, "run_type": "iteration", "repetition_index": i, "iterations": calls,
             "real_time": value, "time_unit": "us"} for i, value in enumerate(times)]


def process(rank, options, folder):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=options.ranks)
    results = []
    for make in makers():
        for case in make():
            if re.search(options.filter, case.name):
                results += measure(case, options)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        context = {"executable": "eager_peers.py", "ranks": str(options.ranks), "threads": "1", "mpi": "gloo",
                   "torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(),
                   "python": platform.python_version()}
        with open(options.output, "w") as file:
            json.dump({"context": context, "benchmarks": results}, file, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", dest="ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--filter", default="", help="only cases whose name matches")
    parser.add_argument("-o", dest="output", default="/dev/stdout", help="JSON file (standard output)")
    options = parser.parse_args()
    if options.ranks < 1 or any(hidden % options.ranks for _, hidden in ROWS):
        parser.error(f"-n {options.ranks}: the rows are cut evenly, so 1, 2, 4, 8, ...")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(process, (options, folder), options.ranks)


if __name__ == "__main__":
    main()

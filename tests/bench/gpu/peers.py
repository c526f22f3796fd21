#!/usr/bin/env python3
"""Times torch's own kernels for the cases that bench_gpu has timed, in the same way.

usage: peers.py OURS.json PEERS.json

Steps of SyncBatchNorm in torch (batch_norm_stats, batch_norm_elemt, batch_norm_backward_reduce,
batch_norm_backward_elemt), and whole norms: batch norm native and of cuDNN, layer norm, RMS norm. Each is a CUDA graph
of as many calls over as many sets of tensors as bench_gpu took for the case; medians of replays.
"""

import json
import statistics
import sys

REPLAYS = 15
EPS = 1e-5


def median_time(torch, calls):
    """Microseconds of one of `calls` functions, recorded in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times)


def tensors(torch, case):
    """(x, dy) of a case."""
    dtype = getattr(torch, case["dtype"].lower())
    memory = torch.channels_last if case["layout"] == "channels_last" else torch.contiguous_format
    return [torch.randn(case["shape"], device="cuda").to(dtype).contiguous(memory_format=memory) for _ in range(2)]


def batch_norms(torch, case):
    """Functions by name, on tensors of their own."""
    aten = torch.ops.aten
    x, dy = tensors(torch, case)
    channels = x.size(1)
    weight, bias = torch.rand(channels, device="cuda") + 0.5, torch.randn(channels, device="cuda")
    running = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    mean, invstd = torch.batch_norm_stats(x, EPS)
    sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
    count = torch.tensor([x.numel() // channels], dtype=torch.int32, device="cuda")
    native = aten.native_batch_norm(x, weight, bias, *running, True, 0.1, EPS)
    functions = {
        "batch_norm_stats": lambda: torch.batch_norm_stats(x, EPS),
        "batch_norm_elemt": lambda: torch.batch_norm_elemt(x, weight, bias, mean, invstd, EPS),
        "batch_norm_backward_reduce":
            lambda: torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True),
        "batch_norm_backward_elemt":
            lambda: torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count),
        "native_forward": lambda: aten.native_batch_norm(x, weight, bias, *running, True, 0.1, EPS),
        "native_backward":
            lambda: aten.native_batch_norm_backward(dy, x, weight, *running, native[1], native[2], True, EPS, [True] * 3),
    }
    if torch.backends.cudnn.is_available():
        cudnn = aten.cudnn_batch_norm(x, weight, bias, *running, True, 0.1, EPS)
        functions["cudnn_forward"] = lambda: aten.cudnn_batch_norm(x, weight, bias, *running, True, 0.1, EPS)
        functions["cudnn_backward"] = \
            lambda: aten.cudnn_batch_norm_backward(x, dy, weight, *running, cudnn[1], cudnn[2], EPS, cudnn[3])
    return functions


def row_norms(torch, case):
    aten = torch.ops.aten
    x, dy = tensors(torch, case)
    shape = [x.size(-1)]
    weight = (torch.rand(shape, device="cuda") + 0.5).to(x.dtype)
    if case["norm"] == "layer_norm":
        bias = torch.randn(shape, device="cuda").to(x.dtype)
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, EPS)
        return {"native_forward": lambda: aten.native_layer_norm(x, shape, weight, bias, EPS),
                "native_backward":
                    lambda: aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, [True] * 3)}
    _, rstd = aten._fused_rms_norm(x, shape, weight, EPS)
    return {"native_forward": lambda: aten._fused_rms_norm(x, shape, weight, EPS),
            "native_backward": lambda: aten._fused_rms_norm_backward(dy, x, shape, rstd, weight, [True, True])}


def measure(torch, case):
    make = batch_norms if case["norm"] == "batch_norm" else row_norms
    sets = [make(torch, case) for _ in range(case["sets"])]
    times = {}
    for name in sets[0]:
        calls = [sets[i % len(sets)][name] for i in range(case["calls"])]
        times[name] = median_time(torch, calls)
    return times


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        import torch
    except (ImportError, OSError) as error:
        sys.exit(f"peers.py: PyTorch cannot be imported: {error}")
    if not torch.cuda.is_available():
        sys.exit("peers.py: no GPU")
    with open(sys.argv[1]) as file:
        ours = json.load(file)
    results = {"context": {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
                           "cudnn": torch.backends.cudnn.version()}, "cases": []}
    for case in ours["cases"]:
        key = {name: case[name] for name in ("norm", "layout", "dtype", "shape", "bytes")}
        try:
            results["cases"].append({**key, "us": measure(torch, case)})
        except (RuntimeError, AttributeError) as error:
            results["cases"].append({**key, "us": {}, "error": str(error).splitlines()[0]})
        torch.cuda.empty_cache()
        last = results["cases"][-1]
        print(case["norm"], case["layout"], case["dtype"], f"{case['bytes'] / 1e6:.1f} MB:",
              last.get("error") or "  ".join(f"{name} {time:.1f} us" for name, time in last["us"].items()), flush=True)
    with open(sys.argv[2], "w") as file:
        json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

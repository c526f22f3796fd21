"""Results of the benchmarks as one structure, and the tables that show them. Needs nothing but Python itself."""

import json
import re
import statistics

SUFFIX = re.compile(r"/iterations:\d+.*")
BATCH, ROWS = "SyncBatchNorm", ("LayerNorm", "RMSNorm")

# What the benchmarks are to show, as (limit, unit): at most for ratios of our time to another's and for the difference
# in microseconds, at least for factors, how many times faster we are.
RATIO, FACTOR, DIFFERENCE = "ratio", "factor", "us"


def bar(case, contestant):
    """Limit on ours beside the contestant in this case and its unit, or None where nothing is asked."""
    if case["dtype"] != "Float":
        return None
    if case["kind"] == BATCH:
        if case["bytes"] < 1.6e6:
            return (40, DIFFERENCE) if contestant == "aten" else None
        return {"streaming": (1.5 if case["bytes"] >= 30e6 else 1.3, RATIO),
                "aten": (0.6 if case["layout"] == "contiguous" else 0.85, RATIO),
                "eager": (8, FACTOR)}.get(contestant)
    return {("LayerNorm", "aten"): (0.9, RATIO), ("RMSNorm", "aten"): (0.3, RATIO), ("RMSNorm", "eager"): (6, FACTOR),
            ("LayerNorm", "eager_gather"): (10, FACTOR)}.get((case["kind"], contestant))


# --- reading ---------------------------------------------------------------------------------------------------------


def split_name(name):
    """("SyncBatchNorm/2x64x56x56/contiguous/Float", "ours") of Google Benchmark's name for a run."""
    return SUFFIX.sub("", name).rsplit("/", 1)


def new_case(name, ranks):
    kind, size, layout, dtype = name.split("/")
    shape = [int(part) for part in size.split("x")]
    elements = 1
    for length in shape:
        elements *= length
    if len(shape) == 2:
        elements = shape[0] * -(-shape[1] // ranks)
    width = {"Double": 8, "Float": 4}.get(dtype, 2)
    return {"name": name, "kind": kind, "shape": shape, "layout": layout, "dtype": dtype, "bytes": elements * width,
            "times": {}, "collectives": {}}


def merge(outputs):
    """One structure of the JSON files of several programs, given as (program, parsed JSON): contexts by program, and
    cases with the times of every contestant, microseconds by repetition."""
    cases, contexts = {}, {}
    for program, output in outputs:
        contexts[program] = output["context"]
        ranks = int(output["context"]["ranks"])
        for run in output["benchmarks"]:
            if run["run_type"] != "iteration":
                continue
            if run["time_unit"] != "us":
                raise ValueError(f"{program}: {run['name']} is in {run['time_unit']}, not in us")
            name, contestant = split_name(run["name"])
            case = cases.setdefault((program == "threads", name), new_case(name, ranks))
            case["threads"] = program == "threads"
            case["times"].setdefault(contestant, []).append(run["real_time"])
            if "collectives" in run:
                case["collectives"][contestant] = run["collectives"]
    return {"contexts": contexts, "cases": list(cases.values())}


def load(path):
    with open(path) as file:
        return json.load(file)


# --- numbers ---------------------------------------------------------------------------------------------------------


def median(case, contestant):
    times = case["times"].get(contestant)
    return statistics.median(times) if times else None


def ratio(case, contestant, of="ours"):
    """Time of `of` over that of the contestant: the median over pairs of repetitions that were taken in turns, of
    the medians where they were not."""
    ours, other = case["times"].get(of), case["times"].get(contestant)
    if not ours or not other:
        return None
    if len(ours) != len(other) or contestant.startswith("eager"):
        return statistics.median(ours) / statistics.median(other)
    return statistics.median(a / b for a, b in zip(ours, other))


def judge(case, contestant):
    """(value, limit, unit, whether the bar is met), or None where there is no bar or nothing was measured."""
    limit = bar(case, contestant)
    value = ratio(case, contestant)
    if limit is None or value is None:
        return None
    number, unit = limit
    if unit == FACTOR:
        return 1 / value, number, unit, 1 / value >= number
    if unit == DIFFERENCE:
        value = median(case, "ours") - median(case, contestant)
    return value, number, unit, value <= number


# --- tables ----------------------------------------------------------------------------------------------------------


def time_text(value):
    if value is None:
        return ""
    if value >= 99950:
        return f"{value / 1e3:.0f} ms"
    return f"{value / 1e3:.2f} ms" if value >= 9995 else f"{value:.0f} µs" if value >= 100 else f"{value:.1f} µs"


def cell(case, contestant):
    """Our time relative to the contestant's, and the bar: "0.52 ≤ 0.6" is met, "0.71 > 0.6" is missed."""
    judged = judge(case, contestant)
    if judged is None:
        value = ratio(case, contestant)
        if value is None:
            return ""
        return f"{1 / value:.1f}x" if contestant.startswith("eager") else f"{value:.2f}"
    value, limit, unit, met = judged
    if unit == FACTOR:
        return f"{value:.1f}x {'≥' if met else '<'} {limit}"
    sign = "≤" if met else ">"
    return f"{value:+.0f} µs {sign} {limit}" if unit == DIFFERENCE else f"{value:.2f} {sign} {limit}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def size_text(case):
    return " x ".join(map(str, case["shape"]))


def megabytes(case):
    return f"{case['bytes'] / 1e6:.3g}"


def select(results, **wanted):
    found = [case for case in results["cases"] if not case["threads"] and "ours" in case["times"]
             and all(case[key] in value if isinstance(value, tuple) else case[key] == value
                     for key, value in wanted.items())]
    return sorted(found, key=lambda case: (case["kind"], case["bytes"], case["shape"], case["layout"] != "contiguous"))


def batch_table(results):
    head = ("input of a rank", "memory", "MB", "SyncBatchNorm", "to streaming loop", "to loop in a graph",
            "to ATen's local", "to recipe, MPI", "faster than recipe, Python and gloo")
    return table(head, [(size_text(case), case["layout"].replace("_", "-"), megabytes(case),
                         time_text(median(case, "ours")), cell(case, "streaming"), cell(case, "in_graph"),
                         cell(case, "aten"), cell(case, "by_hand"), cell(case, "eager"))
                        for case in select(results, kind=BATCH, dtype="Float")])


def rows_table(results):
    head = ("norm", "rows x hidden", "MB of a rank", "ours", "to streaming loop", "to loop in a graph",
            "to ATen's on own columns", "to gather and norm, MPI", "faster than split norm, Python and gloo",
            "than gather and norm, Python and gloo")
    return table(head, [(case["kind"], size_text(case), megabytes(case), time_text(median(case, "ours")),
                         cell(case, "streaming"), cell(case, "in_graph"), cell(case, "aten"), cell(case, "gather"),
                         cell(case, "eager"), cell(case, "eager_gather"))
                        for case in select(results, kind=ROWS, dtype="Float")])


def dtype_table(results):
    dtypes = ("Double", "BFloat16", "Half")
    cases = [case for dtype in dtypes for case in select(results, kind=(BATCH, *ROWS), dtype=dtype)]
    cases.sort(key=lambda case: (case["kind"], case["shape"], case["layout"] != "contiguous"))
    return table(("norm", "input", "memory", "dtype", "ours", "to ATen's local in that dtype"),
                 [(case["kind"], size_text(case), case["layout"].replace("_", "-"), case["dtype"].lower(),
                   time_text(median(case, "ours")), cell(case, "aten")) for case in cases])


def fused_table(results):
    forms = {"relu": "norm, ReLU", "add": "norm, + residual", "add_relu": "norm, + residual, ReLU",
             "residual": "+ residual, norm", "linear": "norm, linear layer"}
    rows = []
    for case in select(results):
        kind, _, form = case["kind"].partition("_")
        if form:
            rows.append((f"{kind}: {forms.get(form, form)}", size_text(case), case["layout"].replace("_", "-"),
                         time_text(median(case, "ours")), cell(case, "apart"), cell(case, "aten"),
                         cell(case, "linear_alone")))
    return table(("in one call", "input", "memory", "ours", "to our own apart", "to ATen's local, apart",
                  "to the linear layer alone"), rows)


def threads_table(results):
    rows = []
    for case in results["cases"]:
        if case["threads"]:
            ours, aten = ratio(case, "ours_2_threads", "ours_1_thread"), ratio(case, "aten_2_threads", "aten_1_thread")
            rows.append((case["kind"], size_text(case), case["layout"].replace("_", "-"),
                         time_text(median(case, "ours_1_thread")), time_text(median(case, "ours_2_threads")),
                         f"{ours:.2f}" if ours else "", f"{aten:.2f}" if aten else ""))
    return table(("norm", "input", "memory", "1 thread", "2 threads", "speed-up", "ATen's speed-up"), rows)


def hardware(results):
    context = next(context for program, context in results["contexts"].items() if program != "eager_peers")
    threads = context["threads"]
    return (f"{context['processor']}, {context['cores']} cores, {context['ranks']} ranks of {threads} "
            f"thread{'' if threads == '1' else 's'}, {context['capability']}, LibTorch {context['torch']}, "
            f"{context['mpi']}")


def bars_line(results):
    judged = [judge(case, contestant) for case in results["cases"] if not case["threads"]
              for contestant in case["times"]]
    judged = [each for each in judged if each]
    return f"{sum(each[3] for each in judged)} of {len(judged)} bars met."


def markdown(results):
    """All tables, each where there is something to show."""
    parts = [f"Forward and backward, float unless said otherwise, medians. {hardware(results)}. \"To\" columns are our "
             "time over the other's, below 1 is faster; beside a bar, ≤ and ≥ say that it is met. " +
             bars_line(results)]
    if "eager_peers" not in results["contexts"]:
        parts.append("PyTorch could not be imported in Python, so the columns of Python and gloo are empty.")
    for title, make in (("SyncBatchNorm", batch_table), ("Norms of split rows", rows_table),
                        ("Other dtypes", dtype_table), ("Fused forms", fused_table),
                        ("Threads, on one rank", threads_table)):
        text = make(results)
        if text.count("\n") > 1:
            parts.append(f"## {title}\n\n{text}")
    return "\n\n".join(parts) + "\n"

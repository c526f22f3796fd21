#!/usr/bin/env python3
"""The benchmarks run, report on rank 0 alone, and their results become tables and a picture.

    bench_test.py FOLDER_OF_PROGRAMS MPIEXEC [FLAG...]
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import report

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = HERE.parent.parent / ".local" / "venv" / "bin" / "python"
CONTEXT = ("processor", "cores", "ranks", "threads", "capability", "torch", "mpi")
COLUMNS = ("name", "repetition_index", "iterations", "real_time", "bytes_per_second", "collectives", "wire_bytes")

# Program, ranks, filter, contestants expected.
RUNS = [("sync_batch_norm_bench", 2, "SyncBatchNorm/2x64x7x7/contiguous", "ours aten streaming in_graph triad by_hand"),
        ("row_norm_bench", 2, "RMSNorm(_residual/1x4096/.*/(ours|apart)/|/1x8192/)",
         "ours aten streaming in_graph triad by_hand gather ours apart"),
        ("threads", 1, "RMSNorm/32x8192/.*/ours", "ours_1_thread ours_2_threads")]


def launch(name, ranks, *arguments):
    folder, *mpiexec = sys.argv[1:]
    return subprocess.run([*mpiexec, "-n", str(ranks), f"{folder}/bench_{name}", *arguments], capture_output=True,
                          text=True, check=False, timeout=60)


def check_output(output, ranks, contestants):
    assert all(key in output["context"] for key in CONTEXT), output["context"]
    assert output["context"]["ranks"] == str(ranks)
    runs = [run for run in output["benchmarks"] if run["run_type"] == "iteration"]
    assert all(column in run for run in runs for column in COLUMNS), runs
    assert all(run["real_time"] > 0 and run["time_unit"] == "us" for run in runs)
    names = [report.split_name(run["name"])[1] for run in runs]
    assert names == [name for name in contestants.split() for _ in range(2)], names
    counts = {report.split_name(run["name"])[1]: run["collectives"] for run in runs}
    assert counts.get("ours", 2) == 2 and counts.get("aten", 0) == 0, counts


def test_programs_report_once(folder):
    for name, ranks, pattern, contestants in RUNS:
        file = folder / "out.json"
        file.unlink(missing_ok=True)
        done = launch(name, ranks, f"--benchmark_filter={pattern}", "--benchmark_repetitions=2",
                      "--benchmark_format=json", f"--benchmark_out={file}")
        assert done.returncode == 0, done.stderr
        check_output(json.loads(done.stdout), ranks, contestants)
        check_output(report.load(file), ranks, contestants)


def test_table_has_one_line_a_contestant(_):
    done = launch("sync_batch_norm_bench", 2, "--benchmark_filter=2x64x7x7/channels_last/Float/(ours|aten)/",
                  "--benchmark_repetitions=1")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("SyncBatchNorm/")]
    assert [line.split()[0].rsplit("/", 1)[1] for line in lines] == ["ours", "aten"], done.stdout


def test_mistakes_are_refused(_):
    for arguments in (["--benchmark_filter=no_such_case"], ["--benchmark_min_warmup_time=1"]):
        done = launch("sync_batch_norm_bench", 2, *arguments)
        assert done.returncode != 0, f"{arguments} should be refused"


def recorded(name, times, collectives=0):
    return [{"name": f"{name}/iterations:10/manual_time", "run_type": "iteration", "repetition_index": i,
             "real_time": value, "time_unit": "us", "collectives": collectives} for i, value in enumerate(times)]


def recorded_results():
    context = {"processor": "Some Processor", "cores": "2", "ranks": "2", "threads": "1", "capability": "AVX2",
               "torch": "2.11.0", "mpi": "Open MPI v4.1.4"}
    small, large = "SyncBatchNorm/2x64x7x7/contiguous/Float", "SyncBatchNorm/2x256x56x56/contiguous/Float"
    batch = (recorded(f"{small}/ours", [90, 100, 110], 2) + recorded(f"{small}/aten", [50, 60, 70]) +
             recorded(f"{large}/ours", [4000, 8000, 4400], 2) + recorded(f"{large}/aten", [8000, 16000, 8000]) +
             recorded(f"{large}/streaming", [2000, 4000, 2000]) +
             recorded(f"{large}/in_graph", [2500, 5000, 2500]) + recorded(f"{large}/triad", [750, 750, 750]) +
             [{"name": f"{large}/ours_mean", "run_type": "aggregate", "real_time": 5, "time_unit": "us"}])
    rows = (recorded("RMSNorm/512x4096/contiguous/Float/ours", [2000, 2000]) +
            recorded("RMSNorm/512x4096/contiguous/Float/aten", [8000, 8000]) +
            recorded("RMSNorm_residual/512x4096/contiguous/Float/ours", [2500]) +
            recorded("RMSNorm_residual/512x4096/contiguous/Float/apart", [5000]))
    threads = (recorded("RMSNorm/512x4096/contiguous/Float/ours_1_thread", [4000]) +
               recorded("RMSNorm/512x4096/contiguous/Float/ours_2_threads", [2200]))
    eager = recorded(f"{large}/eager", [44000])
    return [("sync_batch_norm_bench", {"context": context, "benchmarks": batch}),
            ("row_norm_bench", {"context": context, "benchmarks": rows}),
            ("threads", {"context": dict(context, ranks="1"), "benchmarks": threads}),
            ("eager_peers", {"context": {"ranks": "2"}, "benchmarks": eager})]


def test_tables(_):
    text = report.markdown(report.merge(recorded_results()))
    for line in ("| 2 x 64 x 7 x 7 | contiguous | 0.0251 | 100 µs |  |  | +40 µs ≤ 40 |  |  |",
                 "| 2 x 256 x 56 x 56 | contiguous | 6.42 | 4400 µs | 2.00 > 1.3 | 1.60 | 0.50 ≤ 0.6 |  | 10.0x ≥ 8 |",
                 "| RMSNorm | 512 x 4096 | 4.19 | 2000 µs |  |  | 0.25 ≤ 0.3 |  |  |  |",
                 "| RMSNorm: + residual, norm | 512 x 4096 | contiguous | 2500 µs | 0.50 |  |  |",
                 "| RMSNorm | 512 x 4096 | contiguous | 4000 µs | 2200 µs | 1.82 |  |"):
        assert line in text, f"{line}\n--- is not in\n{text}"
    assert "4 of 5 bars met" in text and "could not be imported" not in text, text
    without = report.markdown(report.merge(recorded_results()[:3]))
    assert "could not be imported" in without and "3 of 4 bars met" in without, without
    widths = {line.count("|") for line in re.search(r"## SyncBatchNorm\n\n(.*?)\n\n", text, re.S)[1].splitlines()}
    assert widths == {10}, text


def test_picture(folder):
    (folder / "results.json").write_text(json.dumps(report.merge(recorded_results())))
    if not PYTHON.exists():
        print("no project Python, so no picture was drawn")
        return
    subprocess.run([PYTHON, HERE / "plot.py", folder], check=True, stdout=subprocess.DEVNULL)
    assert (folder / "times.png").read_bytes().startswith(b"\x89PNG")


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                test(pathlib.Path(folder))
                print(f"{name}: passed", flush=True)


if __name__ == "__main__":
    main()

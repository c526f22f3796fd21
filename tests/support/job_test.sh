# shellcheck shell=bash
# What the tests of whole jobs share. Source it with the program as the first argument; it changes to a folder of its
# own, which goes when the test ends. End with `finish`.
set -u

program=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_NUM_THREADS=1
# A GPU adds in another order than the exact comparisons here bear, so it stays out of sight until show_gpus.
gpus_before=${CUDA_VISIBLE_DEVICES-unset}
export CUDA_VISIBLE_DEVICES=
failures=0

# ranks N COMMAND...: an mpirun job that cannot hang for ever.
ranks() {
  local count=$1
  shift
  timeout -k 5 "${LIMIT:-120}" mpirun --allow-run-as-root --oversubscribe --bind-to none \
    --mca mpi_yield_when_idle 1 -n "$count" "$@"
}

fail() {
  echo "FAILED: $1"
  grep -vE 'frame #|^--+$' log | sed 's/^/    /' | tail -n 20
  failures=$((failures + 1))
}

# succeeds WHAT RANKS ARGUMENTS...
succeeds() {
  local what=$1 count=$2
  shift 2
  ranks "$count" "$program" "${quiet[@]}" "$@" >log 2>&1 || fail "$what: status $?"
}

# refuses PATTERN RANKS ARGUMENTS...: ends soon with an error of the program's, said once.
refuses() {
  local pattern=$1 count=$2 status
  shift 2
  ranks "$count" "$program" "$@" >log 2>&1
  status=$?
  if [ $status -eq 0 ] || [ $status -ge 124 ]; then fail "[$*] should be refused: status $status"; fi
  [ "$(grep -cE -- "$pattern" log)" = 1 ] || fail "[$*] should say once: $pattern"
}

# Brings the machine's GPUs back; false, with a word about it, where there are none.
show_gpus() {
  if [ "$gpus_before" = unset ]; then unset CUDA_VISIBLE_DEVICES; else CUDA_VISIBLE_DEVICES=$gpus_before; fi
  [ "$gpus_before" != "" ] && nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && return
  echo "  skipped: no GPU here"
  false
}

# trains_alike FOLDER FOLDER KIND: two runs in different precision that log lines of KIND with a loss: it falls in both,
# and differs, by less than a twentieth.
trains_alike() {
  python3 - "$@" >log 2>&1 <<'PY' || fail "$1 and $2 should differ by rounding alone, and learn"
import json, sys
one, other = ([line["loss"] for line in map(json.loads, open(folder + "/metrics.jsonl")) if line["kind"] == sys.argv[3]]
              for folder in sys.argv[1:3])
print(one, other)
assert len(one) == len(other) > 2 and one != other
assert all(abs(a - b) < 0.05 * a for a, b in zip(one, other))
assert one[-1] < 0.9 * one[0] and other[-1] < 0.9 * other[0]
PY
}

# Options that `succeeds` adds.
quiet=()

finish() {
  [ $failures -eq 0 ] && echo "all passed"
  exit $((failures > 0))
}

#!/usr/bin/env bash
# The layer checker passes what is right, fails what is broken, refuses what makes no sense.
#
#   tests/check_layer_test.sh PROGRAM
set -u

program=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1
failures=0

# expect STATUS PATTERN RANKS ARGUMENTS...
expect() {
  local wanted=$1 pattern=$2 count=$3 status
  shift 3
  timeout -k 5 60 mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 \
    -n "$count" "$program" "$@" >"$work/log" 2>&1
  status=$?
  { [ "$wanted" = 0 ] && [ $status -eq 0 ]; } || { [ "$wanted" != 0 ] && [ $status -ne 0 ] && [ $status -lt 124 ]; } || {
    echo "FAILED: [$*] on $count: status $status"
    cat "$work/log"
    failures=$((failures + 1))
  }
  grep -qE -- "$pattern" "$work/log" || {
    echo "FAILED: [$*] on $count should say: $pattern"
    cat "$work/log"
    failures=$((failures + 1))
  }
}

for layer in layer_norm rms_norm column row norm_linear attention mlp block; do
  expect 0 '^passed' 2 --layer $layer
  expect 0 '^passed' 3 --layer $layer --residual replicated --norm layer
done
expect 0 '^passed' 2 --layer block --dtype bfloat16 --placement sandwich
expect 0 '^passed' 4 --layer block --dtype float --heads 4 --kv-heads 1
expect 0 '^passed' 1 --layer block --placement deepnorm
expect 0 '^passed' 3 --layer own
expect 1 '^FAILED: input gradient' 3 --layer broken
expect 1 'multiple of twice --heads' 2 --hidden 10
expect 1 'layer' 2 --layer nothing

[ $failures -eq 0 ] && echo "all passed"
exit $((failures > 0))

# shellcheck shell=bash
# What the tests of whole jobs share. Source it with the program as the first argument; it changes to a folder of its
# own, which goes when the test ends. End with `finish`.
set -u

program=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMP_NUM_THREADS=1
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

# Options that `succeeds` adds.
quiet=()

finish() {
  [ $failures -eq 0 ] && echo "all passed"
  exit $((failures > 0))
}

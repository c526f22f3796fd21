# shellcheck shell=bash
# Shared by the scripts in launch/ and tests/run.

say() { printf '[%s] %s\n' "$(basename "$0")" "$*" >&2; }

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Cores this process may use: its CPU affinity and, in a container, its CPU quota.
usable_cores() {
  local cores quota period
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # nproc would report those instead
  if [[ -r /sys/fs/cgroup/cpu.max ]]; then
    read -r quota period </sys/fs/cgroup/cpu.max
    if [[ $quota != max ]] && ((quota / period >= 1 && quota / period < cores)); then cores=$((quota / period)); fi
  fi
  echo "$cores"
}

#!/usr/bin/env bash
# Compiles every CUDA source for each architecture and fails where a kernel spills registers or uses local memory.
# usage: tests/ptxas_test.sh [ARCHITECTURE...]    default: 80 90 100
# NVCC names the compiler; without one the exit status is 77.
set -euo pipefail

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../src" && pwd)
architectures=("$@")
((${#architectures[@]})) || architectures=(80 90 100)
nvcc=${NVCC:-$(command -v nvcc || true)}
[[ -n $nvcc ]] || nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
if [[ ! -x $nvcc ]]; then
  echo "no nvcc: skipped"
  exit 77
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
kernels=0 failed=0
for file in "$source"/kernels/cuda/*.cu; do
  for architecture in "${architectures[@]}"; do
    report=$folder/report
    if ! "$nvcc" -std=c++17 -O3 --expt-relaxed-constexpr -I"$source" -cubin -arch="sm_$architecture" \
        -Xptxas -v -o "$folder/out.cubin" "$file" 2>"$report"; then
      cat "$report"
      exit 1
    fi
    found=$(grep -c 'Compiling entry function' "$report" || true)
    # ptxas says for every function "N bytes stack frame, N bytes spill stores, N bytes spill loads".
    used=$(grep -B1 -E '[1-9][0-9]* bytes (stack frame|spill)' "$report" || true)
    most=$(sed -n 's/.*Used \([0-9]*\) registers.*/\1/p' "$report" | sort -n | tail -1)
    echo "$(basename "$file") sm_$architecture: $found kernels, at most ${most:-0} registers"
    kernels=$((kernels + found))
    if [[ -n $used ]]; then
      echo "$used"
      failed=1
    fi
  done
done
((kernels > 0)) || { echo "ptxas reported no kernels"; exit 1; }
exit "$failed"

#!/usr/bin/env bash
# Tests launch/run and launch/setup: the commands they form and their messages. Nothing is installed, few jobs are run;
# tools that the scripts ask about the machine are replaced by fakes on PATH.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/fakes"
export PATH=$work/fakes:$PATH SYNCNORM_CONTAINER=yes
unset OMP_NUM_THREADS CUDA_VISIBLE_DEVICES LD_PRELOAD MALLOC_CONF SYNCNORM_MALLOC GLIBC_TUNABLES
failures=0

# fake NAME TEXT: a command that prints TEXT.
fake() { printf '#!/bin/sh\ncat <<"EOF"\n%s\nEOF\n' "$2" >"$work/fakes/$1" && chmod +x "$work/fakes/$1"; }

machine() { # CORES UID
  fake nproc "$1"
  fake id "$2"
  fake lscpu "$(for ((core = 0; core < $1; core++)); do echo "$core,0"; done)"
}

# expect STATUS PATTERN COMMAND...: runs COMMAND; its status and output (grep -E) must match.
expect() {
  local status=$1 pattern=$2 output got
  shift 2
  output=$("$@" 2>&1)
  got=$?
  if [[ $got != "$status" ]] || ! grep -Eq -- "$pattern" <<<"$output"; then
    failures=$((failures + 1))
    printf 'FAILED: %s\n  status %s, expected %s and a line like: %s\n' "$*" "$got" "$status" "$pattern"
    printf '%s\n' "$output" | sed 's/^/  | /'
  fi
}

dry() { "$root/launch/run" --dry-run "$@"; }

# --- placement and threads
machine 2 1000
expect 0 '^OMP_NUM_THREADS=1 mpirun .*--bind-to none .*-n 2 /' dry -n 2 ls
expect 0 '^OMP_NUM_THREADS=2 mpirun .*-n 1 /' dry -n 1 ls
expect 0 'oversubscribed: 3 ranks on 2' dry -n 3 ls
expect 0 'mpirun --oversubscribe .*mpi_yield_when_idle 1 .*-n 3 /' dry -n 3 ls
expect 0 '^OMP_NUM_THREADS=5 mpirun' env OMP_NUM_THREADS=5 "$root/launch/run" --dry-run -n 2 ls
machine 16 1000
expect 0 '^OMP_NUM_THREADS=4 mpirun --map-by slot:PE=4 --bind-to core ' dry -n 4 ls
expect 0 '^OMP_NUM_THREADS=5 mpirun --map-by slot:PE=5 ' dry -n 3 ls

# --- program and its arguments
expect 0 ' /.*/ls -l a\\ b --hosts $' dry -n 1 ls -l "a b" --hosts
expect 0 'no-such-program is not built yet' dry -n 1 no-such-program
expect 1 'is not an executable file' dry -n 1 ./no-such-program
expect 1 'is not an executable file' dry -n 1 "$root/launch"

# --- arguments that are wrong
expect 1 '-n RANKS is missing' dry ls
expect 1 '-n needs a value' dry -n
expect 1 'PROGRAM is missing' dry -n 2
for ranks in 0 -1 two 1.5 ''; do expect 1 'number of ranks is 1 or more|-n RANKS is missing' dry -n "$ranks" ls; done
expect 0 '-n 8 /' dry -n 08 ls
expect 1 'unknown option --rank' dry --rank 2 ls

# --- root
machine 2 0
expect 0 'mpirun --allow-run-as-root' dry -n 2 ls
expect 1 'you are root and this is no container' env SYNCNORM_CONTAINER=no "$root/launch/run" --dry-run -n 2 ls
expect 0 'mpirun --allow-run-as-root' env SYNCNORM_CONTAINER=no "$root/launch/run" --dry-run --root -n 2 ls
expect 1 'SYNCNORM_CONTAINER=perhaps' env SYNCNORM_CONTAINER=perhaps "$root/launch/run" --dry-run -n 2 ls
machine 2 1000
expect 0 'mpirun --oversubscribe' env SYNCNORM_CONTAINER=no "$root/launch/run" --dry-run -n 2 ls

# --- hosts
printf 'a slots=2\n\n# comment\nb.example slots=2 # tail\n' >"$work/hosts"
expect 0 "mpirun --hostfile $work/hosts .*-n 4 /" dry -n 4 --hosts "$work/hosts" ls
expect 0 '-x OMP_NUM_THREADS -x LD_PRELOAD -x MALLOC_CONF -x SYNCNORM_TIMEOUT' \
  env OMP_NUM_THREADS=3 SYNCNORM_TIMEOUT=9 "$root/launch/run" --dry-run -n 4 --hosts "$work/hosts" ls
expect 1 'offers 4 slots, -n asks for 5' dry -n 5 --hosts "$work/hosts" ls
expect 1 'no such readable file' dry -n 2 --hosts "$work/none" ls
printf 'a slots=2\nb 4\n' >"$work/bad"
expect 1 'line 2: "b 4" is not "host slots=N"' dry -n 2 --hosts "$work/bad" ls
: >"$work/empty"
expect 1 'names no host' dry -n 2 --hosts "$work/empty" ls
expect 0 'mpirun .*--hostfile' dry -n 8 --hosts "$root/launch/hosts.example" ls

# --- GPUs
fake nvidia-smi 'GPU 0: Some GPU (UUID: 0)
GPU 1: Some GPU (UUID: 1)'
expect 0 'GPUs: 2 here' dry -n 2 --gpus ls
expect 1 '3 ranks for 2 GPU' dry -n 3 --gpus ls
expect 0 'GPUs: 2 here' env CUDA_VISIBLE_DEVICES=1,0 "$root/launch/run" --dry-run -n 2 --gpus ls
expect 1 '2 ranks for 1 GPU' env CUDA_VISIBLE_DEVICES=1 "$root/launch/run" --dry-run -n 2 --gpus ls
expect 1 '2 ranks for 1 GPU' env CUDA_VISIBLE_DEVICES=0,-1,1 "$root/launch/run" --dry-run -n 2 --gpus ls
for none in '' -1; do
  expect 1 "CUDA_VISIBLE_DEVICES=$none hides every GPU" \
    env CUDA_VISIBLE_DEVICES=$none "$root/launch/run" --dry-run -n 1 --gpus ls
done
machine 16 1000
expect 0 '^OMP_NUM_THREADS=8 mpirun .*--bind-to none .*-n 2 /' dry -n 2 --gpus ls
machine 2 1000
fake nvidia-smi 'No devices were found'
expect 1 'nvidia-smi shows no GPU' dry -n 1 --gpus ls

# --- real jobs: the status is the program's, the memory settings are the user's where there are any
rm "$work/fakes"/*
expect 7 'exit\\ 7' "$root/launch/run" --root -n 2 bash -c 'exit 7'
environment() { env "$@" "$root/launch/run" --root -n 1 env; }
expect 0 '^LD_PRELOAD=libjemalloc.so.2$' environment
expect 0 '^MALLOC_CONF=thp:always,' environment
expect 0 '^LD_PRELOAD=libjemalloc.so.2$' environment MALLOC_CONF=no-such-setting:1
expect 0 '^MALLOC_CONF=narenas:1$' environment MALLOC_CONF=narenas:1
expect 0 '^LD_PRELOAD=libpng16.so.16$' environment LD_PRELOAD=libpng16.so.16
expect 0 '^GLIBC_TUNABLES=glibc.malloc.hugetlb=1$' environment LD_PRELOAD=libpng16.so.16
expect 0 '^GLIBC_TUNABLES=glibc.malloc.hugetlb=1$' environment SYNCNORM_MALLOC=glibc
expect 0 '^GLIBC_TUNABLES=glibc.malloc.check=0:glibc.malloc.hugetlb=1$' \
  environment SYNCNORM_MALLOC=glibc GLIBC_TUNABLES=glibc.malloc.check=0
expect 0 '^GLIBC_TUNABLES=glibc.malloc.hugetlb=0$' \
  environment SYNCNORM_MALLOC=glibc GLIBC_TUNABLES=glibc.malloc.hugetlb=0
expect 1 'SYNCNORM_MALLOC=dlmalloc: jemalloc or glibc' environment SYNCNORM_MALLOC=dlmalloc
fake true 'true from a loader that has no such library'
expect 0 '^GLIBC_TUNABLES=glibc.malloc.hugetlb=1$' environment
expect 0 'no libjemalloc.so.2 here' environment
expect 1 'SYNCNORM_MALLOC=jemalloc: no libjemalloc.so.2 here' environment SYNCNORM_MALLOC=jemalloc
rm "$work/fakes/true"
expect 1 'LD_PRELOAD is set already' environment SYNCNORM_MALLOC=jemalloc LD_PRELOAD=libpng16.so.16

# --- setup
expect 0 'usage: launch/setup' "$root/launch/setup" --help
expect 1 'unknown option --nonsense' "$root/launch/setup" --nonsense

# A machine where a package is missing and nobody may install it.
mkdir -p "$work/copy" && cp -r "$root/launch" "$work/copy/"
fake id 1000
fake dpkg-query 'installed libopenmpi-dev'
printf '#!/bin/sh\nexit 1\n' >"$work/fakes/sudo" && chmod +x "$work/fakes/sudo"
fake apt-get ''
expect 1 'missing Debian packages: .*libgtest-dev' "$work/copy/launch/setup" --no-build </dev/null
expect 1 'apt-get install -y --no-install-recommends .*libgtest-dev' "$work/copy/launch/setup" --no-build </dev/null

if ((failures > 0)); then
  echo "$failures failed"
  exit 1
fi
echo "all passed"

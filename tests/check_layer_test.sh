#!/usr/bin/env bash
# The layer checker passes what is right, fails what is broken, refuses what makes no sense.
#
#   tests/check_layer_test.sh PROGRAM
# shellcheck source=support/job_test.sh
source "$(dirname "${BASH_SOURCE[0]}")/support/job_test.sh" "$1"

# passes RANKS ARGUMENTS...
passes() {
  succeeds "[$*]" "$@"
  grep -q '^passed' log || fail "[$*] should say: passed"
}

for layer in layer_norm rms_norm column row norm_linear attention mlp block; do
  passes 2 --layer $layer
  passes 3 --layer $layer --residual replicated --norm layer
done
passes 2 --layer block --dtype bfloat16 --placement sandwich
passes 2 --layer norm_linear --dtype half --norm layer
passes 4 --layer block --dtype float --heads 4 --kv-heads 1
passes 1 --layer block --placement deepnorm
passes 3 --layer own
refuses '^FAILED: input gradient, backward collectives$' 3 --layer broken
refuses 'multiple of twice --heads' 2 --hidden 10
refuses 'nothing' 2 --layer nothing

finish

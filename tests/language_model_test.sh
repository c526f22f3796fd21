#!/usr/bin/env bash
# The language model from end to end: trains on grids of ranks, stops, resumes on others, writes text, and refuses what
# is wrong.
#
#   tests/language_model_test.sh PROGRAM
# shellcheck source=support/job_test.sh
source "$(dirname "${BASH_SOURCE[0]}")/support/job_test.sh" "$1"
quiet=(--no-plots)

# same FOLDER FOLDER TOLERANCE: both logged the same steps and validations, with losses that differ by no more, relatively.
same() {
  python3 - "$@" >log 2>&1 <<'PY' || fail "$1 and $2 should agree to $3"
import json, sys

def read(folder):
    found = {}
    for line in map(json.loads, open(folder + "/metrics.jsonl")):
        if line["kind"] in ("step", "validation", "result"):
            key = line["kind"], line["step"]
            assert key not in found or line["kind"] == "result", f"{folder} has {key} twice"
            found[key] = line["loss"] if line["kind"] == "step" else line["held_out"]["nats_per_token"]
    return found

one, other = read(sys.argv[1]), read(sys.argv[2])
assert one and one.keys() == other.keys(), f"lines {sorted(one.keys() ^ other.keys())} are in one only"
worst = max((abs(one[key] - other[key]) / abs(one[key]), key) for key in one)
print("worst", worst)
sys.exit(not worst[0] <= float(sys.argv[3]))
PY
}

# A language of few words that a tiny network learns in a few steps.
python3 - <<'PY'
import random
draw = random.Random(5)
who, does, what = ["the king", "my lord", "a fool"], ["loves", "fears", "calls"], ["the sea", "his crown", "no man"]
with open("text.txt", "w") as file:
    for _ in range(1500):
        file.write(f"{draw.choice(who)} {draw.choice(does)} {draw.choice(what)}.\n")
PY

tiny=(--text text.txt --vocab 280 --layers 2 --hidden 24 --heads 4 --context 24 --batch 5 --warmup 2 --lr 0.01
  --schedule constant --log-every 2 --eval-every 4 --eval-windows 8)
exact=("${tiny[@]}" --dtype double)

echo "every grid of ranks gives the same run"
succeeds "1 x 1" 1 "${exact[@]}" --steps 8 --out grid11
succeeds "1 x 2" 2 "${exact[@]}" --steps 8 --out grid12
succeeds "2 x 1" 2 "${exact[@]}" --steps 8 --tensor-parallel 1 --out grid21
succeeds "2 x 2" 4 "${exact[@]}" --steps 8 --tensor-parallel 2 --out grid22
succeeds "1 x 3" 3 "${exact[@]}" --steps 8 --out grid13
# Sums in another order: a rounding of 1e-16 grows a little from step to step.
for grid in 12 21 22 13; do same grid11 grid$grid 1e-9; done

echo "resuming is as if nothing had happened, on the same ranks and on others"
succeeds "first part" 2 "${exact[@]}" --steps 3 --out parts
cp -r parts others && cp -r parts groups && cp -r parts one
succeeds "same ranks" 2 --steps 8 --eval-every 4 --log-every 2 --eval-windows 8 --out parts --resume
succeeds "three ranks" 3 --steps 8 --eval-every 4 --log-every 2 --eval-windows 8 --out others --resume
succeeds "2 x 2 ranks" 4 --steps 8 --tensor-parallel 2 --eval-every 4 --log-every 2 --eval-windows 8 --out groups --resume
succeeds "one rank" 1 --steps 8 --residual replicated --eval-every 4 --log-every 2 --eval-windows 8 --out one --resume
for run in parts others groups one; do
  # The first part ended with a result after its third step, which the straight run has not.
  sed -i '/"kind":"result".*"step":3/d' $run/metrics.jsonl
done
same grid12 parts 0
for run in others groups one; do same grid12 $run 1e-6; done

echo "evaluation alone changes nothing"
cp -r parts before
succeeds "evaluation" 2 --steps 0 --out parts --resume
diff -r before/checkpoint parts/checkpoint >log 2>&1 || fail "--steps 0 changed the checkpoint"

echo "it learns, and writes the same text on any ranks"
succeeds "learning" 2 "${exact[@]}" --steps 60 --out learned
python3 - >log 2>&1 <<'PY' || fail "held-out text should be foretold far better than by token counts"
import json
lines = [json.loads(line) for line in open("learned/metrics.jsonl")]
result = [line for line in lines if line["kind"] == "result"][-1]["held_out"]
print(result["nats_per_byte"], lines[0]["unigram_nats_per_byte"])
assert result["nats_per_byte"] < 0.5 * lines[0]["unigram_nats_per_byte"]
PY
# writes RANKS ARGUMENTS...: the text alone.
writes() {
  local count=$1
  shift
  ranks "$count" "$program" --out learned --sample "$prompt" "$@" 2>log || fail "writing on $count ranks: status $?"
}
prompt="the king"
for flags in "--tokens 60" "--tokens 60 --temperature 0" "--tokens 60 --top-k 5 --seed 7 --temperature 1.2"; do
  # shellcheck disable=SC2086  # a list of words
  writes 1 $flags >text1
  for count in 2 3; do
    # shellcheck disable=SC2086
    writes $count $flags >text$count
    cmp text1 text$count >log 2>&1 || fail "$count ranks write another text with $flags"
  done
done
grep -qE "the king (loves|fears|calls) (the sea|his crown|no man)\." text1 || fail "it does not write its language"
cp text1 log
[ "$(wc -c <text1)" -gt 60 ] || fail "too short a text"
# Read at once or written token by token: the same keys and values.
writes 2 --temperature 0 --tokens 16 >stepwise
prompt=$(head -n 1 stepwise)$'\n'
writes 2 --temperature 0 --tokens 6 >at_once
python3 - >log 2>&1 <<'PY' || fail "a text read at once goes on otherwise than the same text written"
one, other = open("stepwise").read(), open("at_once").read()
print(repr(one), repr(other))
shared = min(len(one), len(other)) - 1  # each ends in a line end of the program's
assert shared > one.index("\n") + 3 and one[:shared] == other[:shared]
PY
prompt="the king"
writes 2 --tokens 60 --seed 1 >seed1
writes 2 --tokens 60 --seed 2 >seed2
cmp -s seed1 seed2 && fail "two seeds write the same"

echo "every placement, norm and residual trains"
for placement in pre post sandwich deepnorm; do
  for norm in layer rms; do
    for residual in replicated sharded; do
      [ "$norm-$residual" = layer-replicated ] && extra=(--qk-norm head --activation gelu) || extra=(--kv-heads 2)
      [ "$norm-$residual" = rms-sharded ] && extra=(--qk-norm full --softcap 20)
      succeeds "$placement $norm $residual" 2 "${tiny[@]}" --placement $placement --norm $norm --residual $residual \
        "${extra[@]}" --steps 4 --out "kinds/$placement-$norm-$residual"
    done
  done
done
succeeds "bytes" 2 --text text.txt --tokenizer bytes --layers 1 --hidden 16 --heads 2 --context 16 --batch 4 --steps 4 --out bytes
succeeds "overwriting" 2 "${tiny[@]}" --steps 2 --out bytes --overwrite

echo "in bfloat16 it learns as in float, wherever the norms are, and resumes"
for grid in "1 1" "2 2" "2 1" "3 3"; do
  read -r count width <<<"$grid"
  for precision in float bfloat16; do
    succeeds "$precision on $count by $width" "$count" "${tiny[@]}" --steps 24 --tensor-parallel "$width" --device cpu \
      --precision $precision --out "$precision$count$width"
  done
  trains_alike "float$count$width" "bfloat16$count$width" step
done
for placement in pre post sandwich deepnorm; do
  for residual in replicated sharded; do
    [ $residual = sharded ] && extra=(--norm rms --qk-norm full --softcap 20) || extra=(--norm layer --qk-norm head --kv-heads 2)
    succeeds "$placement $residual in bfloat16" 2 "${tiny[@]}" --placement $placement --residual $residual "${extra[@]}" \
      --steps 4 --precision bfloat16 --out "half/$placement-$residual"
  done
done
succeeds "first part in bfloat16" 2 "${tiny[@]}" --steps 5 --precision bfloat16 --out halves
succeeds "second part in bfloat16" 2 --steps 24 --eval-every 4 --log-every 2 --eval-windows 8 --out halves --resume
sed -i '/"kind":"result".*"step":5/d' halves/metrics.jsonl
same bfloat1622 halves 0
for flags in "" "--precision float" "--dtype double"; do
  # shellcheck disable=SC2086  # a list of words
  ranks 2 "$program" --out halves --sample "the king" --tokens 60 $flags >text 2>log || fail "writing with $flags: status $?"
  [ "$(wc -c <text)" -gt 60 ] || fail "too short a text with $flags"
done

# stops SIGNAL WHO: a long job that gets the signal at WHO, rank or mpirun, ends well and can go on.
stops() {
  local signal=$1 who=$2 target
  rm -rf stopped
  timeout -k 5 120 mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n 2 \
    "$program" "${tiny[@]}" --no-plots --steps 1000000 --save-every 3 --out stopped >log 2>&1 &
  local job=$!
  for _ in $(seq 600); do [ -d stopped/checkpoint ] && break; sleep 0.1; done
  target=$(pgrep -P $job)
  [ "$who" = mpirun ] || target=$(pgrep -P "$target" | tail -n 1)
  kill "-$signal" "$target"
  wait $job || fail "a job stopped by $signal at $who should end with status 0, not $?"
  grep -q "stopped as asked" log || fail "the job does not say that it stopped"
  succeeds "evaluation after the stop" 3 --steps 0 --out stopped --resume
}

echo "a signal at one process stops all ranks, with a checkpoint"
stops TERM rank
stops USR1 mpirun

echo "what is wrong is said"
refuses "no-such-flag" 2 --no-such-flag
refuses "--heads: 5 do not divide --hidden 24" 2 --hidden 24 --heads 5
refuses "--kv-heads: 3 do not divide --heads 4" 2 "${tiny[@]}" --kv-heads 3
refuses "make it even" 2 --hidden 24 --heads 8
refuses "--vocab: goes with --tokenizer bpe" 2 --text text.txt --tokenizer bytes --vocab 300
refuses "--tensor-parallel 2 does not divide the 3 ranks" 3 "${tiny[@]}" --tensor-parallel 2
refuses "--batch 1 is too small for 2 tensor groups" 2 --text text.txt --batch 1 --tensor-parallel 1
refuses "--top-k: goes with --sample" 2 "${tiny[@]}" --top-k 3
refuses "--steps: goes with training" 2 --out learned --sample x --steps 3
refuses "--sample: needs --out" 2 --sample x
refuses "no meaning with --temperature 0" 2 --out learned --sample x --temperature 0 --top-k 3
refuses "no checkpoint nowhere/checkpoint" 2 --out nowhere --sample x
refuses "no checkpoint nowhere/checkpoint" 2 --out nowhere --resume
refuses "holds an earlier run" 2 "${tiny[@]}" --out learned
refuses "cannot resume with --precision .float. .checkpoint: .bfloat16.." 2 --out halves --resume --precision float
refuses "--device: gpu not in" 2 "${tiny[@]}" --device gpu
refuses "--precision: half not in" 2 "${tiny[@]}" --precision half
refuses "--precision: bfloat16 goes with --dtype float" 2 "${exact[@]}" --precision bfloat16
refuses "--device cuda: rank 0 on .* has no GPU" 3 "${tiny[@]}" --device cuda
refuses "--device cuda: rank 0 on .* has no GPU" 2 --out learned --sample x --device cuda
refuses "cannot resume with --hidden 48 .checkpoint: 24." 2 --out learned --resume --hidden 48
refuses "launch/setup" 3 --data "$work/none"
refuses "cannot read none.txt" 2 --text none.txt
refuses "do not fill one window" 2 --text text.txt --context 65536
cp text.txt other.txt && echo "another end" >>other.txt
refuses "trained on other text" 2 --out learned --resume --text other.txt
mkdir -p damaged && cp -r learned/checkpoint damaged/ && for file in damaged/checkpoint/*; do head -c 100 "$file" >start && mv start "$file"; done
refuses "damaged/checkpoint" 3 --out damaged --resume
refuses "no longer a number" 2 --text text.txt --vocab 280 --layers 1 --hidden 16 --heads 2 --context 16 --batch 4 --lr 1000 \
  --warmup 0 --clip 0 --weight-decay 1000 --steps 40 --out diverged --no-plots

echo "on GPUs"
if show_gpus; then
  for precision in float bfloat16; do
    succeeds "$precision on GPUs" 2 "${tiny[@]}" --steps 24 --device cuda --precision $precision --out gpu-$precision
    trains_alike gpu-$precision float22 step
    succeeds "$precision goes on without them" 2 --steps 28 --device cpu --out gpu-$precision --resume
    succeeds "$precision goes on with them" 3 --steps 32 --device cuda --out gpu-$precision --resume
    ranks 2 "$program" --out gpu-$precision --sample "the king" --device cuda >log 2>&1 || fail "$precision writes: status $?"
  done
fi

finish

#!/usr/bin/env bash
# The segmentation example from end to end: trains, stops, resumes on other rank counts, and refuses what is wrong.
#
#   tests/segmentation_test.sh PROGRAM
# shellcheck source=support/job_test.sh
source "$(dirname "${BASH_SOURCE[0]}")/support/job_test.sh" "$1"
quiet=(--no-plots)

# field FOLDER EPOCH KEY: a value of the epoch's line in metrics.jsonl.
field() {
  python3 - "$@" <<'PY'
import json, sys
folder, epoch, key = sys.argv[1:]
lines = [json.loads(line) for line in open(folder + "/metrics.jsonl")]
found = [line for line in lines if line["kind"] == "epoch" and line["epoch"] == int(epoch)]
assert len(found) == 1, f"epoch {epoch} was logged {len(found)} times"
print(found[0][key])
PY
}

python3 - <<'PY'
import os, random, struct, zlib

def png(path, width, height, pixels, channels=1):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    rows = b"".join(b"\0" + bytes(row) for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))

def disc(seed, size, scale):
    draw = random.Random(seed)
    x, y, r = draw.uniform(8, size - 8), draw.uniform(8, size - 8), draw.uniform(4, 9)
    inside = [[(i - x) ** 2 + (j - y) ** 2 < r * r for i in range(size)] for j in range(size)]
    return ([[min(255, 60 + 120 * v + draw.randrange(30)) for v in row] for row in inside],
            [[scale * v for v in row] for row in inside])

for k in range(9):
    image, mask = disc(k, 20, 1)
    png(f"images/p{k}.png", 20, 20, image)
    png(f"masks/p{k}.png", 20, 20, mask)
    png(f"masks255/p{k}.png", 20, 20, [[255 * v for v in row] for row in mask])
    png(f"colored/p{k}.png", 20, 20, [[c for v in row for c in ((255, 0, 0) if v else (0, 0, 0))] for row in mask], 3)
    png(f"small/p{k}.png", 16, 20, [row[:16] for row in mask])
    png(f"mixed/p{k}.png", 20 - (k == 4), 20, [row[:20 - (k == 4)] for row in image])
    png(f"mixedmasks/p{k}.png", 20 - (k == 4), 20, [row[:20 - (k == 4)] for row in mask])
    if k != 3:
        png(f"fewer/p{k}.png", 20, 20, mask)
    png(f"high/p{k}.png", 20, 20, [[7 if k == 5 and v else v for v in row] for row in mask])
os.makedirs("empty")
os.makedirs("broken")
for k in range(9):
    data = open(f"images/p{k}.png", "rb").read()
    open(f"broken/p{k}.png", "wb").write(data[:60] if k == 2 else data)
PY

pairs=(--images images --masks masks)
small=("${pairs[@]}" --width 4 --depth 2 --schedule constant --warmup 0 --lr 0.02)

echo "resuming on as many ranks is as if nothing had happened"
succeeds "straight run" 2 "${small[@]}" --epochs 3 --out straight
succeeds "first epoch" 2 "${small[@]}" --epochs 1 --out parts
succeeds "other epochs" 2 --epochs 3 --out parts --resume
for epoch in 1 2 3; do
  [ "$(field straight $epoch loss)" = "$(field parts $epoch loss)" ] || fail "loss of epoch $epoch after resume"
  [ "$(field straight $epoch test)" = "$(field parts $epoch test)" ] || fail "scores of epoch $epoch after resume"
done
[ -s straight/model.pt ] || fail "no model.pt"

echo "resuming on three ranks goes on"
succeeds "three ranks" 3 --epochs 6 --out parts --resume
field parts 6 loss >/dev/null || fail "no sixth epoch"
python3 -c "import sys; sys.exit(not float(sys.argv[2]) < float(sys.argv[1]))" \
  "$(field parts 3 loss)" "$(field parts 6 loss)" || fail "the loss does not go down after resuming on three ranks"

echo "evaluation alone changes nothing"
cp parts/checkpoint.pt before.pt
succeeds "evaluation" 2 --epochs 0 --out parts --resume
cmp -s before.pt parts/checkpoint.pt || fail "--epochs 0 changed the checkpoint"

echo "every norm, optimizer and schedule trains; colour masks, resized pictures"
for norm in batch group frozen none; do
  succeeds "norm $norm" 2 "${pairs[@]}" --width 4 --depth 2 --norm $norm --lr 0.01 --epochs 1 --out "norm-$norm"
done
succeeds "adamw" 2 --images mixed --masks mixedmasks --size 24x16 --width 4 --depth 3 --optimizer adamw --schedule cosine --epochs 1 --out adamw
succeeds "palette" 3 --images images --masks colored --palette 000000,ff0000 --width 4 --depth 2 --epochs 1 --out palette

echo "in bfloat16 it learns as in float, with every norm, and resumes"
for count in 1 2 3; do
  succeeds "float on $count" $count "${small[@]}" --epochs 4 --device cpu --out float$count
  succeeds "bfloat16 on $count" $count "${small[@]}" --epochs 4 --device cpu --precision bfloat16 --out half$count
  trains_alike float$count half$count epoch
done
for norm in batch group frozen none; do
  succeeds "norm $norm in bfloat16" 2 "${pairs[@]}" --width 4 --depth 2 --norm $norm --lr 0.01 --epochs 1 \
    --precision bfloat16 --out "half-$norm"
done
succeeds "first epoch in bfloat16" 2 "${small[@]}" --epochs 1 --precision bfloat16 --out halves
succeeds "other epochs in bfloat16" 2 --epochs 4 --out halves --resume
for epoch in 1 4; do
  [ "$(field half2 $epoch loss)" = "$(field halves $epoch loss)" ] || fail "loss of epoch $epoch in bfloat16 after resume"
  [ "$(field half2 $epoch test)" = "$(field halves $epoch test)" ] || fail "scores of epoch $epoch in bfloat16 after resume"
done

# stops SIGNAL WHO: a long job that gets the signal at WHO, rank or mpirun, after its first checkpoint ends well.
stops() {
  local signal=$1 who=$2 target
  rm -rf stopped
  timeout -k 5 240 mpirun --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n 2 \
    "$program" "${small[@]}" --no-plots --epochs 100000 --out stopped >log 2>&1 &
  local job=$!
  for _ in $(seq 600); do [ -s stopped/checkpoint.pt ] && break; sleep 0.1; done
  target=$(pgrep -P $job)
  [ "$who" = mpirun ] || target=$(pgrep -P "$target" | tail -n 1)
  kill "-$signal" "$target"
  wait $job || fail "a job stopped by $signal at $who should end with status 0, not $?"
  grep -q "stopped as asked" log || fail "the job does not say that it stopped"
  succeeds "evaluation after the stop" 2 --epochs 0 --out stopped --resume
}

echo "a signal at one process stops all ranks, with a checkpoint"
stops TERM rank
stops USR1 mpirun

echo "what is wrong is said"
refuses "no mask in fewer for p3" 2 --images images --masks fewer
refuses "20x20 pixels but its mask .* is 20x16" 2 --images images --masks small
refuses "holds class 7 at row [0-9]+, column [0-9]+" 2 --images images --masks high --classes 2
refuses "--palette 000000,ffffff" 2 --images images --masks masks255
refuses "is in colour" 2 --images images --masks colored
refuses "which --palette does not list" 2 --images images --masks colored --palette 000000,00ff00
refuses "cannot read broken/p2.png" 3 --images broken --masks masks
refuses "empty holds no .png" 2 --images empty --masks masks
refuses "bring all to one size with --size" 2 --images mixed --masks mixedmasks
refuses "launch/setup" 3 --data "$work/nowhere"
refuses "norms" 2 --norms sync
refuses "masks" 2 --images images
refuses "no-augment contradict" 2 "${pairs[@]}" --no-augment --noise 0.1
refuses "holds an earlier run" 2 "${small[@]}" --out straight
refuses "no checkpoint straight2" 2 --out straight2 --resume
refuses "cannot resume with --precision .float. .checkpoint: .bfloat16.." 2 --out halves --resume --precision float
refuses "--device: gpu not in" 2 "${small[@]}" --device gpu
refuses "--precision: half not in" 2 "${small[@]}" --precision half
refuses "--device cuda: rank 0 on .* has no GPU" 3 "${small[@]}" --device cuda
refuses "--device cuda: rank 0 on .* has no GPU" 1 --compare --quick --device cuda
refuses "cannot resume with --width 8 .checkpoint: 4." 2 --out straight --resume --width 8
refuses "trained on other data" 2 --out straight --resume --images images --masks high
head -c 2000 straight/checkpoint.pt >cut && mkdir -p damaged && mv cut damaged/checkpoint.pt
refuses "damaged or no checkpoint" 3 --out damaged --resume
refuses "no longer a number" 2 "${pairs[@]}" --width 4 --norm none --lr 1e6 --warmup 0 --epochs 3 --out diverged --no-plots

echo "on GPUs"
if show_gpus; then
  for precision in float bfloat16; do
    succeeds "$precision on GPUs" 2 "${small[@]}" --epochs 4 --device cuda --precision $precision --out gpu-$precision
    trains_alike gpu-$precision float2 epoch
    succeeds "$precision goes on without them" 2 --epochs 5 --device cpu --out gpu-$precision --resume
    succeeds "$precision goes on with them" 2 --epochs 6 --device cuda --out gpu-$precision --resume
  done
fi

finish

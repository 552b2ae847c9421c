#!/bin/sh
# On a GPU host: builds a shape, starts Fovea on it, and measures.
#   sh tools/benchmarks/gpu.sh SHAPE OUT [up options]; a shape of tools/benchmarks/shapes.py or family_shapes.py. Of the options, for two GPUs: --ranks 1 --trainer-gpus 0 --sampler-gpus 1
# STATE and PORT, if set, let several run side by side on GPUs of their own.
# FIGURES, if set, is what to run: programs of this folder with their options, separated by semicolons; those that
# begin after DEADLINE_S are left out. BUILD: further options of tools/benchmarks/family_shapes.py, as --seed 0.
set -e
shape=$1 out=$2; shift 2
state=${STATE:-/tmp/fovea}
model=/tmp/shapes/$shape up=$state/up.json
figures=${FIGURES:-"agreement --rank 32 --float32 $model; push --up $up --ranks 8 32 128 0 --broadcast-gpus 0 1;
    trainer --up $up --shape $shape --ranks 32 --plain-gpu 1; trainer --up $up --shape $shape --ranks 0; agreement --rank 0;
    tenants --up $up"}
[ -f "$model/config.json" ] || case $shape in
    *-*) python3 -m benchmarks.family_shapes "$shape" "$model" ${BUILD:-} ;;
    *) python3 -m benchmarks.shapes "$shape" "$model" ;;
esac
export FOVEA_TRAINER_MAX_LORA_RANK="${FOVEA_TRAINER_MAX_LORA_RANK:-128}"
export FOVEA_SAMPLER_MAX_LORA_RANK="${FOVEA_SAMPLER_MAX_LORA_RANK:-128}"
rm -rf "$state"
python3 -m fovea.cli.main up --model "$model" --state-dir "$state" --port "${PORT:-8000}" --ready-timeout-s 400 "$@" > "$out/up.log" 2>&1 &
pid=$! started=$(date +%s)
trap 'kill -INT $pid; wait $pid || tail -c 3000 "$out/up.log"' EXIT
while [ ! -f $up ]; do sleep 1; kill -0 $pid; done
echo "ready after $(($(date +%s) - started)) s"
echo "$figures" | tr ';' '\n' | while read -r figure; do
    case $figure in *[a-z]*) ;; *) continue ;; esac
    echo "== $figure ($(($(date +%s) - started)) s)"
    left=$((${DEADLINE_S:-86400} - $(date +%s) + started)) most=${FIGURE_TIMEOUT_S:-200}
    [ "$left" -gt 0 ] || { echo "no time left"; continue; }
    timeout -s INT -k 10 "$((left < most ? left : most))" python3 -m benchmarks.$figure >> "$out/figures.jsonl" 2>> "$out/errors.log" < /dev/null ||
        { echo "failed with $?"; grep -v -i warn "$out/errors.log" | tail -4; }
done
python3 - "$out/figures.jsonl" <<'P'
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    print(f"{row['figure']:34} {row['value']:11.5g} {row['unit']:8.8} ref {row.get('reference', '-'):<9} {' '.join(f'{k}={v}' for k, v in row['sizes'].items() if k != 'model')}")
P

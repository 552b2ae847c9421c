#!/bin/sh
# On a GPU host: builds a shape, starts Fovea on it, and measures. `sh benchmarks/gpu.sh 4b OUT [up options]`
set -e
shape=$1 out=$2; shift 2
model=/tmp/shapes/$shape
[ -f "$model/config.json" ] || python3 -m benchmarks.shapes "$shape" "$model"
python3 -m fovea.cli.main up --model "$model" --state-dir /tmp/fovea --port 8000 --ready-timeout-s 400 "$@" > "$out/up.log" 2>&1 &
up=$!
trap 'kill -INT $up; wait $up; tail -c 4000 "$out/up.log"' EXIT
i=0
while [ ! -f /tmp/fovea/up.json ]; do sleep 1; i=$((i + 1)); [ $i -lt 400 ] && kill -0 $up; done
for figure in "agreement --rank 32" "push --ranks 8 32" "trainer --shape $shape --ranks 32" "push --ranks 0" "trainer --shape $shape --ranks 0" "agreement --rank 0"; do
    echo "== $figure"
    timeout 200 python3 -m benchmarks.$figure >> "$out/figures.jsonl" 2>> "$out/errors.log" || { echo failed; tail -3 "$out/errors.log"; }
done
python3 - "$out/figures.jsonl" <<'P'
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    print(f"{row['figure']:32} {row['value']:12.5g} {row['unit']:20} {row['sizes']}")
P

#!/bin/sh
# What needs no GPU, one after another, on a Fovea with the tiny VLM where one is needed: `sh tools/benchmarks/cpu.sh`.
# The lines go to tools/benchmarks/results/cpu-DATE.jsonl. BENCH_TINKER=path/to/bench_tinker.py adds the API benchmark.
set -e
state=$(mktemp -d) results=tools/benchmarks/results/cpu-$(date +%F).jsonl
export TINKER_TELEMETRY=0 FOVEA_SAMPLER_MAX_SEQUENCES=256
python -m benchmarks.gateway_polls >> "$results"
python -m benchmarks.durability >> "$results"
python -m benchmarks.recovery --tokens 4096 >> "$results"
python -m benchmarks.gateway_bytes >> "$results"
python -m benchmarks.renderer >> "$results"
[ -z "$BENCH_TINKER" ] || python -m benchmarks.tinker_api --bench "$BENCH_TINKER" >> "$results"
fovea up --state-dir "$state" --port 0 --grpc-port 0 > "$state/up.log" 2>&1 &
pid=$!
trap 'kill -TERM $pid; wait $pid || true; rm -rf "$state"' EXIT
while [ ! -f "$state/up.json" ]; do sleep 1; kill -0 $pid; done
python -m benchmarks.sampler --up "$state/up.json" --in-flight 1 64 --new-tokens 64 >> "$results"
python -m benchmarks.tenants --up "$state/up.json" >> "$results"
python -m benchmarks.push --up "$state/up.json" --ranks 8 32 0 >> "$results"
echo "written: $results"

#!/bin/sh
# What do logits in float32 buy, and cost? Runs tools/benchmarks/gpu.sh with heads of the model's type and of float32, several
# seeds each, and prints all figures of both.
#   sh tools/benchmarks/heads.sh SHAPE OUT [up options]; on one GPU: --ranks 1 --trainer-gpus 0 --sampler-gpus 0
set -e
shape=$1 out=$2; shift 2
export FOVEA_SAMPLER_MAX_SEQUENCES=256 FOVEA_SAMPLER_GPU_MEMORY_FRACTION="${FOVEA_SAMPLER_GPU_MEMORY_FRACTION:-0.3}"
up=${STATE:-/tmp/fovea}/up.json
for head in model float32; do
    mkdir -p "$out/$head"
    FOVEA_TRAINER_HEAD_DTYPE=$head FOVEA_SAMPLER_HEAD_DTYPE=$head \
        FIGURES="agreement --rank 32 --steps 10 --image-side 448 --seeds ${SEEDS:-5 6 7 8} --wave 128 --note $head; trainer --up $up --shape $shape --ranks 32 --repeats 3" \
        sh tools/benchmarks/gpu.sh "$shape" "$out/$head" "$@"
done

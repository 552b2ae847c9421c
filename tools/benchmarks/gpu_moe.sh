#!/bin/sh
# Mixtures of experts on lent H200s: Qwen3-VL-30B-A3B and its sisters of 12 and 4 layers (tools/benchmarks/family_shapes.py), on
# weights that both sides draw from a seed: 62 GB fit on no such disk. Each call ends within 9 minutes, prints a table
# and leaves OUT/figures.jsonl.
#   sh tools/benchmarks/gpu_moe.sh one PART OUT     one card, shared by trainer and sampler
#     train    12 layers: LoRA 32 with experts, adapter push, agreement with and without router replay on three seeds
#     sampler  12 layers: tokens/s against vLLM itself, both on the card
#     full      4 layers: all parameters: push, training, agreement
#   sh tools/benchmarks/gpu_moe.sh two PART OUT     two cards, the whole model: trainer on the first, sampler on the second
#     train    as above, and a push of the base's own weights, 62 GB (all parameters of it do not train on one card)
#     sampler  as above, both engines on the second card
#     loading  host memory and seconds of one and two ranks, from a file of zeros
#   sh tools/benchmarks/gpu_moe.sh cpu train|sampler|full|loading OUT     that it runs: two layers, 16 experts
# The host's vLLM needs its kernels for experts; where it has no flashinfer, the variable below keeps it from asking.
set -e
where=$1 part=$2 out=$3
mkdir -p "$out"
export VLLM_USE_FLASHINFER_SAMPLER=0 FOVEA_TRAINER_MAX_LORA_RANK=32 FOVEA_SAMPLER_MAX_LORA_RANK=32
export FOVEA_SAMPLER_MAX_LORAS=2 FOVEA_SAMPLER_EAGER="${FOVEA_SAMPLER_EAGER:-true}" FOVEA_SAMPLER_MAX_SEQUENCES=256
export FOVEA_SAMPLER_MAX_CONTEXT=8192
export DEADLINE_S="${DEADLINE_S:-500}" FIGURE_TIMEOUT_S="${FIGURE_TIMEOUT_S:-300}" BUILD="--seed 0"
export STATE="${STATE:-/tmp/fovea-moe}"
up=$STATE/up.json
seeds="--seeds 5 6 7" base="" ways="--ways grpc" broadcast=""
case $where in
    one) shape=qwen3_vl-30b-a3b-12l place="--trainer-gpus 0 --sampler-gpus 0" fraction=0.3
        load="--kinds text image --in-flight 64 256" ;;
    two) shape=qwen3_vl-30b-a3b place="--trainer-gpus 0 --sampler-gpus 1" fraction=0.8 base="push --up $up --base --ranks --repeats 3;"
        load="--kinds text --in-flight 64 192" broadcast="--broadcast-gpus 0 1"
        export FOVEA_SAMPLER_FULL_PUSH_ROOM=never ;;
    cpu) shape=qwen3_vl-30b-a3b-2l place="" fraction=0.9 seeds="--seeds 5 --prompts 2 --image-side 64"
        load="--kinds text --in-flight 2 --new-tokens 16 --repeats 1" base="push --up $up --base --ranks --repeats 2;"
        small="--datums 2 --repeats 2" quick="--repeats 2" steps="--steps 1" ;;
    *) echo "one, two or cpu, not $where"; exit 2 ;;
esac
[ "$where" = cpu ] || export FOVEA_SAMPLER_ENGINE_ARGUMENTS="${FOVEA_SAMPLER_ENGINE_ARGUMENTS:-{\"moe_backend\": \"triton\"\}}"
agree="agreement --base-url http://127.0.0.1:${PORT:-8000} --replay --temperatures 1.0 $seeds ${steps:---steps 10}"
case $part in
    train) FIGURES="trainer --up $up --shape $shape --ranks 32 ${small:-}; push --up $up --ranks 32 ${quick:-} $broadcast; $agree --rank 32; $base" ;;
    sampler) FIGURES="sampler --up $up $load $ways --waves 1"
        if [ "$where" = two ]; then fraction=0.48; fi ;;
    full) [ "$where" = cpu ] || shape=qwen3_vl-30b-a3b-4l
        FIGURES="push --up $up --ranks 0 ${quick:-}; trainer --up $up --shape $shape --ranks 0 ${small:-}; $agree --rank 0" ;;
    loading) zeros=/tmp/shapes/$shape-zeros
        [ -f "$zeros/config.json" ] || python3 -m benchmarks.family_shapes "$shape" "$zeros" --zeros
        device=cuda; if [ "$where" = cpu ]; then device=cpu; fi
        timeout "$DEADLINE_S" python3 -m benchmarks.loading "$zeros" --repeats 1 --device $device --ranks 1 2 | tee -a "$out/figures.jsonl"
        exit ;;
    *) echo "train, sampler, full or loading, not $part"; exit 2 ;;
esac
export FIGURES FOVEA_SAMPLER_GPU_MEMORY_FRACTION="${FOVEA_SAMPLER_GPU_MEMORY_FRACTION:-$fraction}"
# shellcheck disable=SC2086 -- options, one by one
sh tools/benchmarks/gpu.sh "$shape" "$out" --ranks 1 $place | grep --line-buffered -v -e agreement.mean -e way=alone

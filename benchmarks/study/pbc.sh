#!/usr/bin/env bash
# A small ViT, h8 and i8 trained without labels on blood cells by DINOv2's recipe, one after the other on one GPU; then
# DinoBloom's protocol on the teachers of the whole run, on upright cells, and on turned ones.
#
#   benchmarks/study/pbc.sh DATA OUT [options of `quickvit train dinov2`]
#
# DATA has {train,val,test}/CLASS/*. OUT gets for each model a run folder with the curve of k-NN in metrics.jsonl, and
# NAME.upright.jsonl and NAME.turned.jsonl with one line for each teacher, from the one before the first update on.
set -euo pipefail
data=$1 out=$2
shift 2
mkdir -p "$out"

recipe=(--preset small --views dinobloom --img-size 96 --patch-size 8 --steps 3000 --cache true
        --run.workers 14 --run.evaluate-every 500 --run.save-every 1000)
judge=(--data "$data" --batch-size 500 --workers 14 --cache "$out/features" --json)
declare -A models=([vit]=baseline_small_patch16_224 [h8]=quickvit_h8_small_patch16_224 [i8]=quickvit_i8_small_patch16_224)

for name in "${!models[@]}"; do
    python -m quickvit train dinov2 --model "${models[$name]}" --data "$data" --out "$out/$name" "${recipe[@]}" "$@" \
        > "$out/$name.log" 2>&1
    for teacher in "$out/$name"/teachers/*.safetensors; do
        python -m quickvit eval hematology "$teacher" "${judge[@]}" | tr -d '\n' 2>> "$out/$name.log"
        echo
    done > "$out/$name.upright.jsonl"
    for teacher in "$out/$name"/teachers/*.safetensors; do
        python -m quickvit eval rotation "$teacher" --protocol hematology "${judge[@]}" | tr -d '\n' 2>> "$out/$name.log"
        echo
    done > "$out/$name.turned.jsonl"
done

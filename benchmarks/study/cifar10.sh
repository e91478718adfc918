#!/usr/bin/env bash
# A tiny ViT, h8 and i8 trained on CIFAR-10 by DeiT III's recipe, at once on one GPU, then tested in other poses.
#
#   benchmarks/study/cifar10.sh DATA OUT [options of `quickvit train deit3`]
#
# DATA has train/CLASS/*.jpg and test/CLASS/*.jpg. OUT gets a run folder and the results of each model.
set -euo pipefail
data=$1 out=$2
shift 2
mkdir -p "$out"

recipe=(--img-size 32 --patch-size 4 --batch-size 512 --epochs 40 --warmup-epochs 5 --learning-rate 3e-3
        --repeats 1 --run.workers 5 --run.compile reduce-overhead --run.evaluate-every 970)
declare -A models=([vit]=baseline_tiny_patch16_224 [h8]=quickvit_h8_tiny_patch16_224 [i8]=quickvit_i8_tiny_patch16_224)

for name in "${!models[@]}"; do
    python -m quickvit train deit3 --model "${models[$name]}" --data "$data" --out "$out/$name" "${recipe[@]}" "$@" \
        > "$out/$name.log" 2>&1 &
done
wait

for name in "${!models[@]}"; do
    python -m quickvit eval rotation "$out/$name" --data "$data" --batch-size 500 --workers 5 --json \
        > "$out/$name.json" 2>> "$out/$name.log" &
done
wait

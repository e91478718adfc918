#!/usr/bin/env bash
# A small ViT, h8 and i8 trained without labels on blood cells by DINOv2's recipe, one after the other on one GPU; then
# the teachers of all stages, from before the first update on, judged by DinoBloom's protocol, upright and turned.
#
#   benchmarks/study/pbc.sh DATA OUT [options of `quickvit train dinov2`]
#
# DATA has {train,val,test}/CLASS/*. OUT gets for each model a run folder, with the curve of k-NN in metrics.jsonl, and
# beside each teacher step-….hematology.json and step-….rotation.json.
set -euo pipefail
data=$1 out=$2
shift 2
mkdir -p "$out"

recipe=(--preset small --views dinobloom --img-size 96 --patch-size 8 --steps 3000 --cache true
        --run.workers 14 --run.evaluate-every 1000 --run.save-every 1000)
declare -A models=([vit]=baseline_small_patch16_224 [h8]=quickvit_h8_small_patch16_224 [i8]=quickvit_i8_small_patch16_224)

for name in "${!models[@]}"; do
    python -m quickvit train dinov2 --model "${models[$name]}" --data "$data" --out "$out/$name" "${recipe[@]}" "$@" \
        > "$out/$name.log" 2>&1
done

judge() {
    options=(--data "$2" --cache "$3/features" --batch-size 500 --workers 3 --json)
    python -m quickvit eval hematology "$1" "${options[@]}" > "${1%.safetensors}.hematology.json" 2> "${1%.safetensors}.log"
    python -m quickvit eval rotation "$1" --protocol hematology "${options[@]}" \
        > "${1%.safetensors}.rotation.json" 2>> "${1%.safetensors}.log"
}
export -f judge
find "$out" -path '*/teachers/*.safetensors' | xargs -P 4 -I {} bash -c 'judge "$@"' _ {} "$data" "$out"

#!/usr/bin/env bash
# Frozen features on blood cells and road scenes, by every protocol, upright and turned.
#
#   benchmarks/study/frozen.sh PBC CAMVID OUT NAME=MODEL…
#
# PBC has {train,val,test}/CLASS/*, CAMVID images/ and annotations/ with {train,val,test} each. MODEL is the name of an
# untrained model, a checkpoint or a run. Writes OUT/{pbc,camvid}-NAME-PROTOCOL.json.
set -euo pipefail
pbc=$1 camvid=$2 out=$3
shift 3
mkdir -p "$out"

for pair in "$@"; do
    name=${pair%%=*} model=${pair#*=}
    cells=("$model" --data "$pbc" --workers 12 --batch-size 512 --json)
    # A checkpoint knows the size of its images.
    [[ -e $model ]] || cells+=(--img-size 96)
    for protocol in hematology knn linear; do
        python -m quickvit eval $protocol "${cells[@]}" > "$out/pbc-$name-$protocol.json"
    done
    python -m quickvit eval rotation "${cells[@]}" --protocol hematology > "$out/pbc-$name-rotation.json"
    roads=("$model" --data "$camvid" --ignore 11 255 --workers 12 --json)
    python -m quickvit eval segmentation "${roads[@]}" > "$out/camvid-$name-segmentation.json"
    python -m quickvit eval rotation "${roads[@]}" --protocol segmentation > "$out/camvid-$name-rotation.json"
done

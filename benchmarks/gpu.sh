#!/usr/bin/env bash
# The measurements of docs/performance.md, docs/kernels.md and of the report on one GPU, in pieces, since compiling takes minutes.
#
#   benchmarks/gpu.sh OUT PREFIX PIECE…
#
# Writes OUT/PREFIX_PIECE.json, for example benchmarks/h200_model.json. On a machine with a copy of the code but not of its
# history, QUICKVIT_COMMIT says which commit it is. DEPTH is the number of blocks where not all are measured, 8 by default;
# DEPTH= means all. With WARM=1 all pieces are compiled at the same time and nothing is written: PyTorch remembers that.
set -euo pipefail
out=$1 prefix=$2
shift 2

bench() {
    local piece=$1
    shift
    if [ -n "${WARM-}" ]; then
        # Blocks that are compiled one by one are the same in a model of a few.
        case "$*" in *"--compile blocks"*) set -- "$@" --depth 6 ;; esac
        python -m quickvit bench "$@" --repeats 1 > /dev/null &
    else
        python -m quickvit bench "$@" --out "$out/${prefix}_$piece.json"
    fi
}

graphs=(--compile reduce-overhead --repeats 7)
blocks=(--compile blocks --repeats 7)
# Compiling takes longer than measuring; in a model of 8 blocks they still are nearly all of the work.
depth=${DEPTH-8}
fewer=(${depth:+--depth $depth})
for piece in "$@"; do
    case $piece in
        model) bench "$piece" model --sizes large --families d8 h8 i8 --views false "${graphs[@]}" ;;
        eager) bench "$piece" model --sizes large huge --families d8 h8 --views false --compile none --repeats 7 ;;
        launched) bench "$piece" model --sizes large --families d8 h8 --views false "${fewer[@]}" --compile default --repeats 7 ;;
        views) bench "$piece" model --sizes large --families i8 "${fewer[@]}" "${graphs[@]}" ;;
        base) bench "$piece" model --sizes base --families d8 h8 i8 --views false "${fewer[@]}" "${graphs[@]}" ;;
        huge) bench "$piece" model --sizes huge --families d8 h8 i8 --views false "${blocks[@]}" ;;
        giant) bench "$piece" model --sizes giant e --families d8 --views false "${blocks[@]}" ;;
        22b) bench "$piece" model --sizes 22b --depth 2 --families d8 --views false "${graphs[@]}" ;;
        folded_large) bench "$piece" model --sizes large --families d8 h8 --folded true --views false "${graphs[@]}" ;;
        folded_huge) bench "$piece" model --sizes huge --families d8 h8 --folded true --views false "${blocks[@]}" ;;
        folded_giant) bench "$piece" model --sizes giant e --families d8 --folded true --views false "${blocks[@]}" ;;
        folded_22b) bench "$piece" model --sizes 22b --depth 2 --families d8 --folded true --views false "${graphs[@]}" ;;
        block_large) bench "$piece" block --sizes large --families d8 "${graphs[@]}" ;;
        block_huge) bench "$piece" block --sizes huge --families d8 "${graphs[@]}" ;;
        train_large) bench "$piece" train --sizes large --families d8 h8 i8 "${blocks[@]}" ;;
        train_large_graph) bench "$piece" train --sizes large --families d8 "${graphs[@]}" ;;
        train_huge) bench "$piece" train --sizes huge --families d8 h8 i8 "${blocks[@]}" ;;
        train_giant) bench "$piece" train --sizes giant --families d8 "${blocks[@]}" ;;
        dinov2_large) bench "$piece" train --recipe dinov2 --sizes large --families d8 h8 i8 --separate false "${blocks[@]}" ;;
        dinov2_huge) bench "$piece" train --recipe dinov2 --sizes huge --patch 16 --families d8 h8 i8 --separate false "${blocks[@]}" ;;
        packing_launched) bench "$piece" train --recipe dinov2 --batch 8 --sizes large --families h8 --compile none --repeats 7 ;;
        packing_small) bench "$piece" train --recipe dinov2 --batch 8 --sizes large --families h8 "${fewer[@]}" "${graphs[@]}" ;;
        packing) bench "$piece" train --recipe dinov2 --batch 32 --sizes large --families h8 "${fewer[@]}" "${graphs[@]}" ;;
        memory) bench "$piece" memory --sizes large huge giant e --families d8 h8 i8 --compile none ;;
        memory_folded) bench "$piece" memory --sizes large huge giant e --families d8 --folded true --compile none ;;
        memory_22b) bench "$piece" memory --sizes 22b --families d8 --compile none ;;
        memory_compiled) bench "$piece" memory --sizes large huge --families d8 h8 i8 h2 --compile default ;;
        memory_compiled_giant) bench "$piece" memory --sizes giant e --families d8 --compile default ;;
        memory_compiled_22b) bench "$piece" memory --sizes 22b --families d8 --compile default ;;
        operators) bench "$piece" ops --sizes large huge --repeats 5 ;;
        operators_giant) bench "$piece" ops --sizes giant e --repeats 5 ;;
        linear) bench "$piece" linear --groups 8 16 ;;
        gelu) bench "$piece" gelu ;;
        *) echo "unknown piece $piece; see the list in $0" >&2; exit 2 ;;
    esac
done
wait

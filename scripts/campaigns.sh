#!/usr/bin/env bash
# Campaigns: long random checks, each with a seed and a threshold that it asserts. Prints a verdict for each; fails
# if one fails. Needs the environment of scripts/test.sh.
#   scripts/campaigns.sh                    # all of them: hours on two cores
#   scripts/campaigns.sh kills meshes       # these
#   SEED=7 scripts/campaigns.sh integers    # other draws
set -euo pipefail
. "$(dirname "$0")/venv.sh" test
export JAX_PLATFORMS=cpu
SEED=${SEED:-0}

campaign() { # name $1
    local run="python -m tests.campaigns"
    case $1 in
    faults) $run.faults --seed "$SEED" ;;         # what each kind of fault costs; 3,000 hostile inputs
    integers)                                     # no loop is silently counted wrongly
        $run.integers --seed "$SEED" --count 2000 --counter traced &&
            $run.integers --seed "$SEED" --count 500 --counter executed
        ;;
    masks) $run.masks --seed "$SEED" --count 5000 ;; # no attention mask is silently counted wrongly
    grids) $run.grids --seed "$SEED" ;;           # no overhanging block is counted as the model's
    kills) $run.kills --seed "$SEED" --kind loop --kills 200 ;; # goodput within 1% or 0.2 s
    stragglers) $run.stragglers --seed "$SEED" ;; # 95 of 100 named, 1 of 100 falsely
    comparisons) $run.comparisons --seed "$SEED" ;; # 95 of 100 differences of 2% seen, 3 of 100 falsely
    tuning) $run.tuning --seed "$SEED" ;;         # the fastest of a grid within 3%, in 40% of its time
    planted) $run.planted.on_host ;;              # the planted fault is named, its gain within 20%
    meshes) $run.meshes ;;                        # FLOPs of every mesh as counted by hand
    losses) $run.losses ;;                        # three counts equal, losses fall
    models) $run.models ;;                        # every bundled model at full size
    *) echo "campaigns: $1 is none of ${ALL[*]}" >&2 && return 2 ;;
    esac
}

ALL=(faults integers grids masks kills stragglers comparisons tuning planted meshes losses models)
[ $# = 0 ] && set -- "${ALL[@]}"
failed=()
for name in "$@"; do
    echo "== $name"
    campaign "$name" || failed+=("$name")
done
echo "${#failed[@]} of $# campaigns failed: ${failed[*]:-none}"
exit $((${#failed[@]} > 0))

#!/usr/bin/env bash
# Runs a core selection of the tests (counts, instrument, logger, clients) on each Python of this machine
# with each JAX that pip finds for it, and prints a table. Its venvs and logs are kept in .matrix/.
#   scripts/test_matrix.sh                        # every Python × every JAX
#   scripts/test_matrix.sh 3.11-lowest 3.13-0.12  # these; lowest: every requirement at its lower bound
#   scripts/test_matrix.sh --short oldest newest  # fewer tests; newest: on a newer Python than .venv's
set -euo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cpu PIP_DISABLE_PIP_VERSION_CHECK=1

PYTHONS=(3.11 3.12 3.13)
NEWEST=0.12
JAXES=(lowest 0.8.3 0.9.2 0.10.2 0.11 "$NEWEST")
SHORT=(
    tests/util/test_jax_internals.py tests/util/test_optional_deps.py tests/test_flags.py
    tests/instrumentation/test_instrumented_step.py tests/logger/test_metric_logger.py
    tests/logger/sinks tests/logger/timing
    tests/flops/traced/{test_counting,test_module_table,control_flow/test_control_flow}.py
    tests/flops/traced/masks/test_{adversary_masks,masks}.py
    tests/flops/executed/{attribution/test_replication,resharding/test_specs}.py
)
CORE=(
    tests/util/test_jax_internals.py tests/util/test_optional_deps.py tests/test_flags.py
    tests/instrumentation tests/logger tests/clients tests/flops/traced tests/flops/executed
    tests/flops/test_{attention_kernels,masks,three_counts}.py tests/hardware
)

find_python() { # version $1, on the PATH or from pyenv
    local python
    for python in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
        "$python" -c 'import sys; sys.exit(sys.version.split()[0].rsplit(".", 1)[0] != sys.argv[1])' \
            "$1" 2>/dev/null && echo "$python" && return
    done
}

requirements() { # for JAX $1
    case $1 in
    lowest) sed -n '/install_requires=\[/,/\]/s/.*"\(.*\)>=\(.*\)".*/\1==\2/p; /^FLAX/,/\]/s/.*"\(.*\)>=\(.*\)".*/\1==\2/p' setup.py ;;
    *) echo "jax==$1.*" ;;
    esac
}

install() { # venv $1 with Python $2 and JAX $3
    local wanted
    wanted="$(cksum <setup.py) $PWD $(requirements "$3" | cksum)"
    [ "$(cat "$1/.installed" 2>/dev/null)" = "$wanted" ] && return
    rm -rf "$1"
    # shellcheck disable=SC2046
    "$2" -m venv "$1" && "$1/bin/python" -m pip install -qq -e ".[test-core]" $(requirements "$3") &&
        echo "$wanted" >"$1/.installed"
}

versions() { "$1/bin/python" -c 'import jax, flax; print(jax.__version__, flax.__version__)'; }

run() { # pair $1, such as 3.11-0.8.3; prints its row
    local venv=".matrix/$1" log=".matrix/$1.log" python jax flax count status=0
    python=$(find_python "${1%%-*}")
    if [ -z "$python" ]; then
        printf "%-8s %-8s Python is not on this machine\n" "${1%%-*}" "${1#*-}"
    elif ! install "$venv" "$python" "${1#*-}" 2>"$log"; then
        printf "%-8s %-8s pip finds none; see %s\n" "${1%%-*}" "${1#*-}" "$log"
    else
        read -r jax flax < <(versions "$venv")
        "$venv/bin/python" -m pytest --full -n auto -p no:cacheprovider "${tests[@]}" >"$log" 2>&1 || status=$?
        count() { tail -1 "$log" | sed -nE "s/.*[^0-9]?\b([0-9]+) $1.*/\1/p"; }
        printf "%-8s %-8s %-8s %7s %7s %7s %7s" "${1%%-*}" "$jax" "$flax" "$(count passed)" \
            "$(count failed)" "$(count skipped)" "$(tail -1 "$log" | sed -nE 's/.* in ([0-9]+).*/\1/p')"
        [ $status = 0 ] && echo || { printf "  see %s\n" "$log" && grep -E "^(FAILED|ERROR)" "$log"; }
    fi
    return $status
}

newest() { # this machine's newest Python with the newest JAX, if newer than .venv's
    local version found=""
    for version in "${PYTHONS[@]}"; do
        .venv/bin/python -c 'import sys; v = sys.argv[1].split("."); sys.exit(
            sys.version_info[:2] >= tuple(map(int, v)))' "$version" 2>/dev/null &&
            [ -n "$(find_python "$version")" ] && found=$version
    done
    echo "${found:+$found-$NEWEST}"
}

tests=("${CORE[@]}")
pairs=()
for argument in "$@"; do
    case $argument in
    --short) tests=("${SHORT[@]}") ;;
    oldest) pairs+=("${PYTHONS[0]}-lowest") ;;
    newest) for pair in $(newest); do pairs+=("$pair"); done ;;
    *) pairs+=("$argument") ;;
    esac
done
if [ $# = 0 ]; then
    for version in "${PYTHONS[@]}"; do pairs+=("${JAXES[@]/#/$version-}"); done
fi

mkdir -p .matrix
failures=0
printf "%-8s %-8s %-8s %7s %7s %7s %7s\n" Python jax flax passed failed skipped seconds
for pair in "${pairs[@]}"; do run "$pair" || failures=$((failures + 1)); done
exit $((failures > 0))

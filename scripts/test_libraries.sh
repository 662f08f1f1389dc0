#!/usr/bin/env bash
# Runs the tests of mfu_jax.integrations, each with the real library in a venv of its own under .matrix/, because they
# pin other versions of JAX. scripts/test.sh --full runs it last.
#   scripts/test_libraries.sh           # all of them
#   scripts/test_libraries.sh maxtext   # this one
set -euo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cpu PIP_DISABLE_PIP_VERSION_CHECK=1 UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1

# name, oldest Python, its tests; then what pip installs. brax calls jax.device_put_replicated, which JAX 0.9 dropped.
ROWS=(
    "actors  3.11 brax,keras,clu  brax==0.14.2 keras==3.15.1 clu==0.0.12 tensorflow-cpu tensorboard jax==0.8.3"
    "kauldron 3.11 kauldron      kauldron==1.4.2"
    "tunix   3.11 tunix           google-tunix==0.1.7"
    "levanter 3.11 levanter      levanter==1.2.dev1644 gitpython chex"
    "easydel 3.11 easydel        easydel==0.3.0 pillow torch==2.13.0"
    "maxtext 3.12 maxtext         maxtext[tpu]==0.2.5"
)

find_python() { # version $1 or newer
    local minor python
    for minor in 11 12 13; do
        [ "$minor" -ge "${1#3.}" ] || continue
        for python in "python3.$minor" "$HOME"/.pyenv/versions/3."$minor".*/bin/python; do
            "$python" -c 'import sys' 2>/dev/null && echo "$python" && return
        done
    done
}

run() { # row $1
    local name python tests requirements venv log wanted files
    read -r name python tests requirements <<<"$1"
    venv=.matrix/$name log=.matrix/$name.log wanted="$(cksum <setup.py) $PWD $requirements"
    python=$(find_python "$python") || true
    [ -n "$python" ] || { echo "$name: skipped, no Python new enough on this machine" && return; }
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
        # shellcheck disable=SC2046,SC2086
        rm -rf "$venv" && "$python" -m venv "$venv" &&
            # pip takes half an hour to choose versions, but knows where this machine has CPU builds of torch.
            "$venv/bin/python" -m pip install -qq uv $(grep -o 'torch==[^ ]*' <<<"$requirements") &&
            "$venv/bin/uv" pip install -q --python "$venv/bin/python" -e ".[test-core]" $requirements 2>"$log" &&
            echo "$wanted" >"$venv/.installed"
    fi
    IFS=, read -ra files <<<"$tests"
    files=("${files[@]/#/tests/integrations/test_}")
    files=("${files[@]/%/.py}")
    KERAS_BACKEND=jax "$venv/bin/python" -m pytest --full -q -p no:cacheprovider -W ignore::DeprecationWarning \
        "${files[@]}" 2>&1 | sed "s/^/$name: /" | tail -40
}

mkdir -p .matrix
failed=()
for row in "${ROWS[@]}"; do
    [ $# = 0 ] || [[ " $* " == *" ${row%% *} "* ]] || continue
    run "$row" || failed+=("${row%% *}")
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2 && exit 1; }

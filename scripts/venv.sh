# Sourced by the other scripts: creates .venv if it is missing, installs mfu_jax into it with the
# extras given as arguments, and activates it. Reinstalls only if setup.py has changed.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

make_venv() {
    local extras="$1" python stamp wanted
    for python in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [ -n "$python" ] && command -v "$python" >/dev/null &&
            "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
        python=""
    done
    if [ -z "$python" ]; then
        echo "Python 3.11 or newer is needed and was not found; set PYTHON=/path/to/python3.11" >&2
        return 1
    fi
    [ -x .venv/bin/python ] || "$python" -m venv .venv || return 1
    stamp=".venv/.installed-$(echo "$extras" | tr ',' '-')"
    wanted="$(cksum <setup.py) $PWD"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing mfu_jax[$extras] into .venv …" >&2
        .venv/bin/python -m pip install -qq --disable-pip-version-check -e ".[$extras]" || return 1
        echo "$wanted" >"$stamp"
    fi
}

make_venv "${1:-train}" || exit 1
# shellcheck disable=SC1091
. .venv/bin/activate

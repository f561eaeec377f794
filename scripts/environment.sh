# Sourced by the scripts beside it: makes a virtual environment with this package in it, once per change of pyproject.toml.

TORCH_VERSION=2.13.0

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer is needed (on Debian or Ubuntu: apt-get install python3 python3-venv)." >&2
    return 1
}

# make_environment FOLDER NAME REQUIREMENT: an editable install of REQUIREMENT ('.[extras]') after torch, so that no other build of torch
# is chosen for it. Where pip is told (by its own configuration) to take packages from elsewhere, it does.
make_environment() {
    local folder=$1 name=$2 requirement=$3 python stamp wanted
    stamp=$folder/safehold.stamp
    wanted="$PWD $name torch==$TORCH_VERSION $requirement $(cksum <pyproject.toml)"
    if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python)
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "Python's venv module is missing (on Debian or Ubuntu: apt-get install python3-venv)." >&2
        return 1
    fi
    echo "Installing into $folder (the first time takes a few minutes, most of it PyTorch) ..."
    rm -rf "$folder"
    "$python" -m venv "$folder"
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check)
    local quiet=(--quiet --quiet)
    if [ -t 1 ]; then quiet=(); fi
    "${pip[@]}" install "${quiet[@]}" "torch==$TORCH_VERSION"
    "${pip[@]}" install "${quiet[@]}" --editable "$requirement"
    echo "$wanted" >"$stamp"
}

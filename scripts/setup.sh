# Sourced by quickstart.sh and test.sh: makes .venv and installs the given requirements file into it, once.
# Usage: source scripts/setup.sh requirements.txt
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11, 3.12 or 3.13 found; install one, or name it: PYTHON=/path/to/python3.12 bash $0" >&2
    return 1
}

setup_environment() {
    local requirements=$1 stamp python
    # The stamp holds what was installed, so a changed requirements file installs again and an unchanged one is free.
    stamp=.venv/installed-$(basename "$requirements")
    if ! [ -x .venv/bin/python ]; then
        python=$(find_python) || return 1
        echo "setup: making .venv with $("$python" --version)"
        "$python" -m venv .venv || return 1
    fi
    if ! cat requirements.txt "$requirements" | cmp -s - "$stamp"; then
        echo "setup: installing $requirements into .venv (a few minutes the first time)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$requirements" || return 1
        cat requirements.txt "$requirements" >"$stamp"
    fi
}

setup_environment "${1:-requirements.txt}" || exit 1

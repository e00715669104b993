#!/usr/bin/env bash
# Sets up .venv with everything the tests need, then runs pytest. Arguments go to pytest: bash scripts/test.sh -m slow
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" requirements-dev.txt
if [ $# -eq 0 ]; then
    set -- -n auto --maxprocesses 8 -m "not slow and not gpu"
fi
exec .venv/bin/python -m pytest "$@"

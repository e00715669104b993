#!/usr/bin/env bash
# From a fresh clone to the table and the figures in results/quickstart: bash scripts/quickstart.sh [--fast] [key=value ...]
# Sets up .venv, then runs scripts/reproduce.py experiment=quickstart. --fast: fewer steps, under ten minutes.
set -euo pipefail
arguments=(experiment=quickstart)
for argument in "$@"; do
    case $argument in
        --fast) arguments+=(fast=true) ;;
        *) arguments+=("$argument") ;;
    esac
done
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" requirements.txt
exec .venv/bin/python scripts/reproduce.py "${arguments[@]}"

#!/usr/bin/env bash
# What only a GPU can show, in a few minutes, with torch and this repository alone: no network, no download.
#   bash tests/gpu/check.sh            on a GPU
#   bash tests/gpu/check.sh --cpu      the script itself, on tiny shapes, where there is none
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" tests/gpu/check.py "$@"

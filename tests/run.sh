#!/usr/bin/env bash
# Sets up and runs the whole test suite. Arguments go to pytest: bash tests/run.sh -k layout
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/setup.sh"
setup_environment "$root" test
cd "$root"
echo "== pytest $*"
exec "$root/.venv/bin/python" -m pytest "$@"

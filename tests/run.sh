#!/usr/bin/env bash
# Sets up and runs the whole test suite. Arguments go to pytest: bash tests/run.sh -k layout
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/setup.sh"
setup_environment "$root" test
cd "$root"
# one process a core, one thread each; more than four would want memory, not time
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run=("$root/.venv/bin/python" -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal)
if [ $# -eq 0 ] && has_gpu; then
    echo "== pytest, first without the GPU, then what needs it"
    "${run[@]}"
    exec "${run[@]}" -m "gpu or gpu2"
fi
echo "== pytest $*"
exec "${run[@]}" "$@"

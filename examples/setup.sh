# Sourced by demo.sh and tests/run.sh: a virtual environment in .venv with this checkout installed. Runs twice harmlessly.
# usage: setup_environment ROOT [EXTRA]    (EXTRA: an extra of pyproject.toml)

has_gpu() {
    nvidia-smi -L > /dev/null 2>&1
}

setup_environment() {
    local root=$1 extra=${2:-} python pins stamp
    local target="$root${extra:+[$extra]}"
    python=$(command -v python3.11 || command -v python3) || {
        echo "error: no python3 found; install Python 3.11 or newer." >&2
        return 1
    }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $python is $("$python" --version 2>&1); Python 3.11 or newer is needed." >&2
        return 1
    }
    pins=$(cat "$root/constraints.txt")
    if has_gpu; then
        # what the kernels were measured with, and a NumPy that the interpreter of that Triton knows
        pins=$(sed 's/^torch==.*/torch==2.11.0/; s/^triton.*/triton==3.6.0/; s/^numpy==.*/numpy==2.3.5/' <<< "$pins")
    fi
    stamp=$(cat "$root/pyproject.toml" - <<< "$pins" | cksum | cut -d ' ' -f 1)
    if [ -f "$root/.venv/$stamp${extra:+-$extra}" ] && [ -x "$root/.venv/bin/python" ]; then
        echo "== using the environment in .venv"
        return 0
    fi
    echo "== making a virtual environment in .venv with $python"
    "$python" -m venv "$root/.venv" || {
        echo "error: python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
        return 1
    }
    echo "== installing turbo_hf${extra:+ with its extra \"$extra\"} (torch is 0.2 GB for a CPU, and 3 GB with CUDA)"
    echo "$pins" > "$root/.venv/constraints.txt"
    # what is never imported need not be compiled
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$root/.venv/constraints.txt" --editable "$target" || {
        echo "error: pip could not install the packages; see its message above." >&2
        return 1
    }
    touch "$root/.venv/$stamp${extra:+-$extra}"
}

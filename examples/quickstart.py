"""Generate on a compressed KV cache: one call to patch, one to take it off. Run from the repository's root."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import turbo_hf

NAME = "examples/lab-llama-4m"


def main() -> None:
    """Find a number in a long text, and say what the cache took."""
    tokenizer = AutoTokenizer.from_pretrained(NAME, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(NAME, dtype="auto")
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    secret = "The pass key is 25025. Remember it. 25025 is the pass key.\n"
    prompt = filler * 20 + secret + filler * 20 + "What is the pass key? The pass key is"
    inputs = tokenizer(prompt, return_tensors="pt")
    with turbo_hf.patch(model) as handle:
        reply = model.generate(**inputs, max_new_tokens=8)
        memory = handle.memory()
    print(tokenizer.decode(reply[0, inputs.input_ids.shape[1] :]))
    print(f"{memory.tokens} tokens in {memory.total} bytes: {memory.compression:.2f} times smaller")


if __name__ == "__main__":
    main()

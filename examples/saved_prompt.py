"""Compute a long prompt once, save its compressed cache, and ask about it later. Run from the repository's root."""

import copy
import tempfile
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import turbo_hf
from turbo_hf.models.versions import CACHE

NAME = "examples/lab-llama-4m"


def main() -> None:
    """Save the cache of a text, as one process would, and load it for two questions, as another one would."""
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    model: Any = AutoModelForCausalLM.from_pretrained(NAME, dtype="auto")
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    text = filler * 10 + "The pass key is 25025. Remember it. 25025 is the pass key.\n" + filler * 10
    with turbo_hf.patch(model) as handle, tempfile.TemporaryDirectory() as folder:
        cache = handle.new_cache()
        # CACHE: the argument's name, "cache" from transformers 5.24 on, "past_key_values" before
        model(**tokenizer(text, return_tensors="pt"), **{CACHE: cache}, logits_to_keep=1)
        cache.save_pretrained(folder)
        saved = turbo_hf.TurboCache.from_pretrained(folder, model)
        for question in ("What is the pass key? The pass key is", "Remember the pass key:"):
            inputs = tokenizer(text + question, return_tensors="pt")
            # all of the tokens, of which the saved ones are compared; a copy, as the answer joins the cache
            reply = model.generate(**inputs, **{CACHE: copy.deepcopy(saved)}, max_new_tokens=8, do_sample=False)
            print(question, tokenizer.decode(reply[0, inputs.input_ids.shape[1] :]))


if __name__ == "__main__":
    main()

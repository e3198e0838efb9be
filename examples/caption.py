"""Describe a picture on a compressed KV cache: python examples/caption.py MODEL PICTURE ["What is in it?"]

MODEL: a folder or Hub id of a class that sees images, such as Qwen/Qwen2.5-VL-3B-Instruct.
"""

import sys
from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForImageTextToText, AutoProcessor

import turbo_hf


def caption(model: Any, inputs: Mapping[str, Any], preset: str | dict[str, Any] = "turbo4", new: int = 64) -> Any:
    """Tokens [1, prompt and answer]. inputs: of the model's processor, with the picture in them."""
    with turbo_hf.patch(model, preset) as handle:
        tokens = model.generate(**inputs, max_new_tokens=new, do_sample=False)
        print(handle.memory(), file=sys.stderr)
    return tokens


def main(name: str, picture: str, question: str = "Describe the picture.") -> None:
    """Print the answer."""
    processor: Any = AutoProcessor.from_pretrained(name)
    model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto", device_map="auto")
    content = [{"type": "image", "url": picture}, {"type": "text", "text": question}]
    shown = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template([{"role": "user", "content": content}], **shown).to(model.device)
    reply = caption(model, inputs)[:, inputs["input_ids"].shape[1] :]
    print(processor.batch_decode(reply, skip_special_tokens=True)[0])


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])

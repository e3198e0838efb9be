"""`turbo-hf generate`: text from a patched model, streamed."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbo_hf.console import (
    Calibration,
    ConfigName,
    Device,
    GgufFile,
    Json,
    fail,
    load_model,
    load_tokenizer,
    mistakes_end_the_command,
    processes,
)

if TYPE_CHECKING:
    from turbo_hf.cache.turbo_cache import TurboCache
    from turbo_hf.config.turbo_config import TurboConfig

LEAST_TEMPERATURE = 1e-6
"""Below it an answer is greedy, its limit: scores divided by less overflow float32."""


def generate_command(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue; -: standard input, less one line end.")],
    config: ConfigName = None,
    calibration: Calibration = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of the reply.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy; above: sample. Default: as the model's generation config says.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=(1 << 32) - 1, help="Random seed of sampling.")] = None,
    gguf_file: GgufFile = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Continue a prompt on a compressed KV cache: the text is streamed as it is generated."""
    if processes()[1] > 1 and prompt == "-":
        raise fail("under torchrun the processes share no standard input: write the prompt behind the model.")
    import torch  # noqa: PLC0415
    from transformers import set_seed  # noqa: PLC0415

    from turbo_hf.errors import out_of_memory  # noqa: PLC0415
    from turbo_hf.patching.patch_model import patch  # noqa: PLC0415
    from turbo_hf.ranks import ranks_of  # noqa: PLC0415

    with mistakes_end_the_command():
        options = {"max_new_tokens": max_new_tokens, **_sampling(temperature)}
        chosen, text = chosen_config(config, calibration), _text(prompt)
        tokenizer = load_tokenizer(model, gguf_file=gguf_file)
        loaded = load_model(model, device, gguf_file=gguf_file)
        # a checkpoint's generation config may choose what one streamed reply on a compressed cache does not support
        loaded.generation_config.update(use_cache=True, cache_implementation=None, num_beams=1, num_return_sequences=1)
        try:
            with patch(loaded, chosen, calibration=calibration) as handle:
                resolved = handle.report().config.to_dict()
                # ranks that sample must draw alike
                ranks = ranks_of(loaded)
                if seed is not None or ranks:
                    set_seed(int(ranks.most(torch.randint(1 << 31, (1,)))) if seed is None else seed)
                cache = handle.new_cache()
                reply = _continue(loaded, tokenizer, tokenizer(text)["input_ids"], cache, options)
                taken = cache.memory()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise fail(f"the memory of {loaded.device} is full. Take a shorter prompt or fewer bits.") from error
    if json_line:
        facts = {"model": model, "device": str(loaded.device), "dtype": str(loaded.dtype), "config": resolved}
        facts["memory"] = {"tokens": taken.tokens, "bytes": taken.all_ranks, "compression": taken.compression}
        print(json.dumps({**facts, "reply": reply}), flush=True)  # noqa: T201


def chosen_config(name: str | None, calibration: str) -> "TurboConfig":
    """What --preset and --calibration choose. ValueError or OSError: no config, or one that has no use for the
    calibration that is named."""
    from turbo_hf.calibration.choice import uses_calibration  # noqa: PLC0415
    from turbo_hf.config.turbo_config import BY_CALIBRATION, DEFAULT_PRESET, resolve_config  # noqa: PLC0415

    chosen = resolve_config(name or (DEFAULT_PRESET if calibration == "auto" else BY_CALIBRATION))
    if calibration != "auto" and not uses_calibration(chosen):
        raise ValueError(f"--calibration {calibration}: {name} takes nothing from a calibration.")
    return chosen


def _sampling(temperature: float | None) -> dict[str, Any]:
    """Options of `generate`; none where the model's own generation config decides. ValueError: no temperature."""
    if temperature is None:
        return {}
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"the temperature must be 0 (greedy) or a number above; got {temperature}.")
    if temperature < LEAST_TEMPERATURE:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature}


def _text(prompt: str) -> str:
    """What is to be continued. ValueError: it is not UTF-8 text."""
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        # bytes of other encodings come as lone surrogates
        text.encode()
    except UnicodeError as error:
        raise ValueError("the prompt is not UTF-8 text. Convert it first.") from error
    return text


def _continue(
    model: Any, tokenizer: Any, ids: list[int], cache: "TurboCache", options: dict[str, Any]
) -> dict[str, Any]:
    """Stream what follows these tokens to stdout; the text without special tokens, and figures, for JSON.

    Raises:
        ValueError: there are no tokens.
    """
    import torch  # noqa: PLC0415
    from transformers import TextStreamer  # noqa: PLC0415

    from turbo_hf.models.versions import CACHE  # noqa: PLC0415

    if not ids:
        raise ValueError("the prompt has no tokens: there is nothing to continue.")
    began = time.perf_counter()
    tokens = torch.tensor([ids], device=model.device)
    spoken = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        # for stop strings
        tokenizer=tokenizer,
        pad_token_id=tokenizer.pad_token_id,
        **options,
        **{CACHE: cache},
    )
    new = spoken[0, len(ids) :].tolist()
    figures = {"prompt_tokens": len(ids), "new_tokens": len(new), "seconds": round(time.perf_counter() - began, 3)}
    return {"text": tokenizer.decode(new, skip_special_tokens=True), **figures}

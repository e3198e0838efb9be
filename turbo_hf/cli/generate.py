"""`turbo-hf generate`: text from a patched model, streamed."""

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbo_hf.console import Device, GgufFile, Json, err, fail, load_model, load_tokenizer, processes

if TYPE_CHECKING:
    from turbo_hf.cache.memory import Memory
    from turbo_hf.cache.turbo_cache import TurboCache
    from turbo_hf.config.turbo_config import TurboConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


def generate_command(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id.")],
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; -: standard input, less one line end. None: see --chat."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Answer through the model's chat template; without a prompt, line after line."),
    ] = False,
    config: Annotated[
        str | None,
        typer.Option("--preset", "--config", help="A preset, or a JSON or YAML file of options; default: turbo4."),
    ] = None,
    calibration: Annotated[
        str, typer.Option(help="A folder or Hub id, for its widths or for --preset; auto: beside the checkpoint.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per reply.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy; above: sample. Default: as the model's generation config says.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=(1 << 32) - 1, help="Random seed of sampling.")] = None,
    gguf_file: GgufFile = None,
    device: Device = "auto",
    dtype: Annotated[
        str, typer.Option(help=f"{', '.join(DTYPES)}; auto: the checkpoint's, of a GGUF file float32.")
    ] = "auto",
    memory: Annotated[bool, typer.Option("--memory", help="Say last, on stderr, what the cache took.")] = False,
    json_line: Json = False,
) -> None:
    """Continue a prompt, or chat, on a compressed KV cache: the text is streamed as it is generated."""
    if prompt is None and not chat:
        raise fail("there is no prompt: write it behind the model, or - for standard input, or chat with --chat.")
    if dtype not in DTYPES:
        raise fail(f"unknown dtype {dtype}; choose from {', '.join(DTYPES)}.")
    if processes()[1] > 1 and (prompt is None or prompt == "-"):
        raise fail("under torchrun the processes share no standard input: write the prompt behind the model.")
    import torch  # noqa: PLC0415
    from transformers import set_seed  # noqa: PLC0415

    from turbo_hf.errors import out_of_memory  # noqa: PLC0415
    from turbo_hf.patching.patch_model import patch  # noqa: PLC0415
    from turbo_hf.ranks import ranks_of  # noqa: PLC0415

    try:
        options = {"max_new_tokens": max_new_tokens, **_sampling(temperature)}
        chosen = _config(config, calibration)
        tokenizer = load_tokenizer(model, gguf_file=gguf_file)
        if chat and not tokenizer.chat_template:
            raise ValueError(f"{model} has no chat template. Without --chat, it continues the prompt as plain text.")
        loaded = load_model(model, device, dtype=dtype, gguf_file=gguf_file)
        # a checkpoint's generation config may choose what one streamed reply on a compressed cache does not support
        loaded.generation_config.update(use_cache=True, cache_implementation=None, num_beams=1, num_return_sequences=1)
        with patch(loaded, chosen, calibration=calibration) as handle:
            resolved = handle.report().config.to_dict()
            # ranks that sample must draw alike
            ranks = ranks_of(loaded)
            if seed is not None or ranks:
                set_seed(int(ranks.most(torch.randint(1 << 31, (1,)))) if seed is None else seed)
            replies: list[dict[str, Any]] = []
            taken = handle.new_cache().memory()
            for ids in _prompts(prompt, tokenizer, replies, chat):
                cache = handle.new_cache()
                replies.append(_continue(loaded, tokenizer, ids, cache, options))
                taken = cache.memory()
    except BrokenPipeError:
        # the reader of stdout has closed it (`| head`); click ends the command silently
        raise
    except (ValueError, OSError) as error:
        raise fail(str(error)) from error
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise fail(f"the memory of {loaded.device} is full. Take a shorter prompt or fewer bits.") from error
    if memory:
        err.print(_line(taken), markup=False, highlight=False, soft_wrap=True)
    if json_line:
        facts = {"model": model, "device": str(loaded.device), "dtype": str(loaded.dtype), "config": resolved}
        facts["memory"] = {"tokens": taken.tokens, "bytes": taken.all_ranks, "compression": taken.compression}
        print(json.dumps({**facts, "replies": replies}), flush=True)  # noqa: T201


def _config(name: str | None, calibration: str) -> "TurboConfig":
    """ValueError or OSError: no config, or one that has no use for the calibration that is named."""
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
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature}


def _prompts(prompt: str | None, tokenizer: Any, replies: list[dict[str, Any]], chat: bool) -> Iterator[list[int]]:
    """Tokens of what is to be answered, in a chat after all before it and their replies.

    Raises:
        ValueError: it is not UTF-8 text, or the chat template refuses it.
    """
    said: list[dict[str, str]] = []
    for text in _texts(prompt):
        if not chat:
            yield tokenizer(text)["input_ids"]
            continue
        said.append({"role": "user", "content": text})
        try:
            ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # a template is the model's own code, and may raise anything
            raise ValueError(f"the chat template of this model refuses the conversation: {error}") from error
        yield ids
        said.append({"role": "assistant", "content": replies[-1]["text"]})


def _texts(prompt: str | None) -> Iterator[str]:
    """What is to be answered. ValueError: it is not UTF-8 text."""
    try:
        for text in _typed(prompt):
            # bytes of other encodings come as lone surrogates
            text.encode()
            yield text
    except UnicodeError as error:
        raise ValueError("the prompt is not UTF-8 text. Convert it first.") from error


def _typed(prompt: str | None) -> Iterator[str]:
    """The one prompt, or each line that is typed."""
    if prompt is not None:
        yield sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        return
    by_hand = sys.stdin.isatty() and sys.stdout.isatty()
    if by_hand:
        err.print("A line is a message. Ctrl-D ends the conversation.", style="dim")
    while True:
        try:
            line = input("> " if by_hand else "")
        except EOFError:
            return
        if line.strip():
            yield line


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


def _line(taken: "Memory") -> str:
    size = f"{taken.tokens:,} tokens in {taken.all_ranks:,} bytes"
    return f"KV cache: {size}, {taken.compression:.2f} x less than in {taken.dtype}."

"""`turbo-hf serve`: an OpenAI-compatible server with a compressed cache and continuous batching."""

import contextlib
import importlib.util
import ipaddress
import logging
import socket
from typing import Annotated

import typer

from turbo_hf.cli.generate import chosen_config
from turbo_hf.console import Calibration, ConfigName, Device, GgufFile, err, fail, load, mistakes_end_the_command

NEEDED = ("fastapi", "uvicorn", "openai")
OLDEST = "5.20"
"""The first version of Transformers whose server takes what is passed to it."""

CPU_POOL = 65536


def serve_command(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id; clients name it so.")],
    config: ConfigName = None,
    calibration: Calibration = "auto",
    host: Annotated[str, typer.Option(help="Address to listen at; there is no password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 8000,
    pool: Annotated[
        int | None,
        typer.Option(min=1, help=f"Tokens of the cache; default: as a GPU's memory allows, {CPU_POOL} on a CPU."),
    ] = None,
    gguf_file: GgufFile = None,
    device: Device = "auto",
) -> None:
    """Serve a model by the OpenAI API (chat completions, completions, responses) on a compressed KV cache."""
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise fail(f'serve needs {", ".join(lacking)}: pip install "turbo_hf[serve]".')
    import transformers  # noqa: PLC0415
    from packaging.version import Version  # noqa: PLC0415

    if Version(transformers.__version__) < Version(OLDEST):
        raise fail(
            f"serve needs transformers {OLDEST} or newer, and {transformers.__version__} is installed: pip install "
            "--upgrade transformers."
        )
    with mistakes_end_the_command():
        chosen = chosen_config(config, calibration)
    listener = _listen(host, port)
    import uvicorn  # noqa: PLC0415

    from turbo_hf.cli.server import Meter, Requests, app_of  # noqa: PLC0415
    from turbo_hf.patching.patch_model import patch  # noqa: PLC0415

    # a line per request, and one per field that is refused below
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)
    loaded, tokenizer = load(model, device, gguf_file=gguf_file)
    if pool is None and loaded.device.type == "cpu":
        pool = CPU_POOL
    with mistakes_end_the_command(), patch(loaded, chosen, calibration=calibration):
        requests = Requests(loaded, pool)
        for option in requests.left_out:
            _say(f"not followed: {option} of the model's generation config, which continuous batching does not know.")
        if loaded.device.type == "cuda":
            _say("first requests of its own: kernels compile, and steps are captured.")
            requests.warm()
        meter = Meter(requests)
        meter.start()
        where = ":".join(str(part) for part in listener.getsockname()[:2])
        _say(f"serving {model} at http://{where}/v1, up to {requests.longest} tokens a request; end with Ctrl+C.")
        app = app_of(loaded, tokenizer, model, requests)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
        meter.stop()


def _say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _listen(host: str, port: int) -> socket.socket:
    """A socket, before the model is loaded. Exit with a sentence if there can be none."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise fail(
            f"cannot listen at {host}, port {port}: {error.strerror}. Choose another --host or --port."
        ) from error
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        _say("warning: whoever reaches this address may use the server, without a password.")
    return listener

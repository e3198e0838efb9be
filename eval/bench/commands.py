"""The sub-commands of `turbo-hf bench`."""

import typer

from turbo_hf.console import fail, processes
from turbo_hf.eval.bench.decode import decode_command
from turbo_hf.eval.bench.generate import generate_command
from turbo_hf.eval.bench.prefill import prefill_command
from turbo_hf.eval.bench.replay import replay_command
from turbo_hf.eval.bench.serve import serve_command

bench = typer.Typer(help="Speed and error of attention, on shapes of real models.", no_args_is_help=True)


@bench.callback()
def options(context: typer.Context) -> None:
    """Speed and error of attention, on shapes of real models."""
    if processes()[1] > 1 and context.invoked_subcommand != "generate":
        raise fail(f"bench {context.invoked_subcommand} runs in one process; start it without torchrun.")


bench.command("generate")(generate_command)
bench.command("prefill")(prefill_command)
bench.command("decode")(decode_command)
bench.command("serve")(serve_command)
bench.command("replay")(replay_command)

"""`python -m turbo_hf`: the command line, where the `turbo-hf` script is not on the path."""

from turbo_hf.cli.main import app

app(prog_name="turbo-hf")

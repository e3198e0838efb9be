"""The command line `turbo-hf`: `main` has its commands, and each other module one of them."""

from turbo_hf.cli.main import app as app

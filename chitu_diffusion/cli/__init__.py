"""The `chitu-diffusion` command."""

from __future__ import annotations

import logging
import os
import sys

import typer

from chitu_diffusion.cli.generate import generate
from chitu_diffusion.cli.serve import serve
from chitu_diffusion.errors import ChituError, ConfigError, InvalidRequestError

_INTERRUPTED = 130
"""What typer exits with after Ctrl-C."""

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Generate videos with diffusion transformers, here or on a server.",
)
app.command()(generate)
app.command()(serve)


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage or request, 130 interrupted."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        app(standalone_mode=True)
    except (InvalidRequestError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except ChituError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except SystemExit as ended:
        if ended.code != _INTERRUPTED:
            raise
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(_INTERRUPTED)  # raising would wait for threads that still read weights

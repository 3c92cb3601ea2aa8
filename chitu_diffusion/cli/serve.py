"""`chitu-diffusion serve`: the four services as processes on this machine."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from chitu_diffusion import config as configuration


def serve(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides, e.g. models=tiny-wan.")
    ] = None,
) -> None:
    """Run encoder, DiT, VAE and orchestrator until Ctrl-C."""
    from chitu_diffusion import launch

    logging.getLogger().setLevel(logging.INFO)

    def on_ready(addresses: dict[str, str]) -> None:
        for name, address in addresses.items():
            typer.echo(f"{name:<14}{address}")
        typer.echo("ready")

    config = configuration.load(overrides or [])
    logging.getLogger(__name__).info("configuration:\n%s", configuration.to_yaml(config))
    raise typer.Exit(launch.serve(config, overrides or [], on_ready))

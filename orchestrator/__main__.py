"""`python -m orchestrator [hydra overrides]`: the orchestrator as a process."""

from __future__ import annotations

import sys

from chitu_diffusion.config.schema import Config
from chitu_diffusion.rpc.server import Service, run


def make_service(config: Config) -> Service:
    """Import the room once the configuration is known to be right: its libraries take seconds."""
    from orchestrator.host import OrchestratorHost

    return OrchestratorHost(config)


if __name__ == "__main__":
    sys.exit(run(make_service))

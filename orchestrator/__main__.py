"""`python -m orchestrator [hydra overrides]`: the orchestrator as a process."""

import sys

from chitu_diffusion.rpc.server import run

if __name__ == "__main__":
    sys.exit(run("orchestrator.host:OrchestratorHost"))

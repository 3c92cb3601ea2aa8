"""`python -m orchestrator [hydra overrides]`."""

from chitu_diffusion.rpc.server import run
from orchestrator.host import OrchestratorHost

if __name__ == "__main__":
    raise SystemExit(run(OrchestratorHost))

"""`python -m services.dit`: the DiT service as a process; arguments are hydra overrides."""

from __future__ import annotations

from chitu_diffusion.rpc.server import run
from services.dit.host import DitHost

if __name__ == "__main__":
    raise SystemExit(run(DitHost))

"""`python -m services.dit [hydra overrides]`: the DiT service as a process."""

import sys

from chitu_diffusion.rpc.server import run

if __name__ == "__main__":
    sys.exit(run("services.dit.host:DitHost"))

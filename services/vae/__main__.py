"""`python -m services.vae [overrides]`: the VAE as a process."""

import sys

from chitu_diffusion.rpc.server import run
from services.vae.host import VaeHost

if __name__ == "__main__":
    sys.exit(run(VaeHost))

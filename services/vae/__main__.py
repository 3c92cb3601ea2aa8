"""`python -m services.vae [hydra overrides]`: the VAE as a process."""

import sys

from chitu_diffusion.rpc.server import run

if __name__ == "__main__":
    sys.exit(run("services.vae.host:VaeHost"))

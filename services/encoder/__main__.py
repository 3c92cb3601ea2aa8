"""`python -m services.encoder [hydra overrides]`: the text encoder as a process."""

import sys

from chitu_diffusion.rpc.server import run

if __name__ == "__main__":
    sys.exit(run("services.encoder.host:EncoderHost"))

"""`python -m services.encoder [overrides]`: the text encoder as a process."""

import sys

from chitu_diffusion.rpc.server import run
from services.encoder.host import EncoderHost

if __name__ == "__main__":
    sys.exit(run(EncoderHost))

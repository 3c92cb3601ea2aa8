"""The model hosts: text encoder, diffusion transformer, VAE."""

import os

# Before torch loads its OpenMP runtime. Threads that spin while they wait starve those that work as
# soon as two hosts, or a host and anything else, share cores: measured 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

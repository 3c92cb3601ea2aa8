"""Noise to latents: the diffusion transformer, its solvers, and the service that hosts them."""

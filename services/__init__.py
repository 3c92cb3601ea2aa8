"""The model hosts: text encoder, diffusion transformer, VAE."""

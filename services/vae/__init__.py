"""The VAE service: latents to video."""

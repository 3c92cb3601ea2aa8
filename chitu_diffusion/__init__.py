"""Smart-Diffusion: serve diffusion-transformer video as gRPC microservices."""

__version__ = "0.1.0"

"""The Wan family: Wan2.1 and Wan2.2 text-to-video."""

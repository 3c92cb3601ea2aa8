"""Make, export and judge the tiny Wan checkpoints in `assets/`: run `python -m tools.tiny_wan`."""

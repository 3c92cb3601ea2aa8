"""`python -m chitu_diffusion.cli`: the command, without its script."""

from chitu_diffusion.cli import main

if __name__ == "__main__":
    main()

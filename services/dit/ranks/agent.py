"""`python -m services.dit.ranks.agent PARENT_PID [torchrun arguments]`: the ranks of this host.

This is torchrun, which starts the ranks and starts them all again when one ends, bound to the life
of the pool's front. Each rank is bound to this process in turn.
"""

import os
import sys

from services.dit.ranks.lifeline import die_with_parent


def main() -> None:
    """Run torchrun until it ends or the front does."""
    die_with_parent(int(sys.argv[1]))
    from torch.distributed import run  # takes seconds: the front may be gone by then

    run.main(sys.argv[2:])


if __name__ == "__main__":
    main()
    os._exit(0)  # without waiting for torchrun's threads

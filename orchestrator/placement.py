"""How many ranks of the DiT pool a task gets, and how they share it."""

from __future__ import annotations

from chitu_diffusion.errors import PreconditionError
from chitu_diffusion.v1 import dit_pb2


class Placement:
    """As many ranks as are configured, or all of them."""

    def __init__(self, ranks_per_task: int, pool: dit_pb2.GetPoolResponse) -> None:
        """Take the groups that a pool offers.

        Args:
            ranks_per_task: 0 = the pool's own choice, which is its largest group.
            pool: as it describes itself.

        Raises:
            PreconditionError: it has no group of that size.
        """
        fitting = [group for group in pool.groups if len(group.ranks) == ranks_per_task]
        self._layouts = [group.layout for group in fitting]
        if ranks_per_task > 1 and not self._layouts:
            sizes = sorted({len(group.ranks) for group in pool.groups}) or [1]
            raise PreconditionError(
                f"orchestrator.ranks_per_task={ranks_per_task}: the DiT pool offers groups of "
                f"{', '.join(map(str, sizes))} ranks"
            )
        self.places = max(1, len(pool.ranks) // ranks_per_task) if ranks_per_task else 1
        """Tasks that can be denoised at the same time."""

    def layout(self, guided: bool) -> dit_pb2.Layout | None:
        """The layout of a slice; None leaves it to the pool, and the ranks in any case.

        Guidance on different ranks pays only for slices that have it.
        """
        return min(
            self._layouts,
            key=lambda layout: (layout.cfg_size == 2) != guided,
            default=None,
        )

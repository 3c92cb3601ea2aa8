"""Starting the ranks of this host: torchrun, as a child of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

from chitu_diffusion import config as configuration
from chitu_diffusion.config.schema import Config
from services.dit.parallel import configured
from services.dit.ranks import ADDRESS, CONFIG, SECRET

log = logging.getLogger(__name__)

RANK_MODULE = "services.dit.ranks.process"
_PATIENCE_S = 5.0
_RESTARTS = 3
"""That torchrun makes by itself. After the last one it ends, and is started again."""


class Launcher:
    """The child, if there is one."""

    def __init__(self, config: Config, folder: Path, address: str, secret: str) -> None:
        """Write down what the ranks need.

        Args:
            config: of the pool.
            folder: private to this pool.
            address: where the front listens for ranks.
            secret: of the pool.
        """
        self._distributed = config.distributed
        self._world_size, _ = configured(config.distributed, config.models.transformer.num_heads)
        file = folder / "config.yaml"
        file.write_text(configuration.to_yaml(config))
        self._environment = {ADDRESS: address, SECRET: secret, CONFIG: str(file)}
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start torchrun, which starts the ranks."""
        per_node = self._world_size // self._distributed.nodes
        threads = str(max(1, (os.cpu_count() or 1) // per_node))
        self._child = subprocess.Popen(
            [
                sys.executable,
                *("-m", "services.dit.ranks.agent", str(os.getpid())),
                *self._meeting(),
                *("--nproc-per-node", str(per_node)),
                *("--max-restarts", str(_RESTARTS), "--monitor-interval", "0.1"),
                *("-m", RANK_MODULE),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output belongs to the service
            env={
                "OMP_NUM_THREADS": threads,
                **os.environ,
                **self._environment,
            },
            # Ctrl-C in a terminal goes to the whole group; ranks are ended by the front.
            start_new_session=True,
        )

    def _meeting(self) -> list[str]:
        """Where the ranks find each other."""
        nodes, rendezvous = self._distributed.nodes, self._distributed.rendezvous
        if rendezvous is None or nodes == 1:
            return ["--standalone", "--local-addr", "127.0.0.1"]
        return [
            *("--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "chitu"),
            *("--rdzv-endpoint", rendezvous, "--rdzv-conf", "is_host=1"),
            *("--local-addr", rendezvous.rpartition(":")[0]),
        ]

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def ended(self) -> int | None:
        """The exit code, if it was started and has ended."""
        return None if self._child is None else self._child.poll()

    async def kill(self) -> None:
        """End torchrun and all of its ranks at once."""
        if self._child is not None:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)
            self._child = None

    async def stop(self) -> None:
        """Wait until torchrun ends, as it does behind its last rank; if it does not, kill it."""
        if self._child is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._child.wait, _PATIENCE_S)
        await self.kill()

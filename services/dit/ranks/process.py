"""`torchrun -m services.dit.ranks.process [hydra overrides]`: a rank of a DiT pool.

The front starts those of its own host. On another host start them by hand, or by whatever runs the
hosts; see docs/deploy.md. The environment tells where the front is (`CHITU_RANKS_ADDRESS`) and the
secret of the pool (`CHITU_RANKS_SECRET`), and may name a file with the configuration
(`CHITU_RANKS_CONFIG`) instead of overrides.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from chitu_diffusion import config as configuration
from chitu_diffusion import parallel
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    CancelledTaskError,
    ChituError,
    ComponentError,
    ConfigError,
    NotFoundError,
)
from chitu_diffusion.v1 import component_pb2, dit_pb2, rank_pb2
from services.common.memory import process_memory
from services.dit import request as door
from services.dit.attention import ATTN_TYPES
from services.dit.denoiser import Checkpoint, make_plan
from services.dit.experts import hosted
from services.dit.forward import forward_responses, parse_forward
from services.dit.jobs import Order
from services.dit.parallel import ALONE, Group, Layout, configured
from services.dit.parallel.groups import GroupBook, RankGroup, build_groups
from services.dit.parallel.peers import PeersLeftError
from services.dit.rank import Rank
from services.dit.ranks import ADDRESS, CONFIG, SECRET
from services.dit.ranks.lifeline import die_with_parent
from services.dit.ranks.link import Job, Link, failure
from services.dit.replies import replies

log = logging.getLogger(__name__)

READY = component_pb2.COMPONENT_STATE_READY


class Worker:
    """Does the jobs of one rank, on the main thread."""

    def __init__(self, config: Config, number: int) -> None:
        """Join the front.

        Args:
            config: of the pool.
            number: of this rank.
        """
        self._config = config
        self._number = number
        self._device = torch.device("cpu")
        self._group: RankGroup | None = None
        self._job = -1
        hello = rank_pb2.Hello(rank=number, host=socket.gethostname(), pid=os.getpid())
        self.link = Link(
            os.environ[ADDRESS], os.environ.get(SECRET, ""), hello, self._status, self._abort
        )

    def load(self) -> None:
        """Resolve where and how to run, meet the other ranks and read the weights.

        Raises:
            ConfigError, CheckpointError, CheckpointNotFoundError, OutOfMemoryError: as `Rank`.
        """
        self._rank = Rank(self._config)
        self._device = device = self._rank.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store, rank, world_size = next(rendezvous("env://"))
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        self._groups = GroupBook(PrefixStore("slices", store), rank, device)
        self._join(store, rank, world_size)
        self._rank.load()
        loaded = rank_pb2.RankStatus(
            components=self._rank.components(READY),
            memory=self._memory(),
            device=str(device),
            attn_type=self._rank.attention.name,
            refused_attn_types=self._refused(),
        )
        self.link.send([rank_pb2.AttachRequest(loaded=loaded)])

    def _refused(self) -> dict[str, str]:
        """Attention back ends that cannot run here, and why."""
        refused = {}
        for name in ATTN_TYPES:
            try:
                self._rank.select_attention(name, "")
            except ConfigError as error:
                refused[name] = str(error).partition(": ")[2]
        return refused

    def _join(self, store: Store, rank: int, world_size: int) -> None:
        """Make the pool's named groups, for code that asks for them by name."""
        backend = "nccl" if self._rank.device.type == "cuda" else "gloo"
        named = PrefixStore("pool", store)
        dist.init_process_group(backend, store=named, rank=rank, world_size=world_size)
        _, layout = configured(self._config.distributed, self._config.models.transformer.num_heads)
        parallel.join(build_groups(layout))

    def run(self) -> None:
        """Do jobs until the front ends the process."""
        for job in self.link.jobs():
            if isinstance(job.message, dit_pb2.ReleaseRequest):
                self._rank.release(job.message.task_id)
                continue
            self._job = job.message.number
            ended = rank_pb2.Ended(number=self._job)
            try:
                self._do(job)
            except ChituError as error:
                ended.failure.CopyFrom(failure(error))
                ended.left_alone = isinstance(error, PeersLeftError)
                ended.group_closed = self._close_group(error)
            self._group = None
            self.link.ended(ended)

    def _do(self, job: Job) -> None:
        try:
            if isinstance(job.message, rank_pb2.SliceJob):
                self._slice(job.message, job)
            elif isinstance(job.message, rank_pb2.ForwardJob):
                self._forward(job.message, job)
            elif isinstance(job.message, rank_pb2.MoveJob):
                self._move(job.message)
        except ChituError:
            raise
        except Exception as error:
            log.exception("a job failed outside of the model")
            failed = ComponentError(f"{type(error).__name__}: {error}")
        else:
            return
        raise failed

    def _slice(self, message: rank_pb2.SliceJob, job: Job) -> None:
        asked = message.layout
        layout = Layout(asked.cfg_size, asked.ulysses_degree, asked.ring_degree)
        # First of all: what fails after this is noticed by the others.
        group: Group = ALONE
        if layout.size > 1:
            self._group = self._groups.group(message.ranks, layout, message.epoch)
            group = self._group
        number = message.number
        plan = make_plan(door.parse_params(message.start.params, self._config.models))
        tensors = {name: payload.to_torch() for name, payload in job.payloads.items()}
        slice_ = door.make_slice(Order(message.start, plan, tensors), number)
        for event in self._rank.run(slice_, lambda: self.link.is_cancelled(number), group):
            if group.position == 0:
                self.link.reply(
                    number,
                    replies(event, plan, layout),
                    replaceable=isinstance(event, Checkpoint),
                )

    def _forward(self, message: rank_pb2.ForwardJob, job: Job) -> None:
        done = self._rank.forward(parse_forward(message.start, job.payloads, self._config))
        self.link.reply(message.number, forward_responses(done))

    def _move(self, message: rank_pb2.MoveJob) -> None:
        position = hosted(self._config)[message.name]
        try:
            self._rank.experts.settle(position, message.target)
        finally:
            status = rank_pb2.RankStatus(components=self._rank.components(READY))
            self.link.send([rank_pb2.AttachRequest(alive=status)])

    def _close_group(self, error: ChituError) -> bool:
        """Let go of the others, unless all of them have decided on this error together."""
        together = isinstance(error, CancelledTaskError | NotFoundError)
        if self._group is None or together:
            return False
        self._groups.drop(self._group)
        return True

    def _abort(self, number: int) -> None:
        """Come out of a collective that another rank will not enter; on the link's thread."""
        group = self._group
        if group is not None and number == self._job:
            group.abort()

    def _status(self) -> rank_pb2.RankStatus:
        return rank_pb2.RankStatus(memory=self._memory())

    def _memory(self) -> component_pb2.ProcessMemory:
        return process_memory(f"dit rank {self._number}", self._device)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rank until the front or torchrun ends it; returns the exit code of a failed start."""
    die_with_parent(os.getppid())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    number = int(os.environ["RANK"])
    try:
        config = _config(sys.argv[1:] if argv is None else argv)
        config = _on_own_device(config, int(os.environ["LOCAL_RANK"]))
    except ChituError as error:
        print(f"error: rank {number}: {error}", file=sys.stderr)
        return 1
    worker = Worker(config, number)
    try:
        worker.load()
    except ChituError as error:
        log.error("rank %d could not start: %s", number, error)
        worker.link.send([rank_pb2.AttachRequest(failed=failure(error))])
    worker.run()
    return 0


def _config(argv: Sequence[str]) -> Config:
    file = os.environ.get(CONFIG)
    if file is None:
        return configuration.load(argv)
    tree = OmegaConf.load(file)
    return configuration.check(OmegaConf.create(tree))  # type: ignore[arg-type]


def _on_own_device(config: Config, local_rank: int) -> Config:
    device = config.infer.device
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        config.infer.device = f"cuda:{local_rank}"
    return config


if __name__ == "__main__":
    sys.exit(main())

"""The front of a pool of many ranks: gives them slices and passes on what they answer.

It has no model and no device. When a rank is lost, the slices that run end with an error that a
caller may retry, all ranks are started again, and slices are taken once every group has warmed up.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    CancelledTaskError,
    ChituError,
    ConfigError,
    NotFoundError,
    OutOfMemoryError,
    UnavailableError,
    error_from,
)
from chitu_diffusion.v1 import component_pb2, dit_pb2, rank_pb2
from chitu_diffusion.wire import Payload, TensorReceiver, tensor_parts
from services.common.memory import process_memory
from services.dit.experts import hosted
from services.dit.intake import FAILED, LOADING, READY, Intake
from services.dit.jobs import Forward, ForwardDone, Order
from services.dit.parallel import Layout, auto_layout, configured, offered
from services.dit.ranks.crew import Crew
from services.dit.ranks.members import Member
from services.dit.ranks.turns import Turn, Turns
from services.dit.replies import layout_message
from services.dit.request import parse_group
from services.dit.step_times import StepKind, StepTimes
from services.dit.stream import SliceStream
from services.dit.warmup import warm_up

log = logging.getLogger(__name__)

_STALL_STEPS = 10
"""So many steps' time without a step, and ranks are taken for stuck."""
_LEAVE_S = 10.0
"""For the other ranks to come out of a slice that failed on one."""
_CLOSE_S = 5.0
"""For running slices to come to a step boundary at shutdown."""
_UNKNOWN_STEP_S = 60.0
"""Of a step, before any was measured."""
_CALL_S = 600.0
"""For a forward or a move."""
_WATCH_S = 0.25
_MAX_BACKOFF_S = 30.0


@dataclass(eq=False)
class _Job:
    """What some ranks do together."""

    number: int
    task_id: str
    ranks: tuple[int, ...]
    on_reply: Callable[[rank_pb2.Reply], None]
    on_end: Callable[[ChituError | None], None]
    patience: Callable[[], float]
    """Seconds that may pass without progress."""
    stream: SliceStream | None
    """Of a slice."""
    open: set[int] = field(default_factory=set)
    """Ranks that have not ended it."""
    failures: list[tuple[int, rank_pb2.Ended]] = field(default_factory=list)
    progressed: float = field(default_factory=time.monotonic)

    def error(self) -> ChituError | None:
        """What went wrong: the cause, if a rank told it, before what followed from it."""
        if not self.failures:
            return None
        rank, ended = min(self.failures, key=lambda failure: failure[1].left_alone)
        error = error_from(ended.failure.reason, ended.failure.message)
        if isinstance(error, CancelledTaskError | NotFoundError):
            return error  # not of one rank
        return error_from(ended.failure.reason, f"rank {rank}: {ended.failure.message}")


class RankPool:
    """Ranks in processes of their own."""

    def __init__(self, config: Config) -> None:
        """Resolve the layout. Starts nothing.

        Raises:
            ConfigError: this host has not enough devices.
        """
        self._config, self._model = config, config.models
        self._stall_s = config.services.dit.stall_timeout_s
        heads = self._model.transformer.num_heads
        self._world_size, self._layout = configured(config.distributed, heads)
        _check_devices(config, self._world_size // config.distributed.nodes)
        self._groups = offered(self._world_size, heads, self._layout)
        self._hosted = hosted(config)
        self._intake = Intake()
        self._turns = Turns(self._world_size)
        self._times = StepTimes()
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count(1)
        self._epoch = 0
        self._holders: dict[str, tuple[int, ...]] = {}
        """Ranks with the state of a task."""
        self._crew = Crew(config, self._world_size, self._on_request, self._on_lost)
        self._waiting: dict[SliceStream, Turn] = {}
        self._calls: dict[Turn, Callable[[ChituError | None], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Future[None] | None = None
        self._up = False
        """Whether a lost rank is to be replaced: all were there."""
        self.serving_changed: Callable[[bool], None] = lambda serving: None
        """Called when slices are no longer taken as a rank was lost, and when they are again."""

    async def load(self) -> None:
        """Start the ranks, wait for their weights, and warm up every group.

        Raises:
            ChituError: one could not start; nothing is left running.
        """
        try:
            await self._crew.open()
            self._go(self._watch())
            await self._crew.bring_up()
            await self._warm_up()
        except ChituError as error:
            self._intake.state, self._intake.detail = FAILED, str(error)
            await self._crew.kill()
            raise
        self._up = True
        if self._intake.state == LOADING:  # else drained meanwhile
            self._intake.state = READY

    async def _warm_up(self) -> None:
        await warm_up(self._config, self._groups, self._submit)

    def check(self) -> None:
        """Raise `UnavailableError` unless slices are taken."""
        self._intake.check()

    def check_attention(self, attn_type: str, field: str) -> None:
        """Raise `ConfigError` unless the ranks can run this kernel."""
        for member in self._crew.members.values():
            why = member.status.refused_attn_types.get(attn_type)
            if why is not None:
                raise ConfigError(f"{field}={attn_type!r}: {why}")

    def check_group(self, start: dit_pb2.DenoiseStart) -> None:
        """Raise `PreconditionError` unless there are such ranks as the slice names."""
        parse_group(start, self._world_size, self._model.transformer.num_heads)

    def submit(self, order: Order) -> SliceStream:
        """Queue a slice for the ranks it names, or for the next block that is free."""
        self._intake.check()
        return self._submit(order)

    def _submit(self, order: Order) -> SliceStream:
        start = order.start
        layout, ranks = self._group(order)
        stream = self._intake.open(start.task_id, start.attempt, lambda: self._on_cancel(stream))
        held = start.source == dit_pb2.LATENT_SOURCE_HELD
        holders = self._holders.get(start.task_id, ()) if held else ()
        if ranks and holders and not set(ranks).intersection(holders):
            self._go(self._bring_state(order, layout, ranks, holders[0], stream))
        else:
            self._queue(order, layout, ranks, holders, stream)
        return stream

    def _group(self, order: Order) -> tuple[Layout, tuple[int, ...]]:
        """The layout of a slice, and the ranks if it names any."""
        start, heads = order.start, self._model.transformer.num_heads
        layout, ranks = parse_group(start, self._world_size, heads)
        if layout is not None:
            return layout, ranks
        size = len(ranks) or self._layout.size
        guided = order.plan.is_guided(start.first_step, start.end_step)
        if size == self._layout.size and (guided or self._layout.cfg_size == 1):
            return self._layout, ranks
        return auto_layout(size, heads, cfg=guided), ranks

    def _queue(
        self,
        order: Order,
        layout: Layout,
        ranks: tuple[int, ...],
        near: tuple[int, ...],
        stream: SliceStream,
    ) -> None:
        def begin(chosen: tuple[int, ...]) -> None:
            del self._waiting[stream]
            self._begin_slice(order, layout, chosen, stream)

        self._waiting[stream] = Turn(layout.size, begin, ranks, near)
        self._turns.add(self._waiting[stream])
        self._advance()

    async def _bring_state(
        self,
        order: Order,
        layout: Layout,
        ranks: tuple[int, ...],
        holder: int,
        stream: SliceStream,
    ) -> None:
        """Fetch the state of a task from a rank outside of the group that goes on with it."""
        start = dit_pb2.DenoiseStart()
        start.CopyFrom(order.start)
        start.end_step, start.keep_state, start.return_latents = start.first_step, False, False
        start.return_checkpoint, start.checkpoint_interval_s = True, 0.0
        sending = self._intake.open(start.task_id, start.attempt)
        self._queue(Order(start, order.plan, order.tensors), Layout(), (holder,), (), sending)
        receiver, tensors = TensorReceiver(), dict(order.tensors)
        moved = dit_pb2.DenoiseStart()
        moved.CopyFrom(order.start)
        moved.source = dit_pb2.LATENT_SOURCE_CHECKPOINT
        try:
            async for response in sending:
                if response.HasField("checkpoint"):
                    moved.solver_state.CopyFrom(response.checkpoint.solver_state)
                elif response.HasField("tensor"):
                    payload = receiver.feed(response.tensor)
                    if payload is not None:
                        tensors[payload.name] = payload.to_torch()
            if stream.cancelled:
                raise CancelledTaskError("cancelled before its turn")
        except ChituError as error:
            self._end(stream, error)
            return
        self._queue(Order(moved, order.plan, tensors), layout, ranks, (), stream)

    def _begin_slice(
        self, order: Order, layout: Layout, ranks: tuple[int, ...], stream: SliceStream
    ) -> None:
        start, params = order.start, order.plan.params
        guided = order.plan.is_guided(start.first_step, start.end_step)
        stream.started = time.perf_counter()
        together: list[dit_pb2.DenoiseResponse] = []

        def on_reply(reply: rank_pb2.Reply) -> None:
            if reply.denoise.HasField("step"):
                step = order.plan.steps[reply.denoise.step.step]
                kind = StepKind.of(params, step.guidance > 1, layout)
                self._times.add(kind, reply.denoise.step.seconds)
            together.append(reply.denoise)
            if not reply.more:
                stream.put(tuple(together), replaceable=reply.replaceable)
                together.clear()

        def on_end(error: ChituError | None) -> None:
            if error is None and start.keep_state and start.end_step < len(order.plan.steps):
                self._holders[start.task_id] = ranks
            self._end(stream, error)

        kind = StepKind.of(params, guided, layout)
        patience = functools.partial(self._patience, kind)
        job = _Job(next(self._numbers), start.task_id, ranks, on_reply, on_end, patience, stream)
        self._begin(job)
        for rank in self._holders.pop(start.task_id, ()):
            if rank not in ranks:
                self._release(rank, start.task_id)
        message = rank_pb2.SliceJob(
            number=job.number,
            start=start,
            layout=layout_message(layout),
            ranks=ranks,
            epoch=self._epoch,
        )
        for rank in ranks[1:]:
            self._send(rank, [rank_pb2.AttachResponse(slice=message)])
        whole = rank_pb2.SliceJob()
        whole.CopyFrom(message)
        whole.tensors.extend(order.tensors)
        first = rank_pb2.AttachResponse(slice=whole)
        self._send(ranks[0], itertools.chain([first], _parts(order.tensors)))

    def _patience(self, kind: StepKind) -> float:
        """Seconds that may pass without a step."""
        expected = self._times.expected(kind)
        steps = _UNKNOWN_STEP_S if math.isinf(expected) else expected
        return max(self._stall_s, _STALL_STEPS * steps)

    def _on_cancel(self, stream: SliceStream) -> None:
        """A slice that waits ends now, one that runs at its next step boundary."""
        turn = self._waiting.pop(stream, None)
        if turn is not None:
            self._turns.remove(turn)
            self._end(stream, CancelledTaskError("cancelled before its turn"))
            self._advance()
            return
        for job in self._jobs.values():
            if job.stream is stream:
                cancel = rank_pb2.Cancel(number=job.number)
                for rank in job.open:
                    self._send(rank, [rank_pb2.AttachResponse(cancel=cancel)])

    def _end(self, stream: SliceStream, error: ChituError | None) -> None:
        self._intake.active.discard(stream)
        stream.end(error)

    async def forward(self, job: Forward) -> ForwardDone:
        """Run one transformer once, on the next rank that is free."""
        self._intake.check()
        asked = time.perf_counter()
        start = dit_pb2.ForwardStart(
            component=next(n for n, place in self._hosted.items() if place == job.expert),
            timestep=job.timestep,
            attn_type=job.attn_type,
        )
        tensors = {
            "hidden_states": job.hidden_states,
            "encoder_hidden_states": job.prompt_embeds.unsqueeze(0),
        }
        receiver, velocities = TensorReceiver(), list[Payload]()
        done = dit_pb2.ForwardDone()
        started: list[float] = []

        def on_reply(reply: rank_pb2.Reply) -> None:
            if reply.forward.HasField("done"):
                done.CopyFrom(reply.forward.done)
            else:
                payload = receiver.feed(reply.forward.tensor)
                velocities.extend([] if payload is None else [payload])

        def messages(number: int, rank: int) -> Iterator[rank_pb2.AttachResponse]:
            started.append(time.perf_counter())
            forward = rank_pb2.ForwardJob(number=number, start=start, tensors=list(tensors))
            yield rank_pb2.AttachResponse(forward=forward)
            yield from _parts(tensors)

        await self._call(1, (), on_reply, messages)
        done.report.waited_seconds = started[0] - asked
        return ForwardDone(velocities[0].to_torch(), done.attn_type, done.report)

    async def move(self, name: str, target: str) -> component_pb2.Component:
        """Give a transformer another home on all ranks; on all of them or none."""
        self._intake.check()

        async def move_all(target: str) -> None:
            def messages(number: int, rank: int) -> Iterator[rank_pb2.AttachResponse]:
                move = rank_pb2.MoveJob(number=number, name=name, target=target)
                yield rank_pb2.AttachResponse(move=move)

            every = tuple(range(self._world_size))
            await self._call(self._world_size, every, lambda reply: None, messages)

        try:
            await move_all(target)
        except OutOfMemoryError:
            await move_all("cpu")
            raise
        return next(part for part in self.components() if part.name == name)

    async def _call(
        self,
        size: int,
        ranks: tuple[int, ...],
        on_reply: Callable[[rank_pb2.Reply], None],
        messages: Callable[[int, int], Iterator[rank_pb2.AttachResponse]],
    ) -> None:
        """Do a job that is no slice, in turn, and wait for its end.

        `messages` makes what a rank is sent of its job, from the job's number and its own.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_end(error: ChituError | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        def begin(chosen: tuple[int, ...]) -> None:
            job = _Job(next(self._numbers), "", chosen, on_reply, on_end, lambda: _CALL_S, None)
            self._begin(job)
            for rank in chosen:
                self._send(rank, messages(job.number, rank))

        turn = Turn(size, begin, ranks)
        self._calls[turn] = on_end
        self._turns.add(turn)
        self._advance()
        try:
            await ended
        finally:
            del self._calls[turn]
            if self._turns.remove(turn):
                self._advance()

    def release(self, task_id: str) -> None:
        """Free the state that a task has left."""
        for rank in self._holders.pop(task_id, ()):
            self._release(rank, task_id)

    def _release(self, rank: int, task_id: str) -> None:
        message = dit_pb2.ReleaseRequest(task_id=task_id)
        self._send(rank, [rank_pb2.AttachResponse(release=message)])

    def _send(self, rank: int, messages: Iterable[rank_pb2.AttachResponse]) -> None:
        if rank in self._crew.members:  # else it is lost, and its job with it
            self._crew.members[rank].send(messages)

    def _begin(self, job: _Job) -> None:
        self._jobs[job.number] = job
        job.open.update(job.ranks)
        for rank in job.ranks:
            self._crew.members[rank].job = job.number

    def _advance(self) -> None:
        members = self._crew.members
        if len(members) == self._world_size:
            self._turns.advance(rank for rank, member in members.items() if member.job is None)

    def _on_request(self, member: Member, request: rank_pb2.AttachRequest) -> None:
        if request.HasField("reply"):
            job = self._jobs.get(request.reply.number)
            if job is not None:
                job.progressed = time.monotonic()
                job.on_reply(request.reply)
        elif request.HasField("ended"):
            member.job = None
            self._on_ended(member.rank, request.ended)

    def _on_ended(self, rank: int, ended: rank_pb2.Ended) -> None:
        job = self._jobs.get(ended.number)
        if job is None:
            return
        job.open.discard(rank)
        job.progressed = time.monotonic()
        if ended.HasField("failure"):
            if ended.group_closed and not job.failures:
                abort = rank_pb2.Cancel(number=job.number)
                for other in job.open:
                    self._send(other, [rank_pb2.AttachResponse(abort=abort)])
            job.failures.append((rank, ended))
        if not job.open:
            del self._jobs[job.number]
            if any(ended.group_closed for _, ended in job.failures):
                self._epoch += 1
            job.on_end(job.error())
        self._advance()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            self._crew.check_alive()
            for job in list(self._jobs.values()):
                limit = _LEAVE_S if job.failures else job.patience()
                if time.monotonic() - job.progressed > limit:
                    who = f"ranks {sorted(job.open)} of task {job.task_id!r}"
                    self._on_lost(f"{who} are stuck: nothing for {limit:.1f} s")
                    break

    def _on_lost(self, reason: str) -> None:
        """End all work; start the ranks again, unless somebody waits for them to start anyway."""
        error = UnavailableError(f"{reason}; the pool starts its ranks again")
        jobs, self._jobs = self._jobs, {}
        waiting, self._waiting = self._waiting, {}
        self._turns.clear()
        for job in jobs.values():
            job.on_end(error)
        for stream in waiting:
            self._end(stream, error)
        for on_end in list(self._calls.values()):
            on_end(error)
        self._holders.clear()
        if self._up:
            self._up = False
            log.error("%s: starting the ranks again", reason)
            self._go(self._rebuild(reason))

    async def _rebuild(self, reason: str) -> None:
        began = time.monotonic()
        if self._intake.state == READY:
            self._intake.state = LOADING
            self._intake.detail = f"the ranks are starting again: {reason}"
            self.serving_changed(False)
        for attempt in itertools.count():
            self._epoch += 1
            await self._crew.retire()
            try:
                await self._crew.bring_up()
                await self._warm_up()
            except ChituError as error:
                pause = min(2.0**attempt, _MAX_BACKOFF_S)
                log.error("the ranks did not start: %s; trying again in %g s", error, pause)
                await asyncio.sleep(pause)
            else:
                break
        self._up = True
        log.info("the ranks are back after %.1f s", time.monotonic() - began)
        if self._intake.state == LOADING:
            self._intake.state, self._intake.detail = READY, ""
            self.serving_changed(True)

    def _go(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def describe(self) -> dit_pb2.GetPoolResponse:
        """Tell the ranks, free and busy, the groups and the step times."""
        return dit_pb2.GetPoolResponse(
            layout=layout_message(self._layout),
            ranks=[self._rank(member) for _, member in sorted(self._crew.members.items())],
            attn_type=next((member.status.attn_type for member in self._crew.members.values()), ""),
            groups=[
                dit_pb2.PoolGroup(layout=layout_message(layout), ranks=ranks)
                for layout, ranks in self._groups
            ],
            step_times=self._times.messages(),
        )

    def _rank(self, member: Member) -> dit_pb2.PoolRank:
        cfg_rank, cp_rank = divmod(member.rank % self._layout.size, self._layout.cp_size)
        job = self._jobs.get(member.job or 0)
        return dit_pb2.PoolRank(
            rank=member.rank,
            cfg_rank=cfg_rank,
            cp_rank=cp_rank,
            host=member.host,
            pid=member.pid,
            device=member.status.device,
            task_id="" if job is None else job.task_id,
        )

    def components(self) -> list[component_pb2.Component]:
        """Describe the transformers as they are on rank 0; every rank has its own copy."""
        told = list(self._crew.members[0].status.components) if 0 in self._crew.members else []
        parts = [component_pb2.Component(name=name) for name in self._hosted]
        for part, known in zip(parts, told, strict=False):
            part.CopyFrom(known)
        for part in parts:
            part.model = self._model.name
            part.state, part.detail = self._intake.state, self._intake.detail
        return parts

    def memory(self) -> list[component_pb2.ProcessMemory]:
        """Count the memory of the front and of each rank."""
        front = process_memory("dit front", torch.device("cpu"))
        return [front, *(m.status.memory for _, m in sorted(self._crew.members.items()))]

    def drain(self) -> None:
        """Take no more slices."""
        self._intake.drain()

    async def close(self) -> None:
        """End what runs at its next step boundary, then all ranks; once, however often called."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.drain()
        self._up = False
        self._intake.cancel_all()
        deadline = time.monotonic() + _CLOSE_S
        while self._jobs and time.monotonic() < deadline:  # noqa: ASYNC110 - rare, and short
            await asyncio.sleep(0.02)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._crew.close()


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[rank_pb2.AttachResponse]:
    for name, tensor in tensors.items():
        for part in tensor_parts(name, tensor):
            yield rank_pb2.AttachResponse(tensor=part)


def _check_devices(config: Config, ranks_per_node: int) -> None:
    """Refuse more ranks than this host has devices for, without opening one."""
    if config.infer.device == "cpu":
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.infer.device == "auto" and not count:
        return
    if count < ranks_per_node:
        raise ConfigError(
            f"distributed: {ranks_per_node} ranks on this host need as many CUDA devices, "
            f"it has {count}"
        )

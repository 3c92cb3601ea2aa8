"""What a rank does: it owns the models and the state of tasks, and runs one slice at a time.

A rank knows nothing of gRPC or asyncio: a slice goes in, events come out.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import (
    ChituError,
    ComponentError,
    ConfigError,
    NotFoundError,
    OutOfMemoryError,
)
from chitu_diffusion.v1 import component_pb2
from services.common.checkpoint import load_weights
from services.common.memory import stage_report
from services.common.placement import (
    dtype_name,
    is_out_of_memory,
    resolve_device,
    resolve_dtype,
)
from services.dit.attention import Attention, select
from services.dit.denoiser import Checkpoint, Denoiser, Plan, Prompts, TaskState
from services.dit.experts import Experts, hosted
from services.dit.flexcache import NoCache
from services.dit.guidance import Execution, guided_velocity
from services.dit.jobs import Event, Forward, ForwardDone, Slice, SliceDone, Source
from services.dit.models import Transformer, get_family
from services.dit.parallel import ALONE, Group
from services.dit.solvers import SolverState, remembered

log = logging.getLogger(__name__)

MAX_HELD = 8
"""States kept between slices. The oldest goes first; its task then needs a checkpoint."""

_ON_CPU_LEVEL = 3
"""infer.diffusion.low_mem_level from which the transformers live in host memory."""


class Rank:
    """One process's models on one device."""

    def __init__(self, config: Config) -> None:
        """Resolve where and how to run. Reads no weights.

        Raises:
            ConfigError: the device, type or attention kernel cannot be had.
        """
        self._model = config.models
        self._hosted = hosted(config)
        self._family = get_family(config.models.type)
        self.device = resolve_device(config.infer.device)
        self.dtype = resolve_dtype(config.infer.dtype, self.device)
        self._compile = config.infer.compile == "block"
        cache = Path(config.infer.compile_cache).expanduser()
        if self._compile:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        self._num_threads = config.infer.num_threads
        self.attention = self.select_attention(config.infer.attn_type, "infer.attn_type")
        on_cpu = config.infer.diffusion.low_mem_level >= _ON_CPU_LEVEL
        self.home = torch.device("cpu") if on_cpu else self.device
        """Where the transformers are loaded, and live until they are moved."""
        self.experts = self._no_experts()
        self._held: OrderedDict[str, TaskState] = OrderedDict()

    def select_attention(self, attn_type: str, key: str) -> Attention:
        """Make a kernel for this model here; `ConfigError` if it cannot run."""
        transformer = self._model.transformer
        head_dim = transformer.hidden_size // transformer.num_heads
        return select(attn_type, self.device, self.dtype, head_dim, key)

    def load(self) -> None:
        """Read the weights of every expert.

        Raises:
            ConfigError: models.ckpt_dir is not set.
            CheckpointError, CheckpointNotFoundError: see `load_weights`.
            OutOfMemoryError: they do not fit.
        """
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        if self._model.ckpt_dir is None:
            raise ConfigError("models.ckpt_dir is not set: there are no weights to read")
        two = self._model.boundary_ratio is not None
        folders = self._family.expert_folders(Path(self._model.ckpt_dir), two)
        try:
            models = [self._read(folders[position]) for position in self._hosted.values()]
            first = min(self._hosted.values())
            self.experts = Experts(models, self.device, self.home, first)
        except Exception as error:
            failure = _named(error)
        else:
            self._log_loaded()
            return
        _free()
        raise failure

    def _log_loaded(self) -> None:
        log.info(
            "%s: %d transformer(s) on %s in %s, attention %s",
            self._model.name,
            len(self.experts),
            self.device,
            self.dtype,
            self.attention.name,
        )

    def _no_experts(self) -> Experts:
        return Experts([], self.device, self.home)

    def _read(self, folder: Path) -> Transformer:
        with torch.device("meta"):
            model = self._family.transformer(self._model.transformer)
        load_weights(
            model,
            folder,
            rename=self._family.rename,
            dtype=lambda name: self._family.weight_dtype(name, self.dtype),
            device=self.home,
        )
        model.fuse()
        if self._compile:
            model.compile_blocks()
        return model.eval()

    @property
    def held_tasks(self) -> list[str]:
        """Tasks whose state is kept here, the least recently used first."""
        return list(self._held)

    def run(
        self, job: Slice, cancelled: Callable[[], bool], group: Group = ALONE
    ) -> Iterator[Event]:
        """Run a slice with the other ranks of its group; the last event is `SliceDone`.

        Events of the leader hold what was asked for; those of other ranks only tell that they are
        there.

        Raises:
            NotFoundError: source is HELD and no rank of the group has the task at first_step.
            CancelledTaskError: `cancelled` was true on some rank before a step.
            OutOfMemoryError: what the slice had taken is freed.
            ComponentError: any other error of the model, latents that are not finite, or ranks that
                do not run the same slice.
        """
        try:
            yield from self._run(job, cancelled, group)
        except Exception as error:
            failure = _named(error)
        else:
            return
        finally:
            self.experts.rest()
        # Only here, behind the except clause, the frames of the failed run are gone.
        _free()
        raise failure

    def forward(self, job: Forward) -> ForwardDone:
        """Run one transformer once.

        Raises:
            OutOfMemoryError, ComponentError: as `run`.
        """
        try:
            return self._forward(job)
        except Exception as error:
            failure = _named(error)
        finally:
            self.experts.rest()
        _free()
        raise failure

    @torch.inference_mode()
    def _forward(self, job: Forward) -> ForwardDone:
        started = time.perf_counter()
        model = self.experts.use(job.expert)
        latents = job.hidden_states.to(self.device)
        grid = (latents.shape[2], latents.shape[3], latents.shape[4])
        constants = model.prepare(self._pad(job.prompt_embeds), grid, [job.timestep])
        how = Execution(self._attention(job.attn_type), ALONE, NoCache())
        velocity = guided_velocity(model, latents, 0, constants, 1.0, how).cpu()
        if not bool(torch.isfinite(velocity).all()):
            raise ComponentError("the velocity is not finite")
        report = stage_report(self.device, self.dtype, time.perf_counter() - started, 0.0)
        return ForwardDone(velocity, how.attention.name, report)

    def _attention(self, attn_type: str) -> Attention:
        """The kernel that a request names, or the rank's own."""
        return self.select_attention(attn_type, "attn_type") if attn_type else self.attention

    def _run(self, job: Slice, cancelled: Callable[[], bool], group: Group) -> Iterator[Event]:
        started = time.perf_counter()
        # Taken out for the time of the run: an error leaves nothing of the task here.
        held = self._held.pop(job.task_id, None)
        attention = self._attention(job.attn_type)
        state = self._open(job, held, attention.name, group)
        del held
        parallel = group.parallel(self._num_tokens(job.plan))
        how = Execution(attention, parallel, NoCache())
        yield from self._steps(job, state, how, cancelled, group)
        if job.keep_state and state.step < len(job.plan.steps):
            state.version = job.number
            self._hold(job.task_id, state)
        leads = group.position == 0
        yield SliceDone(
            next_step=state.step,
            attn_type=attention.name,
            report=stage_report(self.device, self.dtype, time.perf_counter() - started, 0.0),
            latents=state.latents.cpu() if leads and job.return_latents else None,
            checkpoint=state.checkpoint() if leads and job.return_checkpoint else None,
        )

    def _num_tokens(self, plan: Plan) -> int:
        patch = self._model.transformer.patch_size
        return math.prod(size // unit for size, unit in zip(plan.params.grid, patch, strict=True))

    def _open(self, job: Slice, held: TaskState | None, attn_type: str, group: Group) -> TaskState:
        """The state to start from: made here, held here, or another rank's."""
        denoiser = Denoiser(self.experts, self.device)
        state: TaskState | None = None
        if job.source is Source.NOISE:
            state = denoiser.from_noise(job.plan)
        elif job.checkpoint is not None:
            state = denoiser.from_checkpoint(job.plan, job.checkpoint)
        elif job.source is Source.HELD and _fits(held, job):
            state = held
        age, order = (-1, 0) if state is None else (state.version, state.solver.state().order)
        told = group.tell([self._digest(job, attn_type), age, order])
        _same("slice", job, [digest for digest, _, _ in told])
        ages = [age for _, age, _ in told]
        newest = max(ages)
        if newest < 0:
            where = "nowhere" if held is None else f"at step {held.step}"
            raise NotFoundError(
                f"task {job.task_id!r} has no state at step {job.first_step} here: it is {where}"
            )
        if min(ages) < newest:
            source = ages.index(newest)
            if state is None or age < newest:
                state = denoiser.from_checkpoint(job.plan, self._blank(job, told[source][2]))
            for tensor in (state.latents, *state.solver.state().tensors.values()):
                group.share(tensor, source)
        assert state is not None
        return state

    def _blank(self, job: Slice, order: int) -> Checkpoint:
        """Room for what another rank holds."""
        params = job.plan.params
        shape = (1, self._model.transformer.in_channels, *params.grid)

        def empty() -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=self.device)

        tensors = {name: empty() for name in remembered(params.solver, job.first_step)}
        solver = SolverState(params.solver, job.first_step, order, tensors)
        return Checkpoint(job.first_step, empty(), solver)

    def _digest(self, job: Slice, attn_type: str) -> int:
        """A number that is the same on ranks that are about to do the same in the same types."""
        facts = (
            job.number,
            job.task_id,
            job.plan.params,
            job.first_step,
            job.end_step,
            job.source,
            self.dtype,
            attn_type,
            dataclasses.astuple(self._model.transformer),
        )
        return zlib.crc32(repr(facts).encode())

    def _steps(
        self,
        job: Slice,
        state: TaskState,
        how: Execution,
        cancelled: Callable[[], bool],
        group: Group,
    ) -> Iterator[Event]:
        prompts = self._prompts(job, group)
        interval = job.checkpoint_interval_s if group.position == 0 else 0.0

        def stopped() -> bool:
            """Decide together: no rank may go on when another does not."""
            told = group.tell([job.number, state.step, int(cancelled())])
            _same("step", job, [(number, step) for number, step, _ in told])
            return any(stop for _, _, stop in told)

        denoiser = Denoiser(self.experts, self.device)
        saved = time.perf_counter()
        for event in denoiser.run(state, job.end_step, prompts, how, stopped):
            yield event
            due = time.perf_counter() - saved >= interval > 0
            if due and state.step < job.end_step:
                yield state.checkpoint()
                saved = time.perf_counter()

    def _prompts(self, job: Slice, group: Group) -> Prompts:
        """Give every rank the leader's embeddings."""

        def rows(embeds: torch.Tensor | None) -> torch.Tensor:
            text = self._model.transformer
            blank = torch.zeros((0, text.text_dim))
            padded = self._pad(blank if embeds is None else embeds)
            group.share(padded, 0)
            return padded

        guided = job.plan.is_guided(job.first_step, job.end_step)
        return Prompts(
            rows(job.prompt_embeds), rows(job.negative_prompt_embeds) if guided else None
        )

    def _pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring true rows (length, text_dim) to (1, text_len, text_dim) with zero rows behind."""
        padded = torch.zeros(
            (1, self._model.transformer.text_len, rows.shape[1]),
            dtype=self.dtype,
            device=self.device,
        )
        padded[0, : rows.shape[0]] = rows
        return padded

    def _hold(self, task_id: str, state: TaskState) -> None:
        self._held[task_id] = state
        while len(self._held) > MAX_HELD:
            dropped, _ = self._held.popitem(last=False)
            log.warning("task %s: state dropped, %d newer ones are held", dropped, MAX_HELD)

    def release(self, task_id: str) -> None:
        """Free the state of a task, if there is one."""
        self._held.pop(task_id, None)

    def components(
        self, state: component_pb2.ComponentState.ValueType, detail: str = ""
    ) -> list[component_pb2.Component]:
        """Describe the transformers; counts are 0 until their weights are here."""

        def component(name: str, position: int) -> component_pb2.Component:
            loaded = len(self.experts) > 0
            parameters = list(self.experts[position].parameters()) if loaded else []
            return component_pb2.Component(
                name=name,
                model=self._model.name,
                state=state,
                device=str(self.experts.where[position] if loaded else self.home),
                dtype=dtype_name(self.dtype),
                parameter_count=sum(parameter.numel() for parameter in parameters),
                weight_bytes=sum(parameter.nbytes for parameter in parameters),
                attn_type=self.attention.name,
                detail=detail,
            )

        return [component(*entry) for entry in self._hosted.items()]

    def close(self) -> None:
        """Free models and states."""
        self.experts = self._no_experts()
        self._held.clear()
        _free()


def _fits(held: TaskState | None, job: Slice) -> bool:
    """Say whether a state is the one that a slice goes on from."""
    return held is not None and held.step == job.first_step and held.plan == job.plan


def _same(what: str, job: Slice, told: Sequence[object]) -> None:
    """Refuse to enter a collective with ranks that are elsewhere."""
    odd = [position for position, fact in enumerate(told) if fact != told[0]]
    if odd:
        raise ComponentError(
            f"task {job.task_id!r}: ranks at positions {odd} of the group are not at the same "
            f"{what} as the leader: {list(told)}"
        )


def _named(error: Exception) -> ChituError:
    """Find the error that says what happened, without the frames that hold the slice's tensors."""
    if isinstance(error, ChituError):
        return error.with_traceback(None)
    if is_out_of_memory(error):
        return OutOfMemoryError(f"out of memory: {error}")
    log.error("the model raised", exc_info=error)
    return ComponentError(f"{type(error).__name__}: {error}")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

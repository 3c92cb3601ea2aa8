"""What a rank does: it owns the models and the state of tasks, and runs one slice at a time.

A rank knows nothing of gRPC or asyncio: a slice goes in, events come out.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
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
from services.common.checkpoint import load_weights
from services.common.memory import stage_report
from services.common.placement import is_out_of_memory, resolve_device, resolve_dtype
from services.dit.attention import Attention, select
from services.dit.denoiser import Denoiser, Prompts, TaskState
from services.dit.experts import Experts
from services.dit.flexcache import NoCache
from services.dit.guidance import Execution, guided_velocity
from services.dit.jobs import Event, Forward, ForwardDone, Slice, SliceDone, Source
from services.dit.models import Transformer, get_family
from services.dit.parallel import Alone

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
        self._family = get_family(config.models.type)
        self.device = resolve_device(config.infer.device)
        self.dtype = resolve_dtype(config.infer.dtype, self.device)
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
            models = [self._read(folder) for folder in folders]
            self.experts = Experts(models, self.device, self.home)
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
        return model.eval()

    @property
    def held_tasks(self) -> list[str]:
        """Tasks whose state is kept here, the least recently used first."""
        return list(self._held)

    def run(self, job: Slice, cancelled: Callable[[], bool]) -> Iterator[Event]:
        """Run a slice; its last event is `SliceDone`.

        Raises:
            NotFoundError: source is HELD and there is no state of the task at first_step.
            CancelledTaskError: `cancelled` was true before a step.
            OutOfMemoryError: what the slice had taken is freed.
            ComponentError: any other error of the model, or latents that are not finite.
        """
        try:
            yield from self._run(job, cancelled)
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
        how = Execution(self._attention(job.attn_type), Alone(), NoCache())
        velocity = guided_velocity(model, latents, 0, constants, 1.0, how).cpu()
        if not bool(torch.isfinite(velocity).all()):
            raise ComponentError("the velocity is not finite")
        report = stage_report(self.device, self.dtype, time.perf_counter() - started, 0.0)
        return ForwardDone(velocity, how.attention.name, report)

    def _attention(self, attn_type: str) -> Attention:
        """The kernel that a request names, or the rank's own."""
        return self.select_attention(attn_type, "attn_type") if attn_type else self.attention

    def _run(self, job: Slice, cancelled: Callable[[], bool]) -> Iterator[Event]:
        started = time.perf_counter()
        # Taken out for the time of the run: an error leaves nothing of the task here.
        held = self._held.pop(job.task_id, None)
        denoiser = Denoiser(self.experts, self.device)
        state = self._open(job, held, denoiser)
        del held
        attention = self._attention(job.attn_type)
        how = Execution(attention, Alone(), NoCache())
        yield from self._steps(job, denoiser, state, how, cancelled)
        if job.keep_state and state.step < len(job.plan.steps):
            self._hold(job.task_id, state)
        yield SliceDone(
            next_step=state.step,
            attn_type=attention.name,
            report=stage_report(self.device, self.dtype, time.perf_counter() - started, 0.0),
            latents=state.latents.cpu() if job.return_latents else None,
            checkpoint=state.checkpoint() if job.return_checkpoint else None,
        )

    def _open(self, job: Slice, held: TaskState | None, denoiser: Denoiser) -> TaskState:
        if job.source is Source.NOISE:
            return denoiser.from_noise(job.plan)
        if job.checkpoint is not None:
            return denoiser.from_checkpoint(job.plan, job.checkpoint)
        if held is None or held.step != job.first_step or held.plan != job.plan:
            where = "nowhere" if held is None else f"at step {held.step}"
            raise NotFoundError(
                f"task {job.task_id!r} has no state at step {job.first_step} here: it is {where}"
            )
        return held

    def _steps(
        self,
        job: Slice,
        denoiser: Denoiser,
        state: TaskState,
        how: Execution,
        cancelled: Callable[[], bool],
    ) -> Iterator[Event]:
        prompts = Prompts(
            self._pad(job.prompt_embeds),
            None if job.negative_prompt_embeds is None else self._pad(job.negative_prompt_embeds),
        )
        saved = time.perf_counter()
        for event in denoiser.run(state, job.end_step, prompts, how, cancelled):
            yield event
            due = time.perf_counter() - saved >= job.checkpoint_interval_s > 0
            if due and state.step < job.end_step:
                yield state.checkpoint()
                saved = time.perf_counter()

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

    def release(self) -> None:
        """Free models and states."""
        self.experts = self._no_experts()
        self._held.clear()
        _free()


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

"""From noise to latents: the plan of a task, and the loop over its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from chitu_diffusion.errors import CancelledTaskError, ComponentError
from services.dit.experts import Experts
from services.dit.guidance import Execution, guided_velocity, uses_negative
from services.dit.models import Constants
from services.dit.solvers import Grid, Solver, SolverState, make_grid, make_solver
from services.dit.solvers.grid import TRAIN_TIMESTEPS


@dataclass(frozen=True)
class DenoiseParams:
    """All that determines the latents besides the embeddings: checked, see `request.py`."""

    num_frames: int
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float
    solver: str
    seed: int
    guidance_scale_high: float | None = None
    boundary_ratio: float | None = None
    latent_stride: tuple[int, int, int] = (4, 8, 8)
    """Frames, rows and columns of video behind one latent."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Latent frames, height and width."""
        frames, height, width = self.latent_stride
        return ((self.num_frames - 1) // frames + 1, self.height // height, self.width // width)


@dataclass(frozen=True)
class PlannedStep:
    """What one step will do."""

    step: int
    timestep: float
    sigma: float
    expert: int
    """Position in the list of experts: 0 is the only one or high noise, 1 is low noise."""
    guidance: float
    reused: bool = False


@dataclass(frozen=True)
class Plan:
    """Every step of a task, known before any work."""

    params: DenoiseParams
    grid: Grid
    steps: tuple[PlannedStep, ...]

    @property
    def forward_count(self) -> int:
        """Transformer forwards, both guidance branches counted."""
        return sum(1 + uses_negative(step.guidance) for step in self.steps if not step.reused)

    def is_guided(self, first_step: int, end_step: int) -> bool:
        """Say whether a step of [first_step, end_step) has a negative branch."""
        return any(uses_negative(step.guidance) for step in self.steps[first_step:end_step])


def make_plan(params: DenoiseParams) -> Plan:
    """Lay out the steps. High noise is where timestep >= boundary_ratio x 1000."""
    grid = make_grid(params.solver, params.num_inference_steps, params.flow_shift)
    steps = []
    for i, timestep in enumerate(grid.timesteps):
        expert, guidance = 0, params.guidance_scale
        if params.boundary_ratio is not None and params.guidance_scale_high is not None:
            high = timestep >= params.boundary_ratio * TRAIN_TIMESTEPS
            expert, guidance = (0, params.guidance_scale_high) if high else (1, guidance)
        steps.append(PlannedStep(i, timestep, grid.sigmas[i], expert, guidance))
    return Plan(params, grid, tuple(steps))


@dataclass(frozen=True)
class Prompts:
    """Embeddings (1, text_len, text_dim), zero rows after the true length; negative if needed."""

    positive: torch.Tensor
    negative: torch.Tensor | None

    def branch(self, index: int) -> torch.Tensor:
        """Of a guidance branch: 0 is the positive one."""
        if index == 0:
            return self.positive
        assert self.negative is not None, "the door asks for it when a step needs it"
        return self.negative


@dataclass(frozen=True)
class Checkpoint:
    """Where a task stands, on the CPU: it can go on anywhere from here."""

    step: int
    """The step to run next."""
    latents: torch.Tensor
    """(1, C, F, H, W) float32."""
    solver: SolverState
    copied: torch.cuda.Event | None = None
    """When the tensors hold their values; None = now."""

    def wait(self) -> None:
        """Wait until the tensors hold their values."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass
class TaskState:
    """Where a task stands, on the device. Owned by the task; `Denoiser.run` moves it on."""

    plan: Plan
    latents: torch.Tensor
    """(1, C, F, H, W) float32."""
    solver: Solver
    constants: dict[tuple[int, tuple[int, ...]], Constants] = field(default_factory=dict)
    """Of the expert in use and the branches computed here; made when they are first used."""
    version: int = 0
    """Number of the slice that left it: of two states of a task the higher one counts."""

    @property
    def step(self) -> int:
        """The step to run next."""
        return self.solver.step_index

    def checkpoint(self) -> Checkpoint:
        """Begin to copy the state to the CPU; `Checkpoint.wait` ends it.

        Steps make new tensors, so later ones don't change it, and need not wait for it.
        """
        state = self.solver.state()
        tensors = {name: _to_host(tensor) for name, tensor in state.tensors.items()}
        solver = SolverState(state.solver, state.step, state.order, tensors)
        latents, copied = _to_host(self.latents), None
        if self.latents.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return Checkpoint(self.step, latents, solver, copied)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to pinned memory without waiting; a tensor on the CPU is returned as it is."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class StepDone:
    """A step has ended."""

    planned: PlannedStep
    seconds: float


class Denoiser:
    """Runs steps with the experts of one model."""

    def __init__(self, experts: Experts, device: torch.device) -> None:
        self._experts = experts
        self._device = device

    def from_noise(self, plan: Plan) -> TaskState:
        """Start a task. The noise is drawn on the CPU, so it is the same on every device."""
        channels = self._experts.in_channels
        generator = torch.Generator().manual_seed(plan.params.seed)
        noise = torch.randn((1, channels, *plan.params.grid), generator=generator)
        return TaskState(plan, noise.to(self._device), make_solver(plan.grid))

    def from_checkpoint(self, plan: Plan, checkpoint: Checkpoint) -> TaskState:
        """Go on from a checkpoint of the same plan."""
        given = checkpoint.solver
        tensors = {name: tensor.to(self._device) for name, tensor in given.tensors.items()}
        solver = make_solver(plan.grid)
        solver.restore(SolverState(given.solver, given.step, given.order, tensors))
        return TaskState(plan, checkpoint.latents.to(self._device), solver)

    def run(
        self,
        state: TaskState,
        end_step: int,
        prompts: Prompts,
        how: Execution,
        cancelled: Callable[[], bool],
    ) -> Iterator[StepDone]:
        """Run steps up to `end_step`, moving `state` on; yields after each.

        Raises:
            CancelledTaskError: `cancelled` was true before a step.
            ComponentError: the latents after `end_step` are not finite.
        """
        for planned in state.plan.steps[state.step : end_step]:
            if cancelled():
                raise CancelledTaskError(f"cancelled before step {planned.step}")
            started = time.perf_counter()
            self._step(state, planned, prompts, how)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            yield StepDone(planned, time.perf_counter() - started)
        if not bool(torch.isfinite(state.latents).all()):
            raise ComponentError(f"latents after step {state.step} are not finite")

    @torch.inference_mode()
    def _step(
        self, state: TaskState, planned: PlannedStep, prompts: Prompts, how: Execution
    ) -> None:
        branches = how.parallel.branches if uses_negative(planned.guidance) else (0,)
        velocity = guided_velocity(
            self._experts.use(planned.expert),
            state.latents,
            planned.step,
            self._constants(state, planned, prompts, branches),
            planned.guidance,
            how,
        )
        state.latents = state.solver.step(velocity, state.latents)

    def _constants(
        self, state: TaskState, planned: PlannedStep, prompts: Prompts, branches: tuple[int, ...]
    ) -> Constants:
        """Return the expert's constants, computed once; those of another expert are freed."""
        key = (planned.expert, branches)
        if key not in state.constants:
            state.constants.clear()
            rows = torch.cat([prompts.branch(index) for index in branches])
            state.constants[key] = self._experts.use(planned.expert).prepare(
                rows, state.plan.params.grid, state.plan.grid.timesteps
            )
        return state.constants[key]

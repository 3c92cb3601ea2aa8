"""The parts of a live backend as its owner calls them: blocking, from any thread.

Tensors go in as torch tensors and come out as torch tensors on the CPU; torch itself is loaded by
whoever calls with one, never by this module.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from chitu_diffusion.errors import InvalidRequestError, NotFoundError, UnavailableError
from chitu_diffusion.v1 import component_pb2, dit_pb2
from chitu_diffusion.wire import payload_of
from orchestrator.core import BackendCore, BackendState
from orchestrator.task import Task

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class System(Protocol):
    """A core, and the event loop that it lives on."""

    core: BackendCore

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the core's event loop to its end."""


class Handle:
    """Something of a live backend."""

    def __init__(self, system: System) -> None:
        self._system = system

    @property
    def _core(self) -> BackendCore:
        if self._system.core.state is BackendState.Terminated:
            raise UnavailableError("the backend is terminated")
        return self._system.core


class ComponentHandle(Handle):
    """A model part, wherever it is hosted."""

    def __init__(self, system: System, name: str) -> None:
        super().__init__(system)
        self.name = name
        """"text_encoder", "vae", "transformer" or "transformer_2"."""

    def describe(self) -> component_pb2.Component:
        """State, device, type and size, as its host tells them now.

        Raises:
            UnavailableError: the host does not answer.
        """
        parts, _ = self._system.run(self._core.describe())
        for part in parts:
            if part.name == self.name:
                return part
        failed = "; ".join(part.detail for part in parts if part.detail)
        raise UnavailableError(f"{self.name} is not to be found: {failed}")

    @property
    def device(self) -> str:
        """Where its weights live now, e.g. "cpu" or "cuda:0"."""
        return self.describe().device

    def to(self, target: str) -> component_pb2.Component:
        """Move it to "cpu", or back to the "device" it was configured for.

        Raises:
            InvalidRequestError: another target.
            OutOfMemoryError: it does not fit; it stays where it was.
        """
        return self._system.run(self._core.move(self.name, target))

    def __repr__(self) -> str:
        part = self.describe()
        return (
            f"<{self.name} of {part.model}: {part.parameter_count / 1e6:.1f} M parameters, "
            f"{part.dtype} on {part.device}>"
        )


class TextEncoderHandle(ComponentHandle):
    """Texts to embeddings."""

    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embed texts, or token ids.

        Args:
            text: one or more texts.
            input_ids: (B, L) or (L,) token ids with their end token, padded on the right.
            attention_mask: same shape, 1 where a token counts and 0 behind it; all 1 if left out.

        Returns:
            (B, text_len, text_dim) for texts, (B, L, text_dim) for ids; rows past a text's true
            length are zero, as the transformer takes them.

        Raises:
            InvalidRequestError: neither or both are given, or the mask does not fit.
        """
        if (text is None) == (input_ids is None):
            raise InvalidRequestError.of("text", "give either text or input_ids")
        inputs: list[str | Sequence[int]]
        if input_ids is not None:
            inputs = list(_true_ids(input_ids, attention_mask))
            length = input_ids.shape[-1]
        else:
            inputs = [text] if isinstance(text, str) else list(text or ())
            length = self._core.model.transformer.text_len
        encoded, _ = self._system.run(self._core.text_encoder.encode(inputs))
        rows = [item.embeds.to_torch() for item in encoded]
        embeds = rows[0].new_zeros((len(rows), length, rows[0].shape[1]))
        for index, row in enumerate(rows):
            embeds[index, : row.shape[0]] = row
        return embeds


def _true_ids(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> Sequence[Sequence[int]]:
    """The ids of each text without its padding."""
    if input_ids.ndim not in (1, 2):
        raise InvalidRequestError.of(
            "input_ids", f"shape {tuple(input_ids.shape)}: must be (B, L) or (L,)"
        )
    rows: list[list[int]] = input_ids.reshape(-1, input_ids.shape[-1]).tolist()
    if attention_mask is None:
        return rows
    if attention_mask.shape != input_ids.shape:
        raise InvalidRequestError.of(
            "attention_mask",
            f"shape {tuple(attention_mask.shape)}: must be that of input_ids, "
            f"{tuple(input_ids.shape)}",
        )
    masks = attention_mask.reshape(-1, input_ids.shape[-1]).tolist()
    lengths = [sum(map(bool, mask)) for mask in masks]
    for mask, length in zip(masks, lengths, strict=True):
        if not all(mask[:length]):
            raise InvalidRequestError.of("attention_mask", "must be ones and then zeros")
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


class DitModelHandle(ComponentHandle):
    """A transformer of the pool: the only one, or one expert."""

    def __init__(self, system: System, name: str, expert: str | None) -> None:
        super().__init__(system, name)
        self.expert = expert
        """"high_noise" or "low_noise"; None in a model with one transformer."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor | float,
        encoder_hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        """Run it once: (B, C, F, H, W) float32 velocity, on the CPU.

        Args:
            hidden_states: (B, C, F, H, W) noisy latents, any float type.
            timestep: 0 to 1000, one for all or (B,).
            encoder_hidden_states: (B, L, text_dim) embeddings, L up to the model's text length.
        """
        if hidden_states.ndim != 5 or len(hidden_states) != len(encoder_hidden_states):
            raise InvalidRequestError.of(
                "hidden_states",
                f"shape {tuple(hidden_states.shape)}: must be (B, C, F, H, W) with the B of "
                f"encoder_hidden_states, {len(encoder_hidden_states)}",
            )
        steps = [timestep] if isinstance(timestep, float | int) else timestep.reshape(-1).tolist()
        steps = steps * len(hidden_states) if len(steps) == 1 else steps
        velocity = hidden_states.new_empty(hidden_states.shape).float().cpu()
        for index, step in zip(range(len(velocity)), steps, strict=True):
            tensors = [
                payload_of("hidden_states", hidden_states[index : index + 1]),
                payload_of("encoder_hidden_states", encoder_hidden_states[index : index + 1]),
            ]
            start = dit_pb2.ForwardStart(component=self.name, timestep=float(step))
            answer = self._system.run(self._core.dit.forward(start, tensors))
            velocity[index] = answer.to_torch()[0]
        return velocity


class VaeHandle(ComponentHandle):
    """Latents to video."""

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Decode (B, C, F, H, W) latents in the model's normalised space, any float type.

        Returns:
            (B, 3, frames, height, width) float32 in [-1, 1], on the CPU.
        """
        if latent.ndim != 5 or not len(latent):
            raise InvalidRequestError.of(
                "latent", f"shape {tuple(latent.shape)}: must be (B, C, F, H, W), B >= 1"
            )
        videos = [
            self._system.run(self._core.vae.decode_tensor(payload_of("latents", one))).to_torch()
            for one in (latent[i : i + 1] for i in range(len(latent)))
        ]
        video = videos[0].new_empty((len(videos), *videos[0].shape[1:]))
        for index, one in enumerate(videos):
            video[index] = one[0]
        return video


class SchedulerHandle(Handle):
    """Whose turn it is."""

    def schedule(self) -> str | None:
        """The id of the task to run next; None when nobody waits or no place is free.

        The task's place is taken until its step has run.
        """
        return self._system.run(soon(self._core.scheduler.schedule))

    @property
    def queue_length(self) -> int:
        """Number of tasks whose first stage has not begun."""
        return self._system.run(soon(lambda: self._core.scheduler.queue_length))


class GeneratorHandle(Handle):
    """Moves tasks on."""

    def generate_step(self, task: Task | str) -> None:
        """Run the next stage of a task, or its next slice of denoise steps.

        Args:
            task: the task, or its id.

        Raises:
            NotFoundError: no such task.
            PreconditionError: it has ended, or a step of it is running.
            ChituError: the step failed, and with it the task.
        """
        core = self._core
        self._system.run(core.runner.step(core.store.get(task) if isinstance(task, str) else task))


@dataclass(frozen=True)
class DiffusionAttnBackend:
    """Self-attention of the pool."""

    type: str
    """The kernel that runs: "sdpa", "flash_attn", ..."""


class FlexCacheManager(Handle):
    """Feature reuse of the pool; there is one only where it is enabled."""

    @property
    def strategy(self) -> str:
        """Its name: "teacache", "pab", ..."""
        return self._status().params.strategy

    @property
    def params(self) -> dit_pb2.FlexCacheParams:
        """The strategy's parameters."""
        return self._status().params

    @property
    def memory_bytes(self) -> int:
        """Bytes of features that are kept now, over all ranks."""
        return self._status().memory_bytes

    def _status(self) -> dit_pb2.FlexCacheStatus:
        pool = self._system.run(self._core.dit.pool())
        if not pool.HasField("flexcache"):
            raise NotFoundError("the pool does not reuse features any more")
        return pool.flexcache


@dataclass(frozen=True)
class MemoryReport:
    """Memory of every process, and where each component lives."""

    processes: tuple[component_pb2.ProcessMemory, ...]
    components: tuple[component_pb2.Component, ...]

    def __str__(self) -> str:
        lines = [
            f"{p.process}: resident {_gb(p.rss_bytes)} (peak {_gb(p.peak_rss_bytes)}), "
            f"allocated {_gb(p.allocated_bytes)}, reserved {_gb(p.reserved_bytes)}, "
            f"max allocated {_gb(p.max_allocated_bytes)}"
            for p in self.processes
        ]
        return "\n".join(
            [*lines, *(f"{c.name}: {_gb(c.weight_bytes)} on {c.device}" for c in self.components)]
        )


def _gb(count: int) -> str:
    return f"{count / 1024**3:.2f} GB"


async def soon(call: Callable[[], T]) -> T:
    """A plain call, on the event loop that owns what it touches."""
    return call()

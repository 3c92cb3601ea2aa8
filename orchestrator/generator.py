"""One step of a task: a stage, or a slice of its denoise steps."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from chitu_diffusion import __version__
from chitu_diffusion.errors import ChituError, ComponentError, DataLossError
from chitu_diffusion.v1 import component_pb2, dit_pb2, vae_pb2
from chitu_diffusion.v1 import generation_pb2 as pb
from chitu_diffusion.wire import Payload, TensorReceiver, payload_of
from orchestrator.artifacts import ArtifactStore
from orchestrator.components import DitPool, Encoded, TextEncoder, Vae
from orchestrator.placement import Placement
from orchestrator.task import DECODE, DENOISE, ENCODE, Task

log = logging.getLogger(__name__)


class Generator:
    """Moves tasks on through the components."""

    def __init__(
        self,
        encoder: TextEncoder,
        dits: Sequence[DitPool],
        vae: Vae,
        artifacts: ArtifactStore,
        slice_steps: int = 0,
    ) -> None:
        """Take the components.

        Args:
            encoder: prompts to embeddings.
            dits: the pool of all steps, or that of the high-noise expert and that of the low-noise
                one.
            vae: latents to video.
            artifacts: where videos go.
            slice_steps: denoise steps in a slice, 0 = all of the task that one pool can do.
        """
        self._encoder, self._dits, self._vae = encoder, tuple(dits), vae
        self._artifacts = artifacts
        self._slice_steps = slice_steps
        self.placements: dict[DitPool, Placement] = {}
        """How tasks are placed on each pool, once it is known."""
        self._holders: dict[str, DitPool] = {}
        """The pool that has the state of a task."""
        self._releases: set[asyncio.Task[None]] = set()

    async def generate_step(self, task: Task) -> None:
        """Run the task's stage, or its next slice, and set the stage that follows.

        Raises:
            ChituError: the stage failed; the task is as before it.
        """
        task.start()
        if task.stage == ENCODE:
            await self._encode(task)
        elif task.stage == DENOISE:
            await self._denoise(task)
        else:
            await self._decode(task)

    async def _encode(self, task: Task) -> None:
        task.emit(encoding=pb.Encoding())
        began = time.monotonic()
        texts = [task.params.prompt]
        if _uses_guidance(task.params):
            texts.append(task.params.negative_prompt)
        encoded, report = await self._encoder.encode(texts)
        task.report.prompt.CopyFrom(_prompt_report(encoded[0]))
        task.work.prompt_embeds = encoded[0].embeds
        if len(encoded) > 1:
            task.report.negative_prompt.CopyFrom(_prompt_report(encoded[1]))
            task.work.negative_prompt_embeds = encoded[1].embeds
        for item, name in zip(encoded, ("prompt", "negative_prompt"), strict=False):
            if item.info.truncated:
                task.report.warnings.append(
                    f"{name} has {item.info.token_count} tokens: only the first "
                    f"{item.info.length} were used"
                )
        _add_timing(task, ENCODE, time.monotonic() - began, report)
        task.stage = DENOISE

    def forget(self, task: Task) -> None:
        """Have the state freed that a task has left in a pool; for tasks that have ended."""
        holder = self._holders.pop(task.id, None)
        if holder is not None:
            release = asyncio.create_task(_release(holder, task.id))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _denoise(self, task: Task) -> None:
        dit, start = await self._slice(task)
        self._holders.pop(task.id, None)
        if start.first_step == 0:
            task.emit(denoising=pb.Denoising(step=0, of=start.params.num_inference_steps))
        began = time.monotonic()
        results = _Results()
        tensors = [
            payload_of(name, embeds)
            for name, embeds in (
                ("prompt_embeds", task.work.prompt_embeds),
                ("negative_prompt_embeds", task.work.negative_prompt_embeds),
            )
            if embeds is not None
        ]
        tensors += task.work.state_tensors
        async with contextlib.aclosing(dit.denoise(start, tensors)) as responses:
            async for response in responses:
                if response.HasField("step"):
                    _on_step(task, response.step, time.monotonic() - began, start.first_step)
                else:
                    results.take(response)
        done = results.checked(start)
        if start.keep_state:
            self._holders[task.id] = dit
        task.work.next_step = done.next_step
        task.work.latents = results.latents
        task.work.solver_state = results.solver_state
        task.work.state_tensors = tuple(results.state_tensors)
        task.params.attn_type = task.report.params.attn_type = done.attn_type
        _add_timing(task, DENOISE, time.monotonic() - began, done.report)
        if start.return_latents:
            task.stage = DECODE

    async def _slice(self, task: Task) -> tuple[DitPool, dit_pb2.DenoiseStart]:
        """The next steps of a task, and the pool that does them."""
        params = _denoise_params(task.params)
        first, steps = task.work.next_step, params.num_inference_steps
        dit, last = await self._pool_for(params, first)
        end = min(first + self._slice_steps, last) if self._slice_steps else last
        handed_over = end == last < steps
        start = dit_pb2.DenoiseStart(
            task_id=task.id,
            attempt=task.attempt,
            params=params,
            first_step=first,
            end_step=end,
            source=dit_pb2.LATENT_SOURCE_HELD if first else dit_pb2.LATENT_SOURCE_NOISE,
            keep_state=end < last,
            return_latents=end == steps,
            return_checkpoint=handed_over,
        )
        if task.work.solver_state is not None:
            start.source = dit_pb2.LATENT_SOURCE_CHECKPOINT
            start.solver_state.CopyFrom(task.work.solver_state)
        placement = self.placements.get(dit)
        layout = placement.layout(_uses_guidance(task.params)) if placement else None
        if layout is not None:
            start.layout.CopyFrom(layout)
        return dit, start

    async def _pool_for(self, params: dit_pb2.DenoiseParams, step: int) -> tuple[DitPool, int]:
        """The pool that does a step, and the first step behind it that it does not do."""
        steps = params.num_inference_steps
        if len(self._dits) == 1:
            return self._dits[0], steps
        plan = await self._dits[0].plan(params)
        low = [each.step for each in plan.steps if each.expert == dit_pb2.EXPERT_LOW_NOISE]
        boundary = low[0] if low else steps
        return (self._dits[0], boundary) if step < boundary else (self._dits[1], steps)

    async def _decode(self, task: Task) -> None:
        if task.work.latents is None:
            raise ComponentError("there are no latents to decode")
        began = time.monotonic()
        start = vae_pb2.DecodeStart(
            task_id=task.id,
            output_format=task.params.output_format,
            fps=task.params.fps,
            metadata=_metadata(task.params),
        )
        done: vae_pb2.DecodeDone | None = None
        async with (
            contextlib.aclosing(self._vae.decode(start, task.work.latents)) as responses,
            self._artifacts.writer(task.id) as writer,
        ):
            async for response in _progress_only(task, responses):
                if response.HasField("chunk"):
                    await writer.write(response.chunk.data)
                elif response.HasField("done"):
                    done = response.done
            if done is None:
                raise ComponentError("the VAE ended without its result")
            if (writer.size, writer.sha256) != (done.video.byte_size, done.video.sha256):
                raise DataLossError("the video file was damaged between the VAE and here")
        _add_timing(task, DECODE, time.monotonic() - began, done.report)
        task.finish(done.video)


class _Results:
    """What a slice gives back besides its steps."""

    def __init__(self) -> None:
        self.latents: Payload | None = None
        self.solver_state: dit_pb2.SolverState | None = None
        self.state_tensors: list[Payload] = []
        self._done: dit_pb2.DenoiseDone | None = None
        self._receiver = TensorReceiver()

    def take(self, response: dit_pb2.DenoiseResponse) -> None:
        """Take a message."""
        if response.HasField("checkpoint"):
            self.solver_state, self.state_tensors = response.checkpoint.solver_state, []
        elif response.HasField("done"):
            self._done = response.done
        elif (payload := self._receiver.feed(response.tensor)) is not None:
            if self.solver_state is None:
                self.latents = payload
            else:
                self.state_tensors.append(payload)

    def checked(self, start: dit_pb2.DenoiseStart) -> dit_pb2.DenoiseDone:
        """The end of the slice; `ComponentError` if something that was asked for did not come."""
        missing = (start.return_latents and self.latents is None) or (
            start.return_checkpoint and not self.state_tensors
        )
        if self._done is None or missing:
            raise ComponentError("the DiT pool ended a slice without its result")
        return self._done


async def _release(dit: DitPool, task_id: str) -> None:
    try:
        await dit.release(task_id)
    except ChituError as error:  # the pool drops what is old by itself
        log.info("task %s: its state was not released: %s", task_id, error)


async def _progress_only(
    task: Task, responses: AsyncIterator[vae_pb2.DecodeResponse]
) -> AsyncIterator[vae_pb2.DecodeResponse]:
    """Turn progress into events, pass the rest on."""
    async for response in responses:
        if response.HasField("progress"):
            progress = response.progress
            task.emit(decoding=pb.Decoding(frame=progress.frame, of=progress.of))
        elif response.HasField("muxing"):
            task.emit(muxing=pb.Muxing())
        else:
            yield response


def _on_step(task: Task, step: dit_pb2.StepReport, elapsed: float, first_step: int) -> None:
    task.report.steps.append(step)
    done = step.step + 1
    rate = elapsed / (done - first_step)
    task.emit(
        denoising=pb.Denoising(
            step=done,
            of=step.of,
            sigma=step.sigma,
            expert=step.expert,
            reused=step.reused,
            eta_s=rate * (step.of - done),
        )
    )


def _uses_guidance(params: pb.GenerationParams) -> bool:
    """Whether any step runs the negative branch."""
    return max(params.guidance_scale, params.guidance_scale_high) > 1


def _denoise_params(params: pb.GenerationParams) -> dit_pb2.DenoiseParams:
    message = dit_pb2.DenoiseParams(
        num_frames=params.num_frames,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        flow_shift=params.flow_shift,
        solver=params.solver,
        seed=params.seed,
    )
    if params.HasField("boundary_ratio"):
        message.boundary_ratio = params.boundary_ratio
        message.guidance_scale_high = params.guidance_scale_high
    return message


def _metadata(params: pb.GenerationParams) -> dict[str, str]:
    """For the file. The prompt itself stays out: a hash lets its owner recognise it."""
    return {
        "model": params.model,
        "seed": str(params.seed),
        "prompt_sha256": hashlib.sha256(params.prompt.encode()).hexdigest(),
        "version": __version__,
    }


def _prompt_report(encoded: Encoded) -> pb.PromptReport:
    info = encoded.info
    return pb.PromptReport(
        token_count=info.token_count, truncated=info.truncated, cached=info.cached
    )


def _add_timing(
    task: Task, stage: pb.Stage.ValueType, seconds: float, service: component_pb2.StageReport
) -> None:
    """Record a stage; the slices of a denoise add up."""
    timing = next((t for t in task.report.stages if t.stage == stage), None)
    if timing is None:
        task.report.stages.append(pb.StageTiming(stage=stage, seconds=seconds, service=service))
        return
    timing.seconds += seconds
    service.seconds += timing.service.seconds
    service.waited_seconds += timing.service.waited_seconds
    timing.service.CopyFrom(service)

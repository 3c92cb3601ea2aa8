"""One decode as a run of answers, each made when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeAlias

import torch

from chitu_diffusion.config.schema import VaeConfig
from chitu_diffusion.errors import OutOfMemoryError
from chitu_diffusion.v1 import vae_pb2
from chitu_diffusion.wire import tensor_parts
from services.vae.video import VideoFormat, VideoWriter, to_uint8
from services.vae.wan_vae import WanVae

Batch: TypeAlias = list[vae_pb2.DecodeResponse]


class DecodeJob:
    """Decodes one call's latents. `advance` and `close` belong to the worker thread.

    Nothing is computed ahead, so what waits to be sent is at most one latent frame's answers.
    """

    def __init__(
        self,
        vae: WanVae,
        config: VaeConfig,
        start: vae_pb2.DecodeStart,
        latents: torch.Tensor,
    ) -> None:
        """Take a checked request; `latents` are (1, channels, F, H, W) float32."""
        self._vae = vae
        self._config = config
        self._start = start
        self._shape = tuple(latents.shape)
        self._frames = vae.num_frames(latents.shape[2])
        # Only the generator holds the latents, so that `close` frees them whoever still holds the
        # job: gRPC keeps a failed call's frames until the next call arrives.
        self._batches = self._run(latents)
        self.seconds = 0.0
        """Time worked so far."""
        self.video: vae_pb2.VideoInfo | None = None
        """Facts about the file, once it is complete."""

    def advance(self) -> Batch | None:
        """Return the next answers: of a latent frame, a part of a tensor, the end; None at the end.

        Raises:
            ComponentError: the decoder or the video encoder failed.
            OutOfMemoryError: everything this job had taken is freed.
        """
        began = time.perf_counter()
        try:
            return next(self._batches, None)
        except torch.OutOfMemoryError as error:
            message = str(error)
        finally:
            self.seconds += time.perf_counter() - began
        # Outside of `except`: the caught error's traceback would keep the tensors alive.
        raise OutOfMemoryError(f"vae: {self._shape} latents: {message}")

    def close(self) -> None:
        """Drop all state, wherever the work stands."""
        self._batches.close()

    def _run(self, latents: torch.Tensor) -> Generator[Batch, None, None]:
        if self._start.output_format == "tensor":
            return self._run_tensor(latents)
        return self._run_mp4(latents)

    def _run_mp4(self, latents: torch.Tensor) -> Generator[Batch, None, None]:
        chunks: Batch = []

        def emit(offset: int, data: bytes) -> None:
            chunk = vae_pb2.FileChunk(offset=offset, data=data)
            chunks.append(vae_pb2.DecodeResponse(chunk=chunk))

        writer = VideoWriter(emit, self._format(), self._start.metadata)
        try:
            done = 0
            for frames in self._vae.decode(latents):
                writer.write(to_uint8(frames))
                done += frames.shape[2]
                yield [self._progress(done), *_take(chunks)]
            yield [vae_pb2.DecodeResponse(muxing=vae_pb2.MuxProgress())]
            self.video = writer.finish()
            yield _take(chunks)
        finally:
            writer.abort()

    def _run_tensor(self, latents: torch.Tensor) -> Generator[Batch, None, None]:
        """Collect all frames first: rows of the tensor run through the whole video."""
        height, width = self._size()
        video = torch.empty(1, 3, self._frames, height, width)
        done = 0
        for frames in self._vae.decode(latents):
            video[:, :, done : done + frames.shape[2]] = frames
            done += frames.shape[2]
            yield [self._progress(done)]
        for part in tensor_parts("frames", video):
            yield [vae_pb2.DecodeResponse(tensor=part)]

    def _progress(self, done: int) -> vae_pb2.DecodeResponse:
        return vae_pb2.DecodeResponse(progress=vae_pb2.DecodeProgress(frame=done, of=self._frames))

    def _size(self) -> tuple[int, int]:
        stride = self._vae.spatial_stride
        return self._shape[3] * stride, self._shape[4] * stride

    def _format(self) -> VideoFormat:
        height, width = self._size()
        return VideoFormat(
            height=height,
            width=width,
            fps=self._start.fps,
            crf=self._config.crf,
            preset=self._config.preset,
        )


def _take(chunks: Batch) -> Batch:
    taken = chunks[:]
    chunks.clear()
    return taken

"""Frames to an MP4 file whose bytes leave while it is being made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import torch

from chitu_diffusion.errors import ComponentError
from chitu_diffusion.v1 import vae_pb2

MAX_CHUNK_BYTES = 1 << 20

Frames = npt.NDArray[np.uint8]
"""(F, H, W, 3) uint8, full-range RGB."""

# The fragments follow each other strictly, so nothing ever seeks back. `delay_moov` puts the header
# behind the first packets: only then can it hold the edit list that makes the video start at 0.
_MOVFLAGS = "frag_keyframe+delay_moov+default_base_moof+use_metadata_tags"
# Output depends on the number of threads: with a fixed one, equal frames give equal bytes.
_THREADS = 4
_KEYFRAME_SECONDS = 2
# ISO/IEC 23091-2: BT.709 as matrix, primaries and transfer. The range is FFmpeg's own number.
_BT709 = 1
_LIMITED = 1


@dataclass(frozen=True)
class VideoFormat:
    """What the file shall be."""

    height: int
    """Pixels, even."""
    width: int
    """Pixels, even."""
    fps: int
    """Frames per second, >= 1."""
    crf: int
    """Quality, 0 (best) to 51."""
    preset: str
    """Effort of x264, "ultrafast" to "veryslow"."""


def to_uint8(frames: torch.Tensor) -> Frames:
    """Pixels in [-1, 1] to grey levels, rounded to the nearest as diffusers' VideoProcessor does.

    Args:
        frames: (1, 3, F, H, W) floating point.

    Returns:
        (F, H, W, 3) uint8.
    """
    levels = (frames[0].float() * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    array: Frames = levels.permute(1, 2, 3, 0).contiguous().cpu().numpy()
    return array


class _Sink:
    """The file as FFmpeg sees it: it can only be appended to."""

    def __init__(self, emit: Callable[[int, bytes], None]) -> None:
        self._emit = emit
        self._digest = hashlib.sha256()
        self.size = 0
        self.dropped = False

    def write(self, data: bytes) -> int:
        for begin in range(0, 0 if self.dropped else len(data), MAX_CHUNK_BYTES):
            chunk = bytes(data[begin : begin + MAX_CHUNK_BYTES])
            self._digest.update(chunk)
            self._emit(self.size, chunk)
            self.size += len(chunk)
        return len(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class VideoWriter:
    """Encodes frames as H.264 in a fragmented MP4 file. Belongs to one thread."""

    def __init__(
        self,
        emit: Callable[[int, bytes], None],
        video: VideoFormat,
        metadata: Mapping[str, str],
    ) -> None:
        """Open the encoder.

        Args:
            emit: takes (offset, bytes) in order, without gaps, at most 1 MiB each.
            video: what the file shall be.
            metadata: written into the file; any non-empty key, no NUL characters.

        Raises:
            ComponentError: the encoder refuses the format.
        """
        self._video = video
        self._sink = _Sink(emit)
        self._count = 0
        try:
            self._container: Any = av.open(
                self._sink,
                "w",
                format="mp4",
                options={"movflags": _MOVFLAGS},
                buffer_size=MAX_CHUNK_BYTES,
            )
            self._container.metadata.update(dict(sorted(metadata.items())))
            self._stream = _add_stream(self._container, video)
        except (av.FFmpegError, ValueError) as error:
            raise ComponentError(f"video encoder: cannot write {video}: {error}") from error

    def write(self, frames: Frames) -> None:
        """Add frames (F, H, W, 3) of the size of the file.

        Raises:
            ComponentError: another size, or the encoder failed.
        """
        expected = (self._video.height, self._video.width, 3)
        if frames.shape[1:] != expected:
            raise ComponentError(f"video encoder: frames {frames.shape[1:]}, file {expected}")
        for frame in frames:
            self._encode(_to_yuv(frame, self._count))
            self._count += 1

    def finish(self) -> vae_pb2.VideoInfo:
        """Encode what is left and complete the file; returns facts about it.

        Raises:
            ComponentError: no frame was written, or the encoder failed.
        """
        if not self._count:
            raise ComponentError("video encoder: no frames")
        self._encode(None)
        try:
            self._container.close()
        except av.FFmpegError as error:
            raise ComponentError(f"video encoder: cannot complete the file: {error}") from error
        return vae_pb2.VideoInfo(
            content_type="video/mp4",
            byte_size=self._sink.size,
            sha256=self._sink.sha256,
            num_frames=self._count,
            height=self._video.height,
            width=self._video.width,
            fps=self._video.fps,
            codec="h264",
        )

    def abort(self) -> None:
        """Free the encoder and emit nothing more. Does nothing after `finish`."""
        self._sink.dropped = True
        self._container.close()

    def _encode(self, frame: Any) -> None:
        try:
            for packet in self._stream.encode(frame):
                self._container.mux(packet)
        except av.FFmpegError as error:
            raise ComponentError(f"video encoder: frame {self._count}: {error}") from error


def _add_stream(container: Any, video: VideoFormat) -> Any:
    options = {
        "crf": str(video.crf),
        "preset": video.preset,
        "threads": str(_THREADS),
        # x264's AVX-512 code encodes equal frames differently, up to once in four runs. This keeps
        # to routines that agree on every processor, at the same speed.
        "x264-params": "cpu-independent=1",
    }
    stream = container.add_stream("libx264", rate=video.fps, options=options)
    stream.width, stream.height, stream.pix_fmt = video.width, video.height, "yuv420p"
    context = stream.codec_context
    context.thread_type = "FRAME"  # slices would cost quality
    context.gop_size = _KEYFRAME_SECONDS * video.fps
    context.time_base = Fraction(1, video.fps)
    # Without these tags players guess the matrix from the size, and small videos change colour.
    context.colorspace = context.color_primaries = context.color_trc = _BT709
    context.color_range = _LIMITED
    return stream


def _to_yuv(frame: Frames, index: int) -> Any:
    """Full-range RGB to limited-range BT.709, as the stream is tagged."""
    rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
    yuv = rgb.reformat(
        format="yuv420p",
        src_colorspace="ITU709",
        dst_colorspace="ITU709",
        src_color_range="JPEG",
        dst_color_range="MPEG",
    )
    yuv.pts = index
    return yuv

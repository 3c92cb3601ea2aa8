from __future__ import annotations

import hashlib
import io

import av
import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor

from chitu_diffusion.errors import ComponentError
from chitu_diffusion.v1 import vae_pb2
from services.vae.video import Frames, VideoFormat, VideoWriter, to_uint8

FORMAT = VideoFormat(height=48, width=80, fps=16, crf=18, preset="veryfast")
METADATA = {"seed": "42", "prompt": 'a café, 红色 = "odd"; \n two lines', "title": "x"}


def noise(count: int, height: int = 48, width: int = 80, seed: int = 0) -> Frames:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def flat(count: int, colour: tuple[int, int, int]) -> Frames:
    return np.full((count, 48, 80, 3), colour, dtype=np.uint8)


def encode(
    frames: Frames, video: VideoFormat = FORMAT, metadata: dict[str, str] | None = None
) -> tuple[bytes, vae_pb2.VideoInfo, list[int]]:
    """The file, its facts, and the sizes of the chunks it came in."""
    data, sizes = bytearray(), []

    def emit(offset: int, chunk: bytes) -> None:
        assert offset == len(data)
        data.extend(chunk)
        sizes.append(len(chunk))

    writer = VideoWriter(emit, video, metadata or {})
    writer.write(frames)
    info = writer.finish()
    return bytes(data), info, sizes


def decode(data: bytes) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(data)) as container:
        return list(container.decode(video=0))


def test_rounds_as_diffusers_does() -> None:
    generator = torch.Generator().manual_seed(0)
    video = torch.rand(1, 3, 3, 16, 24, generator=generator) * 2.2 - 1.1
    halves = (torch.arange(256) / 255 * 2 - 1).view(1, 1, 1, 16, 16).expand(1, 3, 1, 16, 16)
    for frames in (video, halves, halves + 1 / 255):
        expected = VideoProcessor().postprocess_video(frames, output_type="pil")[0]
        levels = to_uint8(frames)
        assert levels.shape == (frames.shape[2], *frames.shape[3:], 3)
        assert np.array_equal(levels, np.stack([np.asarray(image) for image in expected]))


@pytest.mark.parametrize(("count", "fps"), [(1, 16), (5, 1), (17, 24), (81, 120)])
def test_size_frames_and_rate_read_back(count: int, fps: int) -> None:
    video = VideoFormat(height=48, width=80, fps=fps, crf=18, preset="veryfast")
    data, info, _ = encode(noise(count), video)
    frames = decode(data)
    assert len(frames) == info.num_frames == count
    assert {(frame.height, frame.width) for frame in frames} == {(48, 80)}
    assert [round(frame.time * fps, 3) for frame in frames] == list(range(count))
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert (stream.height, stream.width) == (info.height, info.width) == (48, 80)
        assert stream.guessed_rate == info.fps == fps
        assert stream.codec_context.name == info.codec == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert container.duration == pytest.approx(count / fps * 1e6, rel=0.01)
    assert info.content_type == "video/mp4"
    assert info.byte_size == len(data)
    assert info.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "colour",
    [
        (255, 0, 0),
        (0, 255, 0),
        (0, 0, 255),
        (128, 128, 128),
        (0, 0, 0),
        (255, 255, 255),
        (200, 90, 30),
    ],
)
def test_flat_colours_survive(colour: tuple[int, int, int]) -> None:
    frame = decode(encode(flat(3, colour))[0])[1]
    assert frame.to_ndarray(format="rgb24").mean((0, 1)) == pytest.approx(colour, abs=3)


@pytest.mark.parametrize(
    ("colour", "planes"),
    [
        # Rec. ITU-R BT.709, 8 bits, limited range: what any player is told to invert.
        ((255, 0, 0), (63, 102, 240)),
        ((0, 255, 0), (173, 42, 26)),
        ((0, 0, 255), (32, 240, 118)),
        ((255, 255, 255), (235, 128, 128)),
        ((0, 0, 0), (16, 128, 128)),
    ],
)
def test_stored_as_tagged_limited_bt709(
    colour: tuple[int, int, int], planes: tuple[int, int, int]
) -> None:
    frame = decode(encode(flat(1, colour))[0])[0]
    stored = [np.frombuffer(plane, np.uint8)[0] for plane in frame.planes]
    assert stored == pytest.approx(planes, abs=1)
    assert (frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range) == (
        1,
        1,
        1,
        1,
    )


def test_pictures_survive_in_place_and_order() -> None:
    frames = flat(9, (0, 0, 0))
    for index in range(9):
        frames[index, 8:24, 8 * index : 8 * index + 8] = 255
    for index, frame in enumerate(decode(encode(frames)[0])):
        got = frame.to_ndarray(format="rgb24").astype(int)
        assert np.abs(got - frames[index]).mean() < 3


def test_metadata_reads_back() -> None:
    data, _, _ = encode(noise(2), metadata=METADATA)
    with av.open(io.BytesIO(data)) as container:
        assert METADATA.items() <= dict(container.metadata).items()


def test_equal_frames_give_equal_bytes() -> None:
    # Large enough for several threads, and many enough frames for all of them.
    video = VideoFormat(height=256, width=256, fps=16, crf=18, preset="veryfast")
    frames = noise(8, 256, 256)
    first, _, _ = encode(frames, video, METADATA)
    again, _, _ = encode(frames, video, dict(reversed(METADATA.items())))
    other, _, _ = encode(noise(8, 256, 256, seed=1), video, METADATA)
    assert first == again
    assert first != other
    # x264 writes its settings into the file: not the number of cores, and no slices.
    assert b" threads=4 " in first
    assert b" sliced_threads=0 " in first


def test_bytes_leave_before_the_end_in_bounded_chunks() -> None:
    left: list[int] = []
    video = VideoFormat(height=256, width=256, fps=6, crf=0, preset="ultrafast")
    writer = VideoWriter(lambda offset, chunk: left.append(len(chunk)), video, {})
    frames = noise(40, 256, 256)
    writer.write(frames[:20])
    early = sum(left)
    writer.write(frames[20:])
    info = writer.finish()
    assert 1 << 20 < early < info.byte_size
    assert max(left) == 1 << 20  # a fragment of 12 frames of noise is larger
    assert sum(left) == info.byte_size


def test_quality_setting_is_used() -> None:
    coarse = VideoFormat(height=48, width=80, fps=16, crf=45, preset="veryfast")
    assert encode(noise(5), coarse)[1].byte_size < encode(noise(5))[1].byte_size / 2


def test_nothing_is_emitted_after_an_abort() -> None:
    left: list[bytes] = []
    writer = VideoWriter(lambda offset, chunk: left.append(chunk), FORMAT, {})
    writer.write(noise(3))
    before = len(left)
    writer.abort()
    writer.abort()
    assert len(left) == before


def test_abort_after_finish_changes_nothing() -> None:
    left: list[bytes] = []
    writer = VideoWriter(lambda offset, chunk: left.append(chunk), FORMAT, {})
    writer.write(noise(3))
    info = writer.finish()
    writer.abort()
    assert sum(map(len, left)) == info.byte_size


def test_frames_of_another_size_are_refused() -> None:
    writer = VideoWriter(lambda offset, chunk: None, FORMAT, {})
    with pytest.raises(ComponentError, match="frames"):
        writer.write(noise(1, 80, 48))
    writer.abort()


def test_an_empty_file_is_refused() -> None:
    writer = VideoWriter(lambda offset, chunk: None, FORMAT, {})
    with pytest.raises(ComponentError, match="no frames"):
        writer.finish()
    writer.abort()


def test_a_format_the_encoder_refuses_is_named() -> None:
    odd = VideoFormat(height=47, width=80, fps=16, crf=18, preset="veryfast")
    with pytest.raises(ComponentError, match="video encoder"):
        encode(noise(1, 47, 80), odd)

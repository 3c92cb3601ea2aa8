from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError, ComponentError
from services.vae.wan_vae import WanVae
from tests.vae.conftest import make_latents

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def vae(ckpt_dir: Path) -> WanVae:
    return WanVae.load(ckpt_dir, CPU, torch.float32)


def whole_decode(reference: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """What WanPipeline does with its final latents."""
    mean = torch.tensor(reference.config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(reference.config.latents_std).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        return reference.decode(latents / std + mean, return_dict=False)[0]


@pytest.mark.parametrize(
    ("frames", "height", "width"), [(1, 4, 4), (2, 4, 4), (5, 4, 4), (3, 6, 10), (2, 9, 4)]
)
def test_streaming_is_bit_equal_with_diffusers(
    frames: int, height: int, width: int, vae: WanVae, reference: AutoencoderKLWan
) -> None:
    latents = make_latents(frames, height, width)
    pieces = list(vae.decode(latents))
    assert [piece.shape[2] for piece in pieces] == [1] + [4] * (frames - 1)
    video = torch.cat(pieces, dim=2)
    assert video.shape == (1, 3, vae.num_frames(frames), 8 * height, 8 * width)
    assert video.dtype == torch.float32
    assert video.std() > 0.1
    assert torch.equal(video, whole_decode(reference, latents))


def test_pixels_are_clamped(vae: WanVae) -> None:
    video = torch.cat(list(vae.decode(10 * make_latents(2))), dim=2)
    assert (video.min(), video.max()) == (-1, 1)


def test_two_decodes_may_take_turns(vae: WanVae) -> None:
    first, second = make_latents(4, seed=1), make_latents(4, 6, 4, seed=2)
    turns = list(zip(vae.decode(first), vae.decode(second), strict=True))
    mixed = [torch.cat(pieces, dim=2) for pieces in zip(*turns, strict=True)]
    assert torch.equal(mixed[0], torch.cat(list(vae.decode(first)), dim=2))
    assert torch.equal(mixed[1], torch.cat(list(vae.decode(second)), dim=2))


def test_an_abandoned_decode_leaves_no_trace(vae: WanVae) -> None:
    latents = make_latents(3)
    expected = torch.cat(list(vae.decode(latents)), dim=2)
    abandoned = vae.decode(make_latents(3, seed=9))
    next(abandoned)
    next(abandoned)
    abandoned.close()
    assert torch.equal(torch.cat(list(vae.decode(latents)), dim=2), expected)


def test_each_latent_frame_is_computed_when_asked_for(
    vae: WanVae, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    decode_frame = vae._decode_frame
    monkeypatch.setattr(
        vae, "_decode_frame", lambda *args: calls.append(args[2]) or decode_frame(*args)
    )
    pieces = vae.decode(make_latents(3))
    assert calls == []
    next(pieces)
    assert calls == [0]
    next(pieces)
    assert calls == [0, 1]


def test_bfloat16_is_near_float32(vae: WanVae, ckpt_dir: Path) -> None:
    half = WanVae.load(ckpt_dir, CPU, torch.bfloat16)
    latents = make_latents(2)
    exact = torch.cat(list(vae.decode(latents)), dim=2)
    video = torch.cat(list(half.decode(latents)), dim=2)
    assert video.dtype == torch.float32
    psnr = 10 * torch.log10(4 / (video - exact).square().mean())
    assert psnr > 30
    assert half.weight_bytes == 2 * half.parameter_count


def test_only_the_decoder_is_held(vae: WanVae, reference: AutoencoderKLWan) -> None:
    parts = (reference.decoder, reference.post_quant_conv)
    count = sum(parameter.numel() for part in parts for parameter in part.parameters())
    assert vae.parameter_count == count
    assert vae.weight_bytes == 4 * count
    assert {parameter.device for parameter in vae._parts.parameters()} == {CPU}


def test_pixels_that_are_not_finite_are_an_error(ckpt_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(ckpt_dir / "vae", tmp_path / "vae")
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["decoder.conv_out.bias"][1] = torch.inf
    save_file(weights, file)
    broken = WanVae.load(tmp_path, CPU, torch.float32)
    with pytest.raises(ComponentError, match="latent frame 0 are not finite"):
        next(broken.decode(make_latents(1)))


def test_missing_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"vae.config\.json: not found"):
        WanVae.load(tmp_path, CPU, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "must be 'AutoencoderKLWan'"),
        ({"patch_size": 2}, "patch_size=2"),
        ({"latents_mean": [0.0]}, "latents_mean has 1 values, z_dim=16"),
        ({"base_dim": 8}, "does not fit the model"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    change: dict[str, object], message: str, ckpt_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(ckpt_dir / "vae", tmp_path / "vae")
    file = tmp_path / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        WanVae.load(tmp_path, CPU, torch.float32)


def test_a_decode_follows_the_model(vae: WanVae, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []
    to = torch.Tensor.to
    pieces = vae.decode(make_latents(3))
    next(pieces)
    # A second CPU stands in for an accelerator: what the decode keeps must be asked to move there.
    other = torch.device("cpu", 0)
    vae.to(other)

    def recorded(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        if arguments == (other,):
            moved.append(tensor)
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    next(pieces)
    monkeypatch.undo()
    vae.to(CPU)
    cached = [tensor for tensor in moved if tensor.ndim == 5]
    assert len(cached) > 10
    assert len(list(pieces)) == 1


def test_all_tensors_move(ckpt_dir: Path) -> None:
    vae = WanVae.load(ckpt_dir, CPU, torch.float32)
    vae.to(torch.device("meta"))
    assert vae.device.type == "meta"
    tensors = [*vae._parts.state_dict().values(), vae._mean, vae._std]
    assert {tensor.device.type for tensor in tensors} == {"meta"}

"""Text encoder and VAE move between a CUDA device and host memory, and work where they are."""

from pathlib import Path

import pytest
import torch

from services.encoder.umt5 import TextEncoder
from services.vae.wan_vae import WanVae
from tests.e2e.conftest import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TINY = ROOT / "assets" / "tiny-wan"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_text_encoder() -> None:
    encoder = TextEncoder.load(Path(TINY), CUDA, torch.float32)
    (there,) = encoder.encode([[5, 9, 1]])
    before = torch.cuda.memory_allocated()
    encoder.to(CPU)
    assert torch.cuda.memory_allocated() < before
    (here,) = encoder.encode([[5, 9, 1]])
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    encoder.to(CUDA)
    assert torch.equal(encoder.encode([[5, 9, 1]])[0], there)


def test_vae_in_the_middle_of_a_decode() -> None:
    vae = WanVae.load(Path(TINY), CUDA, torch.float32)
    latents = torch.randn(1, 16, 4, 8, 8)
    expected = torch.cat(list(vae.decode(latents)), dim=2)
    pieces = []
    for index, piece in enumerate(vae.decode(latents)):
        pieces.append(piece)
        vae.to((CPU, CUDA)[index % 2])
    torch.testing.assert_close(torch.cat(pieces, dim=2), expected, rtol=1e-3, atol=1e-3)

"""The transformer on a CUDA device: `make test-gpu`."""

import pytest
import torch

from chitu_diffusion.config.schema import TransformerConfig
from services.dit.attention import select
from services.dit.flexcache import NoCache
from services.dit.models.wan.transformer import WanTransformer
from services.dit.models.wan.weights import weight_dtype
from services.dit.parallel import OneRank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Head dimension and width per head as in the published models; few blocks.
CONFIG = TransformerConfig(hidden_size=512, depth=4, num_heads=4, ffn_dim=2048)
GRID = (5, 16, 24)


@pytest.fixture(scope="module")
def model() -> WanTransformer:
    torch.manual_seed(0)
    model = WanTransformer(CONFIG).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.03)
    model.fuse()
    return model


def forward(model, device, dtype, attn_type):
    model = model.to(device)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(weight_dtype(name, dtype))
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(2, CONFIG.text_len, CONFIG.text_dim, generator=generator)
    latents = torch.randn(2, CONFIG.in_channels, *GRID, generator=generator)
    head_dim = CONFIG.hidden_size // CONFIG.num_heads
    with torch.inference_mode():
        constants = model.prepare(embeds, GRID, [999.0, 500.0])
        velocity = model(
            latents.to(device),
            1,
            constants,
            attention=select(attn_type, device, dtype, head_dim, "attn_type"),
            parallel=OneRank(),
            cache=NoCache(),
        )
    return velocity.float().cpu()


def relative(a, b) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"]
)
def test_cuda_agrees_with_the_cpu(model, dtype, bound):
    import copy

    expected = forward(copy.deepcopy(model), torch.device("cpu"), torch.float32, "sdpa")
    got = forward(copy.deepcopy(model), torch.device("cuda", 0), dtype, "sdpa")
    assert relative(got, expected) < bound


def test_flash_attention_agrees_with_sdpa(model):
    import copy

    pytest.importorskip("flash_attn")
    device = torch.device("cuda", 0)
    expected = forward(copy.deepcopy(model), device, torch.bfloat16, "sdpa")
    got = forward(copy.deepcopy(model), device, torch.bfloat16, "flash_attn")
    assert relative(got, expected) < 1e-2

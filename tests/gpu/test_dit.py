"""The transformer and its pool on a CUDA device: `make test-gpu`."""

import copy

import pytest
import torch

from chitu_diffusion import config as configuration
from chitu_diffusion.config.schema import TransformerConfig
from chitu_diffusion.errors import OutOfMemoryError
from services.dit.attention import select
from services.dit.denoiser import DenoiseParams, make_plan
from services.dit.flexcache import NoCache
from services.dit.guidance import Execution, guided_velocity
from services.dit.host import make_pool
from services.dit.jobs import Order, Source
from services.dit.models.wan.transformer import WanTransformer
from services.dit.models.wan.weights import weight_dtype
from services.dit.parallel import Layout
from services.dit.pool import LocalPool
from services.dit.replies import layout_message
from tests.dit.ranks import LAYOUTS
from tests.dit.slices import job, latents, run
from tests.dit.threads import in_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Head dimension and width per head as in the published models; few blocks.
CONFIG = TransformerConfig(hidden_size=512, depth=4, num_heads=4, ffn_dim=2048)
GRID = (5, 14, 22)
TOKENS = 5 * 7 * 11
ONE = Layout()


@pytest.fixture(scope="module")
def model() -> WanTransformer:
    torch.manual_seed(0)
    model = WanTransformer(CONFIG).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.03)
    model.fuse()
    return model


def forward(model, device, dtype, attn_type, layout=ONE):
    """The velocity of two branches, as each rank of a layout has it; ranks are threads here."""
    model = model.to(device)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(weight_dtype(name, dtype))
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(2, CONFIG.text_len, CONFIG.text_dim, generator=generator)
    noise = torch.randn(1, CONFIG.in_channels, *GRID, generator=generator).to(device)
    head_dim = CONFIG.hidden_size // CONFIG.num_heads
    attention = select(attn_type, device, dtype, head_dim, "attn_type")

    def work(share):
        rows = embeds[list(share.branches)]
        constants = model.prepare(rows, GRID, [999.0, 500.0])
        how = Execution(attention, share, NoCache())
        return guided_velocity(model, noise, 1, constants, 5.0, how)

    return [velocity.float().cpu() for velocity in in_threads(layout, TOKENS, work)]


def relative(a, b) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"]
)
def test_cuda_agrees_with_the_cpu(model, dtype, bound):
    (expected,) = forward(copy.deepcopy(model), torch.device("cpu"), torch.float32, "sdpa")
    (got,) = forward(copy.deepcopy(model), torch.device("cuda", 0), dtype, "sdpa")
    assert relative(got, expected) < bound


def test_flash_attention_agrees_with_sdpa(model):
    pytest.importorskip("flash_attn")
    device = torch.device("cuda", 0)
    (expected,) = forward(copy.deepcopy(model), device, torch.bfloat16, "sdpa")
    (got,) = forward(copy.deepcopy(model), device, torch.bfloat16, "flash_attn")
    assert relative(got, expected) < 1e-2


@pytest.mark.parametrize("attn_type", ["sdpa", "flash_attn"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_every_layout_agrees_with_one_rank(model, layout, dtype, bound, attn_type):
    """bf16: rounding in another order moves a velocity by up to 2 % of its norm."""
    if attn_type == "flash_attn":
        pytest.importorskip("flash_attn")
        if dtype is torch.float32:
            pytest.skip("flash_attn has no float32")
    device = torch.device("cuda", 0)
    (expected,) = forward(copy.deepcopy(model), device, dtype, attn_type)
    for got in forward(copy.deepcopy(model), device, dtype, attn_type, layout):
        assert relative(got, expected) < bound


async def test_a_checkpoint_is_copied_out_beside_the_next_steps():
    pool = await loaded()
    plain = await denoised(pool)
    saved = await run(pool, order_of(checkpoint_interval_s=1e-9))
    assert torch.equal(latents(saved), plain)
    for checkpoint in saved.checkpoints:
        again = order_of(
            source=Source.CHECKPOINT, first_step=checkpoint.step, checkpoint=checkpoint
        )
        assert torch.equal(latents(await run(pool, again)), plain)
    await pool.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)], ids=str)
async def test_ranks_over_nccl_agree_with_one(layout):
    alone = await loaded()
    expected = await denoised(alone)
    await alone.close()
    pool = make_pool(
        configuration.load(["models=tiny-wan2.2", "infer.device=cuda", "distributed.world_size=2"])
    )
    await pool.load()
    given = await run(pool, order_of(layout=layout_message(layout)))
    assert relative(latents(given), expected) < 5e-2
    await pool.close()


async def test_where_transformers_live_changes_no_latents():
    pool = await loaded()
    expected = await denoised(pool)
    before = torch.cuda.memory_allocated()
    for name in ("transformer", "transformer_2"):
        assert (await pool.move(name, "cpu")).device == "cpu"
    assert before - torch.cuda.memory_allocated() >= weight_bytes(pool)
    assert torch.equal(await denoised(pool), expected)
    assert [component.device for component in pool.components()] == ["cpu", "cpu"]
    for name in ("transformer", "transformer_2"):
        assert (await pool.move(name, "device")).device == "cuda:0"
    assert torch.equal(await denoised(pool), expected)
    await pool.close()


async def test_one_expert_at_a_time_is_on_the_device():
    pool = await loaded("infer.diffusion.low_mem_level=3")
    assert {component.device for component in pool.components()} == {"cpu"}
    await denoised(pool)  # once, so that what the kernels keep for themselves is there
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    await denoised(pool)
    assert torch.cuda.max_memory_allocated() - before < weight_bytes(pool)
    await pool.close()


async def test_no_room_leaves_it_where_it_was():
    pool = await loaded("infer.diffusion.low_mem_level=3")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(OutOfMemoryError):
            await pool.move("transformer", "device")
        with pytest.raises(OutOfMemoryError):
            await denoised(pool)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [component.device for component in pool.components()] == ["cpu", "cpu"]
    assert torch.isfinite(await denoised(pool)).all()
    await pool.close()


async def loaded(*overrides):
    """A pool of the tiny model with two experts."""
    pool = LocalPool(configuration.load(["models=tiny-wan2.2", "infer.device=cuda", *overrides]))
    await pool.load()
    return pool


def weight_bytes(pool) -> int:
    return sum(component.weight_bytes for component in pool.components())


async def denoised(pool):
    """Latents after a slice with steps of both experts."""
    return latents(await run(pool, order_of()))


def order_of(**changes):
    """A slice with steps of both experts."""
    params = DenoiseParams(
        num_frames=9,
        height=64,
        width=64,
        num_inference_steps=6,
        guidance_scale=3.0,
        guidance_scale_high=4.0,
        boundary_ratio=0.8,
        flow_shift=3.0,
        solver="unipc",
        seed=1,
    )
    width = configuration.load(["models=tiny-wan2.2"]).models.transformer.text_dim
    rows = torch.randn(9, width, generator=torch.Generator().manual_seed(2))
    order = job(plan=make_plan(params), **changes)
    prompts = {"prompt_embeds": rows, "negative_prompt_embeds": -rows}
    return Order(order.start, order.plan, {**order.tensors, **prompts})

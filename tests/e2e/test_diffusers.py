"""Our services against diffusers' WanPipeline, which others wrote: equal numbers."""

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

from chitu_diffusion import config
from chitu_diffusion.v1 import dit_pb2, vae_pb2
from chitu_diffusion.wire import TensorReceiver, payload_of
from orchestrator.components import DitPool, TextEncoder, Vae
from tests.published import PublishedUniPC

PROMPT = "a blue square moving up on a white background"
NEGATIVE = "a red circle"
STEPS, SEED = 12, 11


async def through_services(system, model, height, width, num_frames):
    """Latents (1, C, F, H, W) and frames (F, H, W, 3) uint8, made by the three model hosts."""
    encoder = TextEncoder(system.addresses["encoder"])
    dit, vae = DitPool(system.addresses["dit"]), Vae(system.addresses["vae"])
    defaults = model.request_defaults
    encoded, _ = await encoder.encode([PROMPT, NEGATIVE])
    embeds = [
        payload_of(name, e.embeds)
        for name, e in zip(("prompt_embeds", "negative_prompt_embeds"), encoded, strict=True)
    ]
    params = dit_pb2.DenoiseParams(
        num_frames=num_frames,
        height=height,
        width=width,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        flow_shift=defaults.flow_shift,
        solver="unipc",
        seed=SEED,
    )
    if model.boundary_ratio is not None:
        params.boundary_ratio, params.guidance_scale_high = model.boundary_ratio, 4.5
    start = dit_pb2.DenoiseStart(
        task_id="compare",
        attempt=1,
        params=params,
        end_step=STEPS,
        source=dit_pb2.LATENT_SOURCE_NOISE,
        return_latents=True,
    )
    receiver, latents = TensorReceiver(), None
    async for response in dit.denoise(start, embeds):
        if response.HasField("tensor"):
            latents = receiver.feed(response.tensor) or latents
    video = None
    decode = vae_pb2.DecodeStart(task_id="compare", output_format="tensor")
    async for response in vae.decode(decode, latents):
        if response.HasField("tensor"):
            video = receiver.feed(response.tensor) or video
    for component in (encoder, dit, vae):
        await component.close()
    frames = ((video.to_torch()[0].permute(1, 2, 3, 0) + 1) * 127.5).round().to(torch.uint8)
    return latents.to_torch(), frames.numpy()


def through_diffusers(model, height, width, num_frames):
    pipe = WanPipeline.from_pretrained(model.ckpt_dir, torch_dtype=torch.float32)
    pipe.scheduler = PublishedUniPC.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    guidance = {"guidance_scale": 3.0}
    if model.boundary_ratio is not None:
        guidance = {"guidance_scale": 4.5, "guidance_scale_2": 3.0}
    common = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        "height": height,
        "width": width,
        "num_frames": num_frames,
        "num_inference_steps": STEPS,
        "max_sequence_length": model.transformer.text_len,
        **guidance,
    }
    latents = pipe(**common, generator=torch.Generator().manual_seed(SEED), output_type="latent")
    frames = pipe(**common, generator=torch.Generator().manual_seed(SEED), output_type="np")
    return latents.frames, (frames.frames[0] * 255).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "height", "width", "num_frames"),
    [("tiny-wan", 64, 64, 17), ("tiny-wan", 48, 96, 9), ("tiny-wan2.2", 64, 64, 17)],
)
async def test_latents_and_frames_agree(request, name, height, width, num_frames):
    system = request.getfixturevalue("tiny_wan22" if name == "tiny-wan2.2" else "tiny_wan")
    model = config.load([f"models={name}"]).models
    latents, frames = await through_services(system, model, height, width, num_frames)
    expected, expected_frames = through_diffusers(model, height, width, num_frames)
    assert latents.shape == expected.shape
    assert (latents - expected).norm() / expected.norm() <= 1e-4
    assert frames.shape == expected_frames.shape
    assert np.abs(frames.astype(int) - expected_frames.astype(int)).max() <= 1
    assert expected_frames.std() > 10, "a flat picture would agree with anything"

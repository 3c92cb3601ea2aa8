"""Tensors of the real models' sizes pass every hop: no size is near a limit by luck."""

import os

import pytest

from chitu_diffusion.v1 import tensor_pb2
from chitu_diffusion.wire import Payload
from tests.orchestrator.stand_ins import Script

BFLOAT16, FLOAT32 = tensor_pb2.DATA_TYPE_BFLOAT16, tensor_pb2.DATA_TYPE_FLOAT32


@pytest.mark.parametrize(
    ("data_type", "shape"),
    [
        (BFLOAT16, (1, 16, 21, 60, 104)),  # 480p, 81 frames: 1 KiB under gRPC's default limit
        (FLOAT32, (1, 16, 21, 60, 104)),
        (FLOAT32, (1, 16, 21, 90, 160)),  # 720p
    ],
    ids=["480p bf16", "480p fp32", "720p fp32"],
)
async def test_embeddings_and_latents_pass_every_hop(start_system, data_type, shape):
    # Exactly 4 MiB: with framing it is over gRPC's default limit.
    embeds = Payload("", BFLOAT16, (512, 4096), os.urandom(512 * 4096 * 2))
    itemsize = 2 if data_type == BFLOAT16 else 4
    count = shape[1] * shape[2] * shape[3] * shape[4]
    latents = Payload("", data_type, shape, os.urandom(count * itemsize))
    system = await start_system(script=Script(embeds=embeds, latents=latents))
    await system.client.generate("x", num_inference_steps=1)
    received = system.script.received
    assert set(received) == {"prompt_embeds", "negative_prompt_embeds", "latents"}
    for name, sent in (("prompt_embeds", embeds), ("latents", latents)):
        assert received[name].shape == sent.shape
        assert received[name].data_type == sent.data_type
        assert bytes(received[name].data) == bytes(sent.data)

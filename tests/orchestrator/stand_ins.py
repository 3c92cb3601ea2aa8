"""Model hosts without models: real servicers on real sockets, with timed work and faults."""

import asyncio
import hashlib
from dataclasses import dataclass, field

from chitu_diffusion.errors import ComponentError
from chitu_diffusion.rpc.server import Service
from chitu_diffusion.v1 import (
    component_pb2,
    component_pb2_grpc,
    dit_pb2,
    dit_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    vae_pb2,
    vae_pb2_grpc,
)
from chitu_diffusion.wire import CHUNK_BYTES, Payload, TensorReceiver, tensor_parts

FLOAT32 = 8  # DATA_TYPE_FLOAT32


def latents_of(seed: int) -> Payload:
    """What the stand-in DiT makes of a seed."""
    return Payload("latents", FLOAT32, (1, 1, 1, 1, 2), seed.to_bytes(8, "little"))


def video_of(latents: bytes) -> bytes:
    """What the stand-in VAE makes of latents."""
    return b"video of " + latents


@dataclass
class Script:
    """What the stand-ins do, and what they have seen."""

    encode_s: float = 0.0
    step_s: float = 0.0
    decode_s: float = 0.0
    fail_seeds: set[int] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    """"encode+", "encode-", "denoise+ SEED", "step SEED", ..., in order."""
    slices: list[dit_pb2.DenoiseStart] = field(default_factory=list)
    damage_video: bool = False
    embeds: Payload = field(default_factory=lambda: Payload("", FLOAT32, (1,), bytes(4)))
    """What the encoder answers for each text."""
    latents: Payload | None = None
    """What the DiT answers, instead of `latents_of(seed)`."""
    received: dict[str, Payload] = field(default_factory=dict)
    """Newest tensor of each name that DiT and VAE were sent."""
    pool: dit_pb2.GetPoolResponse = field(
        default_factory=lambda: dit_pb2.GetPoolResponse(
            layout=dit_pb2.Layout(cfg_size=2, ulysses_degree=2, ring_degree=3), attn_type="sdpa"
        )
    )
    memory: dict[str, list[component_pb2.ProcessMemory]] = field(default_factory=dict)
    """What each component's host answers."""


class _Components(component_pb2_grpc.ComponentServiceServicer):
    def __init__(self, name: str, script: Script) -> None:
        self.script = script
        self.part = component_pb2.Component(
            name=name, state=component_pb2.COMPONENT_STATE_READY, device="cuda:0"
        )

    async def GetComponents(self, request, context):
        return component_pb2.GetComponentsResponse(
            components=[self.part], memory=self.script.memory.get(self.part.name, [])
        )

    async def MoveComponent(self, request, context):
        self.part.device = {"cpu": "cpu", "device": "cuda:0"}[request.target]
        return component_pb2.MoveComponentResponse(component=self.part)


class StandIn(Service):
    """Common to the three."""

    component = ""

    def __init__(self, script: Script) -> None:
        self.script = script

    def register(self, server):
        component_pb2_grpc.add_ComponentServiceServicer_to_server(
            _Components(self.component, self.script), server
        )
        return []

    async def load(self):
        pass

    async def close(self):
        pass


class StandInEncoder(StandIn, encoder_pb2_grpc.EncoderServiceServicer):
    name, component = "encoder", "text_encoder"

    def register(self, server):
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(self, server)
        return super().register(server)

    async def Encode(self, request, context):
        self.script.log.append("encode+")
        await asyncio.sleep(self.script.encode_s)
        for index, text in enumerate(i.text for i in request.inputs):
            yield encoder_pb2.EncodeResponse(
                prompt=encoder_pb2.EncodedPrompt(
                    index=index, token_count=600, length=1, truncated=True
                )
            )
            for part in tensor_parts("prompt_embeds", self.script.embeds):
                yield encoder_pb2.EncodeResponse(tensor=part)
            self.script.log.append(f"text {text}")
        yield encoder_pb2.EncodeResponse(report=component_pb2.StageReport(seconds=0.5))
        self.script.log.append("encode-")


class StandInDit(StandIn, dit_pb2_grpc.DitServiceServicer):
    name, component = "dit", "transformer"

    def register(self, server):
        dit_pb2_grpc.add_DitServiceServicer_to_server(self, server)
        return super().register(server)

    async def GetPool(self, request, context):
        return self.script.pool

    async def Forward(self, request_iterator, context):
        raise NotImplementedError

    async def Denoise(self, request_iterator, context):
        receiver, start, names = TensorReceiver(), None, []
        async for request in request_iterator:
            if request.HasField("start"):
                start = request.start
            else:
                payload = receiver.feed(request.tensor)
                if payload is not None:
                    names.append(payload.name)
                    self.script.received[payload.name] = payload
        self.script.slices.append(start)
        seed = start.params.seed
        self.script.log.append(f"denoise+ {seed} {'/'.join(names)}")
        if seed in self.script.fail_seeds:
            raise ComponentError(f"seed {seed} is cursed")
        for step in range(start.first_step, start.end_step):
            await asyncio.sleep(self.script.step_s)
            self.script.log.append(f"step {seed}")
            yield dit_pb2.DenoiseResponse(
                step=dit_pb2.StepReport(step=step, of=start.params.num_inference_steps)
            )
        if start.return_latents:
            for part in tensor_parts("latents", self.script.latents or latents_of(seed)):
                yield dit_pb2.DenoiseResponse(tensor=part)
        self.script.log.append(f"denoise- {seed}")
        yield dit_pb2.DenoiseResponse(
            done=dit_pb2.DenoiseDone(
                next_step=start.end_step,
                attn_type="sdpa",
                report=component_pb2.StageReport(seconds=1.0, peak_memory_bytes=7),
            )
        )


class StandInVae(StandIn, vae_pb2_grpc.VaeServiceServicer):
    name, component = "vae", "vae"

    def register(self, server):
        vae_pb2_grpc.add_VaeServiceServicer_to_server(self, server)
        return super().register(server)

    async def Decode(self, request_iterator, context):
        receiver, latents = TensorReceiver(), None
        async for request in request_iterator:
            if request.HasField("tensor"):
                latents = receiver.feed(request.tensor) or latents
        self.script.received["latents"] = latents
        self.script.log.append("decode+")
        yield vae_pb2.DecodeResponse(progress=vae_pb2.DecodeProgress(frame=1, of=1))
        await asyncio.sleep(self.script.decode_s)
        yield vae_pb2.DecodeResponse(muxing=vae_pb2.MuxProgress())
        data = video_of(bytes(latents.data))
        for offset in range(0, len(data), CHUNK_BYTES):
            chunk = vae_pb2.FileChunk(offset=offset, data=data[offset : offset + CHUNK_BYTES])
            yield vae_pb2.DecodeResponse(chunk=chunk)
        digest = hashlib.sha256(b"?" if self.script.damage_video else data).hexdigest()
        self.script.log.append("decode-")
        yield vae_pb2.DecodeResponse(
            done=vae_pb2.DecodeDone(
                video=vae_pb2.VideoInfo(byte_size=len(data), sha256=digest, num_frames=1)
            )
        )

"""The typed configuration. Every process reads the same tree and uses its own part.

A field exists only if code reads it. Each number has its range and each choice its values beside
it; `chitu_diffusion.config.check` holds them, and the rules between fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from chitu_diffusion.config.fields import (
    device_name,
    endpoint,
    filled,
    line,
    one_of,
    shapes,
    within,
)

MODEL_TYPES = ("wan",)
SOLVERS = ("unipc", "dpm++", "euler")
ATTN_TYPES = ("auto", "sdpa", "flash_attn", "sage", "sparge")
DTYPES = ("auto", "float32", "bfloat16")
OUTPUT_FORMATS = ("mp4",)
PRESETS = (
    "ultrafast",
    "superfast",
    "veryfast",
    "faster",
    "fast",
    "medium",
    "slow",
    "slower",
    "veryslow",
)


_MANY = 2**31 - 1


@dataclass
class TransformerConfig:
    """Architecture of the diffusion transformer."""

    in_channels: int = within(16, 1, 4096)
    """Channels of the latents that go in."""
    out_channels: int = within(16, 1, 4096)
    """Channels of the velocity that comes out."""
    hidden_size: int = within(MISSING, 1, 65536)
    """Width of a token."""
    depth: int = within(MISSING, 1, 1024)
    """Number of blocks."""
    num_heads: int = within(MISSING, 1, 1024)
    """Attention heads; hidden_size / num_heads is the head dimension."""
    ffn_dim: int = within(MISSING, 1, 262144)
    """Width of the feed-forward layer."""
    freq_dim: int = within(256, 2, 65536)
    """Width of the sinusoidal timestep embedding."""
    text_dim: int = within(4096, 1, 65536)
    """Width of the prompt embeddings."""
    text_len: int = within(512, 1, 65536)
    """Rows that cross-attention sees: shorter prompts get zero rows, longer ones are cut."""
    patch_size: list[int] = within([1, 2, 2], 1, 16)  # noqa: RUF009 - makes a new list each time
    """Latent frames, rows and columns in one token."""
    eps: float = within(1e-6, 1e-12, 1e-2)
    """Added to variances in the norms."""


@dataclass
class DefaultsConfig:
    """What a request gets for fields it leaves out."""

    negative_prompt: str = line("")
    """Negative prompt."""
    num_frames: int = within(81, 1, _MANY)
    """Frames."""
    height: int = within(480, 1, _MANY)
    """Pixels."""
    width: int = within(832, 1, _MANY)
    """Pixels."""
    num_inference_steps: int = within(50, 1, 1000)
    """Denoise steps."""
    guidance_scale: float = within(5.0, 0, 100)
    """Guidance of the only or the low-noise expert."""
    guidance_scale_high: float | None = within(None, 0, 100)
    """Guidance of the high-noise expert; set exactly for models with two experts."""
    flow_shift: float = within(5.0, 1e-3, 100)
    """Shift of the noise grid."""
    solver: str = one_of("unipc", SOLVERS)
    """Solver."""
    fps: int = within(16, 1, 120)
    """Frames per second of the file."""


@dataclass
class LimitsConfig:
    """What a request may ask for at most."""

    max_num_frames: int = within(321, 1, _MANY)
    """Frames."""
    max_pixels: int = within(1280 * 720, 256, _MANY)
    """Height x width."""
    max_pixel_frames: int = within(1280 * 720 * 161, 256, 2**62)
    """Height x width x frames."""
    max_num_inference_steps: int = within(1000, 1, 1000)
    """Denoise steps."""
    max_prompt_chars: int = within(20_000, 1, 100_000)
    """Characters of a prompt. Far more than text_len tokens; bounds the work at the door."""


@dataclass
class ModelConfig:
    """One model: where it is, what it is, what a request gets and may ask for."""

    name: str = filled(MISSING)
    """Name that requests use."""
    type: str = one_of("wan", MODEL_TYPES)
    """Family: the folder under services/dit/models."""
    ckpt_dir: str | None = filled(None)
    """Checkpoint folder, in diffusers' or the original layout. Relative to the start directory."""
    boundary_ratio: float | None = within(None, 0.001, 0.999)
    """Set exactly for models with two experts: timestep >= boundary_ratio x 1000 is high noise."""
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    """Architecture of the transformer, the same for both experts."""
    request_defaults: DefaultsConfig = field(default_factory=DefaultsConfig)
    """Request defaults."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Request limits."""


@dataclass
class DiffusionConfig:
    """How much memory the models may take."""

    low_mem_level: int = within(0, 0, 3)
    """0: all on the device. 1: the VAE tiles. 2: and the text encoder lives on the CPU.
    3: and the transformers live on the CPU between slices."""


@dataclass
class DistributedConfig:
    """The ranks of the DiT pool, one process with one device each, and how they share a slice.

    A slice that names no layout runs on cfg_size x ulysses_degree x ring_degree ranks. Degrees that
    are 0 are chosen so that it takes all ranks: guidance first, then the largest divisor of the
    heads, then the ring.
    """

    world_size: int = within(0, 0, 1024)
    """Ranks of the pool; 0 = as many as the degrees multiply to."""
    nodes: int = within(1, 1, 1024)
    """Hosts that they are on, the same number on each."""
    rendezvous: str | None = endpoint(None)
    """host:port on the front's host where the torchrun of every node finds the others."""
    cfg_size: int = within(0, 0, 2)
    """Guidance branches on different ranks: 1 or 2; 0 = auto."""
    ulysses_degree: int = within(0, 0, 1024)
    """Ranks that exchange heads for sequence around attention; divides the heads; 0 = auto."""
    ring_degree: int = within(0, 0, 1024)
    """Ranks that pass keys and values round; 0 = auto."""


@dataclass
class InferConfig:
    """How the models run."""

    device: str = device_name("auto")
    """"auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N"."""
    dtype: str = one_of("auto", DTYPES)
    """Of the transformer: "auto" (bfloat16 on CUDA, float32 on CPU), "float32", "bfloat16"."""
    attn_type: str = one_of("auto", ATTN_TYPES)
    """Self-attention back end: "auto", "sdpa", "flash_attn", "sage", "sparge"."""
    num_threads: int = within(0, 0, 1024)
    """CPU threads of a model host; 0 = one per core."""
    compile: str = one_of("off", ("off", "block"))
    """"block" compiles each block of the transformer with torch.compile, at the warm-up."""
    compile_cache: str = filled("~/.cache/chitu-diffusion/compile")
    """Folder of compiled code, which later starts use again."""
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    """How much memory the models may take."""


@dataclass
class EncoderConfig:
    """The encoder service."""

    listen: str = endpoint("127.0.0.1:50051")
    """Where it listens: host:port (port 0 = any free one) or unix:PATH."""
    address: str | None = endpoint(None)
    """Where the orchestrator finds it; unset = the local one at `listen`."""
    dtype: str = one_of("auto", DTYPES)
    """As infer.dtype. float16 is not offered: UMT5 overflows in it."""


@dataclass
class DitConfig:
    """The DiT service."""

    listen: str = endpoint("127.0.0.1:50052")
    """Where it listens: host:port (port 0 = any free one) or unix:PATH."""
    address: str | None = endpoint(None)
    """Where the orchestrator finds it; unset = the local one at `listen`."""
    expert: str = one_of("all", ("all", "high_noise", "low_noise"))
    """What it hosts of a model with two experts: "all", "high_noise" or "low_noise"."""
    low_noise_address: str | None = endpoint(None)
    """Where the orchestrator finds the pool of the low-noise expert; unset = the same pool."""
    ranks_listen: str | None = endpoint(None)
    """Where it listens for its own ranks; unset = a private socket, for ranks on this host."""
    ranks_address: str | None = endpoint(None)
    """Where ranks on other hosts find that; unset = as `ranks_listen`."""
    warmup: str = shapes("default")
    """Videos that every group of ranks makes two steps of before the pool serves: "off", "default"
    (what a request gets that names no size), or frames x height x width: "9x64x64, 1x64x64"."""
    warmup_timeout_s: float = within(1800.0, 1, 86_400)
    """Seconds that it may take."""
    stall_timeout_s: float = within(30.0, 0.1, 86_400)
    """Seconds without a step after which ranks count as stuck; ten steps, if these take longer."""


@dataclass
class VaeConfig:
    """The VAE service."""

    listen: str = endpoint("127.0.0.1:50053")
    """Where it listens: host:port (port 0 = any free one) or unix:PATH."""
    address: str | None = endpoint(None)
    """Where the orchestrator finds it; unset = the local one at `listen`."""
    dtype: str = one_of("float32", DTYPES[1:])
    """Decode type: "float32" or "bfloat16"."""
    crf: int = within(18, 0, 51)
    """Quality of the video file, 0 (best) to 51."""
    preset: str = one_of("medium", PRESETS)
    """Effort of the video encoder, "ultrafast" to "veryslow"."""


@dataclass
class ServicesConfig:
    """The model hosts."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """Prompts to embeddings."""
    dit: DitConfig = field(default_factory=DitConfig)
    """Noise to latents."""
    vae: VaeConfig = field(default_factory=VaeConfig)
    """Latents to video."""
    stop_grace_s: float = within(20.0, 0, 3600)
    """Seconds that running calls get at shutdown."""


@dataclass
class OrchestratorConfig:
    """The orchestrator."""

    listen: str = endpoint("127.0.0.1:50050")
    """Where it listens: host:port (port 0 = any free one) or unix:PATH."""
    results_url: str = filled("out/results")
    """Folder or fsspec URL of finished videos. Made at the first result."""
    max_queued_tasks: int = within(1000, 1, 1_000_000)
    """Tasks that may wait; more are refused with RESOURCE_EXHAUSTED."""
    max_watchers: int = within(1000, 1, 100_000)
    """Open event streams; more are refused with RESOURCE_EXHAUSTED."""
    max_finished_tasks: int = within(1000, 1, 1_000_000)
    """Ended tasks that are kept; the oldest are deleted with their files."""
    slice_steps: int = within(0, 0, 1000)
    """Denoise steps in a slice; 0 = all steps of the task."""
    ranks_per_task: int = within(0, 0, 1024)
    """Ranks that a task is denoised on; 0 = all of the pool, one task at a time."""
    connect_timeout_s: float = within(0.0, 0, 86_400)
    """Seconds to wait for the model hosts at start-up; 0 = as long as it takes."""


@dataclass
class Config:
    """The whole configuration."""

    models: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    infer: InferConfig = field(default_factory=InferConfig)
    """How the models run."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """How the ranks of the DiT pool share a slice."""
    services: ServicesConfig = field(default_factory=ServicesConfig)
    """The model hosts."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    """The orchestrator."""

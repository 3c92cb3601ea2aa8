"""The typed configuration. Every process reads the same tree and uses its own part.

A field exists only if code reads it. Values are checked in `load` (types, unknown keys) and in
`Config.check` (ranges and choices).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

MODEL_TYPES = ("wan",)
SOLVERS = ("unipc", "dpm++", "euler")
ATTN_TYPES = ("auto", "sdpa", "flash_attn", "sage", "sparge")
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


@dataclass
class TransformerConfig:
    """Architecture of the diffusion transformer."""

    in_channels: int = 16
    """Channels of the latents that go in."""
    out_channels: int = 16
    """Channels of the velocity that comes out."""
    hidden_size: int = MISSING
    """Width of a token."""
    depth: int = MISSING
    """Number of blocks."""
    num_heads: int = MISSING
    """Attention heads; hidden_size / num_heads is the head dimension."""
    ffn_dim: int = MISSING
    """Width of the feed-forward layer."""
    freq_dim: int = 256
    """Width of the sinusoidal timestep embedding."""
    text_dim: int = 4096
    """Width of the prompt embeddings."""
    text_len: int = 512
    """Rows that cross-attention sees: shorter prompts get zero rows, longer ones are cut."""
    patch_size: list[int] = field(default_factory=lambda: [1, 2, 2])
    """Latent frames, rows and columns in one token."""
    eps: float = 1e-6
    """Added to variances in the norms."""


@dataclass
class DefaultsConfig:
    """What a request gets for fields it leaves out."""

    negative_prompt: str = ""
    """Negative prompt."""
    num_frames: int = 81
    """Frames."""
    height: int = 480
    """Pixels."""
    width: int = 832
    """Pixels."""
    num_inference_steps: int = 50
    """Denoise steps."""
    guidance_scale: float = 5.0
    """Guidance of the only or the low-noise expert."""
    guidance_scale_high: float | None = None
    """Guidance of the high-noise expert; set exactly for models with two experts."""
    flow_shift: float = 5.0
    """Shift of the noise grid."""
    solver: str = "unipc"
    """Solver."""
    fps: int = 16
    """Frames per second of the file."""


@dataclass
class LimitsConfig:
    """What a request may ask for at most."""

    max_num_frames: int = 321
    """Frames."""
    max_pixels: int = 1280 * 720
    """Height x width."""
    max_pixel_frames: int = 1280 * 720 * 161
    """Height x width x frames."""
    max_num_inference_steps: int = 1000
    """Denoise steps."""
    max_prompt_chars: int = 20_000
    """Characters of a prompt. Far more than text_len tokens; bounds the work at the door."""


@dataclass
class ModelConfig:
    """One model: where it is, what it is, what a request gets and may ask for."""

    name: str = MISSING
    """Name that requests use."""
    type: str = "wan"
    """Family: the folder under services/dit/models."""
    ckpt_dir: str | None = None
    """Checkpoint folder, in diffusers' or the original layout. Relative to the start directory."""
    boundary_ratio: float | None = None
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

    low_mem_level: int = 0
    """0: all on the device. 1: the VAE tiles. 2: and the text encoder lives on the CPU.
    3: and the transformers live on the CPU between slices."""


@dataclass
class DistributedConfig:
    """How a slice is shared: by cfg_size x ulysses_degree x ring_degree ranks of the pool."""

    cfg_size: int = 1
    """Guidance branches on different ranks: 1 or 2."""
    ulysses_degree: int = 1
    """Ranks that exchange heads for sequence around attention; divides the number of heads."""
    ring_degree: int = 1
    """Ranks that pass keys and values round."""


@dataclass
class InferConfig:
    """How the models run."""

    device: str = "auto"
    """"auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N"."""
    dtype: str = "auto"
    """Of the transformer: "auto" (bfloat16 on CUDA, float32 on CPU), "float32", "bfloat16"."""
    attn_type: str = "auto"
    """Self-attention back end: "auto", "sdpa", "flash_attn", "sage", "sparge"."""
    num_threads: int = 0
    """CPU threads of a model host; 0 = one per core."""
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    """How much memory the models may take."""


@dataclass
class EncoderConfig:
    """The encoder service."""

    listen: str = "127.0.0.1:50051"
    """Where it listens: host:port (port 0 = any free one) or unix:PATH."""
    address: str | None = None
    """Where the orchestrator finds it; unset = the local one at `listen`."""
    dtype: str = "auto"
    """As infer.dtype. float16 is not offered: UMT5 overflows in it."""


@dataclass
class DitConfig:
    """The DiT service."""

    listen: str = "127.0.0.1:50052"
    """Where it listens: host:port (port 0 = any free one) or unix:PATH."""
    address: str | None = None
    """Where the orchestrator finds it; unset = the local one at `listen`."""


@dataclass
class VaeConfig:
    """The VAE service."""

    listen: str = "127.0.0.1:50053"
    """Where it listens: host:port (port 0 = any free one) or unix:PATH."""
    address: str | None = None
    """Where the orchestrator finds it; unset = the local one at `listen`."""
    dtype: str = "float32"
    """Decode type: "float32" or "bfloat16"."""
    crf: int = 18
    """Quality of the video file, 0 (best) to 51."""
    preset: str = "medium"
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
    stop_grace_s: float = 20.0
    """Seconds that running calls get at shutdown."""


@dataclass
class OrchestratorConfig:
    """The orchestrator."""

    listen: str = "127.0.0.1:50050"
    """Where it listens: host:port (port 0 = any free one) or unix:PATH."""
    results_url: str = "out/results"
    """Folder or fsspec URL of finished videos. Made at the first result."""
    max_queued_tasks: int = 1000
    """Tasks that may wait; more are refused with RESOURCE_EXHAUSTED."""
    max_watchers: int = 1000
    """Open event streams; more are refused with RESOURCE_EXHAUSTED."""
    max_finished_tasks: int = 1000
    """Ended tasks that are kept; the oldest are deleted with their files."""
    slice_steps: int = 0
    """Denoise steps in a slice; 0 = all steps of the task."""
    connect_timeout_s: float = 0.0
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

"""The tiny architectures: diffusers' and transformers' own modules with small numbers."""

from __future__ import annotations

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

TEXT_LEN = 64  # rows of the prompt embedding that cross-attention sees
TEXT_DIM = 64
FLOW_SHIFT = 8.0
BOUNDARY = 0.875  # of the 1000 training timesteps: at and above it the high-noise expert works


def build_vae() -> AutoencoderKLWan:
    """Return an untrained Wan2.1 VAE, strides (4, 8, 8), 16 latent channels, 1.6 M parameters."""
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 3, 3],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )


def build_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    """Return an untrained two-layer UMT5 encoder of width TEXT_DIM."""
    config = UMT5Config(
        vocab_size=vocab_size,
        d_model=TEXT_DIM,
        d_kv=16,
        num_heads=4,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    return UMT5EncoderModel(config)


def build_transformer() -> WanTransformer3DModel:
    """Return an untrained Wan transformer: 6 heads of 32, 5 layers, 2.8 M parameters."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=6,
        attention_head_dim=32,
        in_channels=16,
        out_channels=16,
        text_dim=TEXT_DIM,
        freq_dim=64,
        ffn_dim=512,
        num_layers=5,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        rope_max_seq_len=1024,
    )


def build_scheduler() -> UniPCMultistepScheduler:
    """Return the solver as the published Wan2.1 configurations have it, but for the shift."""
    return UniPCMultistepScheduler(
        num_train_timesteps=1000,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=FLOW_SHIFT,
        solver_order=2,
        solver_type="bh2",
        predict_x0=True,
        lower_order_final=True,
        timestep_spacing="linspace",
        beta_start=0.0001,
        beta_end=0.02,
        beta_schedule="linear",
        final_sigmas_type="zero",
    )

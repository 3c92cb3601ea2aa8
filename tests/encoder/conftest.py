"""A random tiny checkpoint in diffusers' layout, and a running encoder service."""

from __future__ import annotations

import string
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import torch
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from chitu_diffusion import config
from chitu_diffusion.config.schema import Config
from chitu_diffusion.rpc.channel import dial
from chitu_diffusion.rpc.server import Server
from services.encoder.host import EncoderHost

TEXT_LEN = 24
TEXT_DIM = 32


def save_tokenizer(folder: Path) -> T5Tokenizer:
    """A Unigram tokenizer of single characters and a few words."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁a", -2.5)]
    pieces += [(f"▁{word}", -3.0) for word in ("red", "circle", "on", "black", "cat")]
    pieces += [(letter, -4.0) for letter in string.printable.strip() + "éü红色圆，。！"]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_text_encoder(folder: Path, vocab_size: int) -> UMT5EncoderModel:
    """Weights large enough that attention and its relative bias matter."""
    torch.manual_seed(0)
    model = UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocab_size,
            d_model=TEXT_DIM,
            d_kv=8,
            num_heads=4,
            d_ff=48,
            num_layers=2,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="session")
def ckpt_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder-checkpoint")
    tokenizer = save_tokenizer(folder / "tokenizer")
    save_text_encoder(folder / "text_encoder", len(tokenizer) + 3)
    return folder


@pytest.fixture(scope="session")
def settings(ckpt_dir: Path) -> Config:
    return config.load(
        [
            f"models.ckpt_dir={ckpt_dir}",
            f"models.transformer.text_len={TEXT_LEN}",
            f"models.transformer.text_dim={TEXT_DIM}",
            "infer.device=cpu",
        ]
    )


@pytest.fixture(scope="session")
def reference(ckpt_dir: Path) -> UMT5EncoderModel:
    """transformers' own loading."""
    return UMT5EncoderModel.from_pretrained(ckpt_dir / "text_encoder").eval()


@pytest.fixture
async def channel(settings: Config, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = Server(EncoderHost(settings), f"unix:{tmp_path}/encoder.sock")
    await server.start()
    await server.load()
    async with dial(server.address) as channel:
        yield channel
    await server.stop(0)

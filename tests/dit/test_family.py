"""The seam of model families: a second one is registered, and runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from chitu_diffusion import config as configuration
from chitu_diffusion.config import schema
from chitu_diffusion.config.schema import Config, TransformerConfig
from chitu_diffusion.errors import ConfigError, InvalidRequestError
from chitu_diffusion.v1 import dit_pb2
from services.dit import request as door
from services.dit.jobs import Order
from services.dit.models import ModelFamily, Transformer, get_family, get_model_class
from services.dit.models.wan.transformer import WanTransformer
from services.dit.pool import LocalPool
from tests.dit.slices import latents, run

GAIN = torch.linspace(0.1, 0.4, 16)


@dataclass(frozen=True)
class GainConstants:
    rows: torch.Tensor
    num_tokens: int = 1

    def branch(self, index: int) -> GainConstants:
        return GainConstants(self.rows[index : index + 1])


class GainTransformer(Transformer):
    """The velocity is the latents times a weight of their channel."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.empty(config.in_channels))

    def prepare(
        self, prompt_embeds: torch.Tensor, grid: tuple[int, int, int], timesteps: Sequence[float]
    ) -> GainConstants:
        return GainConstants(prompt_embeds)

    def forward(
        self, latents: torch.Tensor, step_index: int, constants: GainConstants, **how: Any
    ) -> torch.Tensor:
        assert set(how) == {"attention", "parallel", "cache"}
        assert latents.shape[0] == constants.rows.shape[0]
        return latents * self.gain.view(1, -1, 1, 1, 1)


FAMILY = ModelFamily(
    transformer=GainTransformer,
    rename=lambda name: name.removesuffix("_factor"),
    weight_dtype=lambda name, compute: torch.float32,
    expert_folders=lambda ckpt_dir, two: [ckpt_dir / "gains"],
    latent_stride=(2, 4, 4),
)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    package = ModuleType("services.dit.models.gain")
    package.FAMILY = FAMILY  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(schema, "MODEL_TYPES", (*schema.MODEL_TYPES, "gain"))
    (tmp_path / "gains").mkdir()
    save_file({"gain_factor": GAIN}, tmp_path / "gains" / "model.safetensors")
    config = configuration.load(
        ["models=tiny-wan", f"models.ckpt_dir={tmp_path}", "infer.device=cpu"]
    )
    # Behind the schema's check, whose choices were read when it was imported.
    config.models.type = "gain"
    return config


def start(**changes: Any) -> dit_pb2.DenoiseStart:
    # 7 frames of 24 x 40 pixels are no size of Wan's.
    fields: dict[str, Any] = {
        "num_frames": 7,
        "height": 24,
        "width": 40,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
        "flow_shift": 2.0,
        "solver": "euler",
        "seed": 3,
    }
    return dit_pb2.DenoiseStart(
        task_id="a",
        attempt=1,
        params=dit_pb2.DenoiseParams(**(fields | changes)),
        end_step=4,
        source=dit_pb2.LATENT_SOURCE_NOISE,
        return_latents=True,
    )


async def test_a_second_family_runs_a_slice(config: Config) -> None:
    pool = LocalPool(config)
    await pool.load()
    opening = start()
    plan = door.parse_start(opening, config)
    rows = torch.ones(2, config.models.transformer.text_dim)
    prompts = {"prompt_embeds": rows, "negative_prompt_embeds": rows}
    denoised = latents(await run(pool, Order(opening, plan, prompts)))
    expected = torch.randn(1, 16, 4, 6, 10, generator=torch.Generator().manual_seed(3))
    # Euler on x' = gain x, and guidance between equal branches changes nothing.
    for sigma, following in zip(plan.grid.sigmas, plan.grid.sigmas[1:], strict=False):
        expected *= 1 + GAIN.view(1, -1, 1, 1, 1) * (following - sigma)
    torch.testing.assert_close(denoised, expected)
    await pool.close()


def test_sizes_follow_the_family(config: Config) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        door.parse_start(start(num_frames=6, height=20), config)
    assert [(problem.field, problem.message) for problem in raised.value.violations] == [
        ("params.num_frames", "6: must be 2n + 1, at least 1"),
        ("params.height", "20: must be a multiple of 8, at least 8"),
    ]


def test_a_family_that_is_not_registered() -> None:
    with pytest.raises(ConfigError, match=r"models\.type='gain': must be one of 'wan'"):
        get_family("gain")


def test_classes_by_name(config: Config) -> None:
    assert get_model_class("wan") is WanTransformer
    assert get_model_class("gain") is GainTransformer


@pytest.mark.parametrize("model_type", schema.MODEL_TYPES)
def test_every_registered_family_can_be_had(model_type: str) -> None:
    assert issubclass(get_family(model_type).transformer, Transformer)

"""Names of both published layouts, where experts lie, and checkpoints that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from chitu_diffusion.config.schema import TransformerConfig
from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError
from services.dit.attention.sdpa import Sdpa
from services.dit.flexcache import NoCache
from services.dit.models.wan.weights import diffusers_name, expert_folders, weight_dtype
from services.dit.parallel import Alone
from tests.dit.conftest import SMALL, load_ours, make_embeds, make_reference, original_names


def test_every_name_is_translated(experts: list[WanTransformer3DModel]) -> None:
    names = experts[0].state_dict().keys()
    assert [diffusers_name(name) for name in names] == list(names)
    original = original_names(experts[0].state_dict())
    assert not set(original) & set(names) - {"patch_embedding.weight", "patch_embedding.bias"}
    assert {diffusers_name(name) for name in original} == set(names)


@pytest.mark.parametrize("wrapper", ["model.diffusion_model.", "module."])
@pytest.mark.parametrize("layout", [dict, original_names])
def test_wrapped_names(
    experts: list[WanTransformer3DModel],
    tmp_path: Path,
    wrapper: str,
    layout: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> None:
    weights = layout(experts[0].state_dict())
    save_file(
        {wrapper + name: value for name, value in weights.items()}, tmp_path / "m.safetensors"
    )
    model = load_ours(tmp_path)
    assert torch.equal(model.proj_out.weight, experts[0].proj_out.weight)


def test_types_of_weights(experts: list[WanTransformer3DModel]) -> None:
    exact = {
        name
        for name in experts[0].state_dict()
        if weight_dtype(name, torch.bfloat16) is torch.float32
    }
    block = "blocks.1."
    assert {name for name in exact if name.startswith(block)} == {
        block + name
        for name in (
            "scale_shift_table",
            "attn1.norm_q.weight",
            "attn1.norm_k.weight",
            "attn2.norm_q.weight",
            "attn2.norm_k.weight",
            "norm2.weight",
            "norm2.bias",
        )
    }
    embedder = "condition_embedder."
    assert {name for name in exact if not name.startswith("blocks.")} == {
        "scale_shift_table",
        *(f"{embedder}time_proj.{kind}" for kind in ("weight", "bias")),
        *(
            f"{embedder}time_embedder.linear_{n}.{kind}"
            for n in (1, 2)
            for kind in ("weight", "bias")
        ),
    }


@pytest.mark.parametrize(
    ("checkpoint", "folders"),
    [
        ("one-diffusers", ["transformer"]),
        ("one-original", ["."]),
        ("two-diffusers", ["transformer", "transformer_2"]),
        ("two-original", ["high_noise_model", "low_noise_model"]),
    ],
)
def test_expert_folders(checkpoints: dict[str, Path], checkpoint: str, folders: list[str]) -> None:
    root = checkpoints[checkpoint]
    found = expert_folders(root, two_experts=len(folders) == 2)
    assert found == [root / folder for folder in folders]


def test_high_noise_is_first(
    checkpoints: dict[str, Path], experts: list[WanTransformer3DModel]
) -> None:
    for layout in ("two-diffusers", "two-original"):
        for folder, expert in zip(
            expert_folders(checkpoints[layout], two_experts=True), experts, strict=True
        ):
            assert torch.equal(load_ours(folder).proj_out.weight, expert.proj_out.weight)


@pytest.mark.parametrize(
    ("checkpoint", "two"),
    [("one-diffusers", True), ("one-original", True), ("two-original", False)],
)
def test_missing_expert(checkpoints: dict[str, Path], checkpoint: str, two: bool) -> None:
    with pytest.raises(CheckpointNotFoundError, match="holds neither"):
        expert_folders(checkpoints[checkpoint], two_experts=two)


def test_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        expert_folders(tmp_path / "nowhere", two_experts=False)


@pytest.fixture
def weights(checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    folder = checkpoints["one-diffusers"] / "transformer"
    tensors: dict[str, torch.Tensor] = load_file(folder / "diffusion_pytorch_model.safetensors")
    return tensors


@pytest.mark.parametrize("layout", [dict, original_names])
def test_one_tensor_missing_or_added(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    layout: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> None:
    changed = layout(weights)
    changed["blocks.7.extra"] = changed.pop("patch_embedding.bias")
    save_file(changed, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match=r"patch_embedding\.bias.*blocks\.7\.extra"):
        load_ours(tmp_path)


def test_another_size_of_model(tmp_path: Path) -> None:
    wider = TransformerConfig(**(vars(SMALL) | {"hidden_size": 96}))
    make_reference(3, wider).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"\[96.*the model has \[48"):
        load_ours(tmp_path)
    deeper = TransformerConfig(**(vars(SMALL) | {"depth": 3}))
    make_reference(3, deeper).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"27 unexpected: blocks\.2\."):
        load_ours(tmp_path)


def test_sharded_with_a_missing_shard(tmp_path: Path, experts: list[WanTransformer3DModel]) -> None:
    experts[0].save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert torch.equal(load_ours(tmp_path).proj_out.weight, experts[0].proj_out.weight)
    shards[1].unlink()
    with pytest.raises(CheckpointNotFoundError, match=shards[1].name):
        load_ours(tmp_path)


def test_diffusers_reads_the_original_names_alike(
    experts: list[WanTransformer3DModel], tmp_path: Path
) -> None:
    reference = experts[0]
    reference.save_config(tmp_path / "config" / "transformer")
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file(original_names(reference.state_dict()), file)
    theirs = WanTransformer3DModel.from_single_file(
        str(file), config=str(tmp_path / "config"), subfolder="transformer"
    ).eval()
    latents = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    text = make_embeds(1, 9)
    with torch.no_grad():
        expected = theirs(latents, torch.tensor([500.0]), text, return_dict=False)[0]
    ours = load_ours(tmp_path)
    constants = ours.prepare(text, (2, 4, 6), [500.0])
    velocity = ours(latents, 0, constants, attention=Sdpa(), parallel=Alone(), cache=NoCache())
    torch.testing.assert_close(velocity, expected, rtol=1e-5, atol=1e-5)

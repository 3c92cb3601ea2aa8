"""Loading weights: what fits is loaded exactly, everything else is refused by name."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError
from services.common import checkpoint, weight_files
from services.common.checkpoint import load_weights

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        self.counts: torch.Tensor
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


def empty() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {key: torch.randn(value.shape) for key, value in Net().state_dict().items()}
    return tensors | {"counts": torch.tensor([3, 2**40])}


def shard(folder: Path, weights: dict[str, torch.Tensor], suffix: str = "safetensors") -> None:
    """Two shards and their index."""
    stem = "diffusion_pytorch_model" if suffix == "safetensors" else "pytorch_model"
    weight_map: dict[str, str] = {}
    for number, part in enumerate((list(weights)[:2], list(weights)[2:]), 1):
        name = f"{stem}-0000{number}-of-00002.{suffix}"
        tensors = {key: weights[key] for key in part}
        if suffix == "safetensors":
            save_file(tensors, folder / name)
        else:
            torch.save(tensors, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def load(folder: Path, **options: object) -> Net:
    net = empty()
    load_weights(net, folder, **({"dtype": torch.float32, "device": CPU} | options))  # type: ignore[arg-type]
    return net


def assert_equal(net: Net, weights: dict[str, torch.Tensor]) -> None:
    state = net.state_dict()
    assert state.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(state[key], value), key


def test_one_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    net = load(tmp_path)
    assert_equal(net, weights)
    assert not any(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(tmp_path: Path, weights: dict[str, torch.Tensor], suffix: str) -> None:
    shard(tmp_path, weights, suffix)
    assert_equal(load(tmp_path), weights)


def test_pth_file_itself(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, tmp_path / "net.pth")
    assert_equal(load(tmp_path / "net.pth"), weights)


def test_weights_outlive_their_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    for name in ("model.safetensors", "model.pth"):
        file = tmp_path / name
        if file.suffix == ".pth":
            torch.save(weights, file)
        else:
            save_file(weights, file)
        net = load(file)
        with file.open("r+b") as opened:
            opened.write(b"\0" * file.stat().st_size)
        assert_equal(net, weights)


def test_cast_keeps_integers(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    net = load(tmp_path, dtype=torch.bfloat16)
    assert net.first.weight.dtype is torch.bfloat16
    assert torch.equal(net.counts, weights["counts"])


def test_dtype_by_name(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    net = load(tmp_path, dtype=lambda name: torch.float32 if "second" in name else torch.bfloat16)
    assert (net.first.bias.dtype, net.second.bias.dtype) == (torch.bfloat16, torch.float32)


def test_rename(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file({f"net.{key}": value for key, value in weights.items()}, tmp_path / "m.safetensors")
    assert_equal(load(tmp_path, rename=lambda key: key.removeprefix("net.")), weights)


def test_rename_that_collides_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"become the same: first\.bias"):
        load(tmp_path, rename=lambda key: key.replace("second", "first"))


def test_safetensors_wins_over_bin(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    torch.save({key: value * 0 for key, value in weights.items()}, tmp_path / "pytorch_model.bin")
    assert_equal(load(tmp_path), weights)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt"):
        load(tmp_path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="holds no weights"):
        load(tmp_path)


def test_several_files_without_index(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file(weights, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"several weight files.*a\.safetensors"):
        load(tmp_path)


def test_a_set_with_a_usual_name_is_not_mixed_up_with_other_parts(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    shard(tmp_path, weights)
    next(tmp_path.glob("*.index.json")).unlink()
    save_file({"conv1.weight": torch.zeros(2)}, tmp_path / "Wan2.1_VAE.safetensors")
    assert_equal(load(tmp_path), weights)


def test_missing_shard(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    shard(tmp_path, weights)
    (tmp_path / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match="model-00002-of-00002"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["../outside.safetensors", "/outside.safetensors", "a/../../x"])
def test_index_must_not_leave_the_folder(
    tmp_path: Path, weights: dict[str, torch.Tensor], path: str
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file(weights, tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(weights, path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load(folder)


def test_index_decides_per_tensor(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, tmp_path / "a.safetensors")
    save_file({"counts": torch.zeros(2, dtype=torch.int64)}, tmp_path / "b.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors") | {"counts": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(tmp_path).counts.tolist() == [0, 0]


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 3}', "{}", "[" * 100_000])
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="is not a weight index"):
        load(tmp_path)


@pytest.mark.parametrize("change", ["drop", "add"])
def test_index_and_shards_disagree(
    tmp_path: Path, weights: dict[str, torch.Tensor], change: str
) -> None:
    save_file(weights, tmp_path / "a.safetensors")
    weight_map = dict.fromkeys(weights, "a.safetensors")
    if change == "drop":
        del weight_map["counts"]
    else:
        weight_map["third.weight"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="counts" if change == "drop" else "third.weight"):
        load(tmp_path)


def test_missing_and_unexpected_are_both_named(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    weights["third.weight"] = weights.pop("second.bias")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: second\.bias.*unexpected: third\.weight"):
        load(tmp_path)


def test_wrong_shape_names_both(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    weights["first.weight"] = torch.zeros(4, 5)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"first\.weight is \[4, 5\], the model has \[4, 3\]"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("part", [0.5, 0.95])
def test_truncated_file(
    tmp_path: Path, weights: dict[str, torch.Tensor], name: str, part: float
) -> None:
    file = tmp_path / name
    if file.suffix == ".bin":
        torch.save(weights, file)
    else:
        save_file(weights, file)
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return open, ("marker", "w")


def test_pickle_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({**weights, "bomb": Bomb()}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        load(tmp_path)
    assert not (tmp_path / "marker").exists()


def test_float8_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    weights["first.weight"] = weights["first.weight"].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"float8.*first\.weight"):
        load(tmp_path)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(5, 3)
        self.tokens = nn.Embedding(5, 3)


TIED = {"tokens.weight": "shared.weight"}


@pytest.mark.parametrize("stored", [["shared"], ["tokens"], ["shared", "tokens"]])
def test_tied_pair(tmp_path: Path, stored: list[str]) -> None:
    table = torch.randn(5, 3)
    save_file({f"{name}.weight": table.clone() for name in stored}, tmp_path / "m.safetensors")
    with torch.device("meta"):
        net = Tied()
    load_weights(net, tmp_path, dtype=torch.float32, device=CPU, tied=TIED)
    assert net.shared.weight is net.tokens.weight
    assert torch.equal(net.shared.weight, table)


def test_tied_pair_that_differs_or_is_absent(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = Tied()
    save_file(
        {"shared.weight": torch.zeros(5, 3), "tokens.weight": torch.ones(5, 3)},
        tmp_path / "m.safetensors",
    )
    with pytest.raises(CheckpointError, match="must be equal"):
        load_weights(net, tmp_path, dtype=torch.float32, device=CPU, tied=TIED)
    save_file({}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: shared\.weight, tokens\.weight"):
        load_weights(net, tmp_path, dtype=torch.float32, device=CPU, tied=TIED)


@pytest.mark.parametrize(
    "wrapped",
    [
        "model.{}",
        "module.{}",
        "model.diffusion_model.{}",
        "module._orig_mod.{}",
        "{0}._checkpoint_wrapped_module.{1}",
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_wrapped_names(
    tmp_path: Path, weights: dict[str, torch.Tensor], wrapped: str, suffix: str
) -> None:
    def wrap(key: str) -> str:
        owner, _, leaf = key.rpartition(".")
        return wrapped.format(owner, leaf) if "{0}" in wrapped and owner else wrapped.format(key)

    if "{0}" in wrapped:
        renamed = {wrap(k) if "." in k else k: v for k, v in weights.items()}
    else:
        renamed = {wrap(k): v for k, v in weights.items()}
    assert set(renamed) != set(weights)
    if suffix == "pth":
        torch.save(renamed, tmp_path / "model.pth")
    else:
        save_file(renamed, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), weights)


def test_a_modules_own_first_name_is_no_wrapper(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = nn.ModuleDict({"model": nn.Linear(2, 2, bias=False)})
    save_file({"module.model.weight": torch.ones(2, 2)}, tmp_path / "m.safetensors")
    load_weights(net, tmp_path, dtype=torch.float32, device=CPU)
    assert torch.equal(net["model"].weight, torch.ones(2, 2))


def test_names_that_become_equal_are_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    weights["module.first.bias"] = weights["first.bias"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"become the same: first\.bias"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_numbered_shards_without_an_index(
    tmp_path: Path, weights: dict[str, torch.Tensor], suffix: str
) -> None:
    shard(tmp_path, weights, suffix)
    next(tmp_path.glob("*.index.json")).unlink()
    assert_equal(load(tmp_path), weights)
    first = next(tmp_path.glob("*-00001-of-00002*"))
    first.unlink()
    with pytest.raises(CheckpointNotFoundError, match=rf"missing: {first.name}"):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    for number in (1, 2):
        save_file(weights, tmp_path / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"in two shards: counts, first\.bias"):
        load(tmp_path)


def test_shards_may_be_links_out_of_the_folder(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    shard(snapshot, weights)
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    assert_equal(load(snapshot), weights)


def test_a_link_to_a_file_that_is_gone_is_no_reason_to_read_another(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointNotFoundError, match=r"missing: model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_integers_are_no_weights(
    tmp_path: Path, weights: dict[str, torch.Tensor], suffix: str
) -> None:
    weights["first.weight"] = weights["first.weight"].to(torch.int8)
    file = tmp_path / f"model.{suffix}"
    if suffix == "pth":
        torch.save(weights, file)
    else:
        save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"types: first\.weight is (I8|.*int8), the model"):
        load(tmp_path)


def test_floats_are_no_integers(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file({**weights, "counts": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"types: counts is F32, the model has torch\.int64"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_are_copied_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(checkpoint, "_PART", 100_000)
    # In a .pth the two are one storage, whose pages are given back after the first.
    table = torch.randn(301, 501)
    weights = {"0.weight": table, "1.weight": table}
    if suffix == "pth":
        torch.save(weights, tmp_path / "model.pth")
    else:
        save_file(
            {key: value.clone() for key, value in weights.items()}, tmp_path / "m.safetensors"
        )
    with torch.device("meta"):
        net = nn.ModuleList(nn.Linear(501, 301, bias=False) for _ in range(2))
    load_weights(net, tmp_path, dtype=dtype, device=CPU)
    for value in net.state_dict().values():
        assert torch.equal(value, table.to(dtype))


@pytest.mark.parametrize("suffix", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1)])
@pytest.mark.parametrize("part", [1, 1 << 20])
def test_float8_weights_are_scaled(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    shape: tuple[int, ...],
    part: int,
) -> None:
    monkeypatch.setattr(checkpoint, "_PART", part)
    scale = torch.rand(shape) + 0.5
    rows = scale.reshape(-1, 1) if scale.numel() > 1 else scale
    stored = (weights["first.weight"] / rows).to(torch.float8_e4m3fn)
    expected = stored.float() * rows
    save_file(
        {
            **weights,
            "first.weight": stored,
            f"first.{suffix}": scale,
            "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        },
        tmp_path / "model.safetensors",
    )
    net = load(tmp_path)
    assert torch.equal(net.first.weight, expected)
    assert torch.equal(net.second.weight, weights["second.weight"])


def test_a_scale_must_fit_and_belong_to_a_float8_weight(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({**weights, "first.scale_weight": torch.ones(())}, file)
    with pytest.raises(CheckpointError, match=r"unexpected: first\.scale_weight"):
        load(tmp_path)
    float8 = weights["first.weight"].to(torch.float8_e4m3fn)
    save_file({**weights, "first.weight": float8, "first.scale_weight": torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=r"first\.scale_weight is \[3\]: must be one value"):
        load(tmp_path)


def header(length: int, text: bytes, data: bytes = b"") -> bytes:
    return length.to_bytes(8, "little") + text + data


TENSOR = b'{"first.bias":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        header(2**50, b"{}"),
        header(2**63, b"{}"),
        header(2**27, b"{}" + b" " * 2**20),
        header(len(TENSOR), TENSOR, bytes(15)),
        header(len(TENSOR), TENSOR, bytes(17)),
        header(len(TENSOR), TENSOR.replace(b"[4]", b"[-4]"), bytes(16)),
        header(len(TENSOR), TENSOR.replace(b"[4]", b"[5]"), bytes(16)),
        header(len(TENSOR), TENSOR.replace(b"F32", b"F99"), bytes(16)),
    ],
)
def test_a_corrupt_header_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", bytes(1000)])
def test_a_corrupt_pickle_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        load(tmp_path)


def rewrite(file: Path, name: str, content: bytes | None, compression: int) -> None:
    """Write an archive anew, with other content in the record whose name ends in `name`."""
    with zipfile.ZipFile(file) as archive:
        records = {record: archive.read(record) for record in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for record, old in records.items():
            archive.writestr(record, content if content and record.endswith(name) else old)


@pytest.mark.parametrize(
    ("name", "content", "compression", "reason"),
    [
        ("/data/0", None, zipfile.ZIP_DEFLATED, "must be uncompressed"),
        ("/byteorder", b"big", zipfile.ZIP_STORED, "little-endian"),
        ("/data/0", b"12345678", zipfile.ZIP_STORED, "no data of 16 bytes"),
    ],
)
def test_an_archive_whose_data_cannot_be_mapped_is_refused(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    name: str,
    content: bytes | None,
    compression: int,
    reason: str,
) -> None:
    file = tmp_path / "model.pth"
    torch.save(weights, file)
    rewrite(file, name, None, zipfile.ZIP_STORED)
    assert_equal(load(file), weights)
    rewrite(file, name, content, compression)
    with pytest.raises(CheckpointError, match=rf"model\.pth .*{reason}"):
        load(file)


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, lambda tensor: tensor.to("meta")])
def test_tensors_without_values_of_their_own_are_refused(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    weights["first.weight"] = convert(weights["first.weight"])
    torch.save(weights, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=r"model\.pth is not a mapping of names to dense"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_damage_anywhere_is_one_kind_of_error(
    tmp_path: Path, weights: dict[str, torch.Tensor], suffix: str
) -> None:
    file = tmp_path / f"model.{suffix}"
    if suffix == "pth":
        torch.save(weights, file)
    else:
        save_file(weights, file)
    sound, choose, refused = file.read_bytes(), random.Random(0), []
    # What describes the tensors is at the head of both, and of an archive at its end too.
    described = [*range(min(len(sound), 600)), *range(-min(len(sound), 600), 0)]
    for _ in range(500):
        damaged = bytearray(sound)
        for _ in range(3):
            damaged[choose.choice(described)] = choose.randrange(256)
        file.write_bytes(damaged)
        try:
            load(file)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all(file.name in error for error in refused)


def test_a_pickle_of_torchs_first_format_is_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    file = tmp_path / "model.pth"
    torch.save(weights, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"model\.pth is corrupt, or of .* before 1\.6"):
        load(tmp_path)


def test_sizes_of_headers_are_limited(
    tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(100_000_001))
    with pytest.raises(CheckpointError, match=r"bomb/data\.pkl has 100000001 bytes"):
        load(tmp_path / "bomb.pth")
    shard(tmp_path, weights)
    monkeypatch.setattr(weight_files, "_MAX_HEADER", 100)
    with pytest.raises(CheckpointError, match=r"index\.json has \d+ bytes: must be at most 100"):
        load(tmp_path)


def test_an_unknown_naming_scheme_shows_both_sides(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    save_file({f"net.{k}": v for k, v in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"5 missing: counts, first.*5 unexpected: net\.counts, net\.first"
    ):
        load(tmp_path)


def test_the_choice_between_formats_and_the_rate_are_logged(
    tmp_path: Path, weights: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with caplog.at_level("INFO"):
        load(tmp_path)
    assert "reading model.safetensors, not the .bin files" in caplog.text
    assert "GB/s" in caplog.text


def test_progress_is_logged_while_reading(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "_REPORT_EVERY_S", 0.0)
    save_file(weights, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        load(tmp_path)
    told = [record.getMessage() for record in caplog.records if ": " in record.getMessage()]
    assert len(told) == len(weights)
    assert f"reading {tmp_path}: 100%" in told[-1]
    assert "GB/s" in told[0]

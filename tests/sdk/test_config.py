from pathlib import Path

import pytest

from chitu_diffusion import config
from chitu_diffusion.errors import ConfigError


@pytest.mark.parametrize("model", config.model_names())
def test_every_model_composes(model):
    assert config.load([f"models={model}"]).models.name.lower() == model


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models=tinywan", "did you mean 'tiny-wan'"),
        ("infer.dtyp=auto", "did you mean 'infer.dtype'"),
        ("infer.dtype=float16", "must be one of 'auto', 'float32', 'bfloat16'"),
        ("infer.num_threads=abc", "infer.num_threads"),
        ("+infer.nonsense=1", "nonsense"),
        ("++foo=1", "foo"),
        ("services.vae.crf=99", "between 0 and 51"),
        ("services.vae.preset=warp", "ultrafast"),
        ("models.boundary_ratio=0.5", "guidance_scale_high"),
        ("models.transformer.num_heads=7", "multiple of"),
        ("models.request_defaults.solver=ddpm", "unipc"),
    ],
)
def test_a_wrong_key_or_value_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        config.load([override])


def test_relative_paths_are_resolved_against_the_start_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = config.load(["models.ckpt_dir=ckpt", "orchestrator.results_url=res"])
    assert loaded.models.ckpt_dir == str(tmp_path / "ckpt")
    assert loaded.orchestrator.results_url == str(tmp_path / "res")
    assert (
        config.load(["orchestrator.results_url=memory://x"]).orchestrator.results_url
        == "memory://x"
    )


def test_loading_writes_nothing_and_stays_in_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config.load()
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_model_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (Path(config.load().models.ckpt_dir) / "model_index.json").is_file()

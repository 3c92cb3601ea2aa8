import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chitu_diffusion import config
from chitu_diffusion.config.environment import resolved
from chitu_diffusion.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("model", config.model_names())
def test_every_model_composes(model):
    assert config.load([f"models={model}"]).models.name.lower() == model


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models=tinywan", "did you mean 'tiny-wan'"),
        ("infer.dtyp=auto", "did you mean 'infer.dtype'"),
        ("infer.dtype=float16", "must be one of 'auto', 'float32', 'bfloat16'"),
        ("infer.num_threads=abc", "^infer.num_threads=abc: must be an integer between 0 and 1024$"),
        ("infer.num_threads=1.5", "^infer.num_threads=1.5: must be an integer between 0 and 1024$"),
        ("+infer.nonsense=1", "nonsense"),
        ("++foo=1", "foo"),
        ("services.vae.crf=99", "between 0 and 51"),
        ("services.vae.preset=warp", "ultrafast"),
        ("models.boundary_ratio=0.5", "guidance_scale_high"),
        ("models.transformer.num_heads=7", "multiple of"),
        ("models.request_defaults.solver=ddpm", "unipc"),
        ("models.request_defaults.num_frames=10", r"num_frames=10: must be 4n\+1"),
        ("models.request_defaults.height=20480", "at most"),
        ("models.transformer.patch_size=[1,2]", "3 integers"),
        ("models.transformer.patch_size=[1,2,0]", "between 1 and 16"),
        ("infer.diffusion.low_mem_level=4", "infer.diffusion.low_mem_level=4: .* 0 and 3"),
        ("infer.diffusion.low_mem_level=x", "infer.diffusion.low_mem_level=x: must be an integer"),
        ("infer.attn_type=sage2", "must be one of 'auto', 'sdpa', 'flash_attn', 'sage', 'sparge'"),
        ("distributed.cfg_size=3", "between 0 and 2"),
        ("distributed.ulysses_degree=4", "must divide models.transformer.num_heads=6"),
        ("services.stop_grace_s=nan", "between 0 and 3600"),
        ("services.stop_grace_s=inf", "between 0 and 3600"),
        ("~infer.dtyp", "infer.dtyp"),
        ("+infer.atn_type=sdpa", "did you mean 'infer.attn_type'"),
        ("++distributed.ring_degre=1", "ring_degre=1: .*did you mean 'distributed.ring_degree'"),
        ("low_mem_level=1", "did you mean 'infer.diffusion.low_mem_level'"),
        ("infer.bad=1", "there are infer.device, infer.dtype, infer.attn_type"),
        ("infer.device=gpu", "infer.device=.gpu.: must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ("services.dit.listen=50052", "services.dit.listen=.50052.: must be host:port"),
        ("services.vae.address=vae:70000", "port of 0 to 65535"),
        ("services.vae.address=unix:", "services.vae.address=.unix:.: must be host:port"),
        ("services.vae.listen=127.0.0.1", "services.vae.listen=.127.0.0.1.: must be host:port"),
        ("services.vae.listen=127.0.0.1:x", "services.vae.listen=.127.*x.: must be host:port"),
        ("services.vae.listen=:50051x", "services.vae.listen=.:50051x.: must be host:port"),
        ("services.vae.listen=unix:" + "x" * 101, "unix:PATH, of at most 100 characters"),
        (
            "orchestrator.results_url=",
            "orchestrator.results_url=..: must be one line of text that is not",
        ),
        (
            "models.ckpt_dir=",
            "models.ckpt_dir=..: must be one line of text that is not empty, or null",
        ),
        ("models.ckpt_dir='~nobody.here/x'", "models.ckpt_dir='~nobody.here/x': .*home"),
        ("models=null", "^models=null: must be one of tiny-wan, "),
        ("+models@foo=tiny-wan", "^.models@foo=tiny-wan: .*foo"),
        ("~infer", "^configuration without infer: must have the sections models, infer, "),
        ("~models", "^models.name is not set: must be one line of text"),
        ("models.transformer.depth=???", "^models.transformer.depth is not set: must be an int"),
        ("infer", "^infer: .*must be key=value"),
        ("infer.dtype='a\nb'", "must be one of"),
    ],
)
def test_a_wrong_key_or_value_is_named(override, message):
    with pytest.raises(ConfigError, match=message) as raised:
        config.load([override])
    assert len(str(raised.value).splitlines()) == 1


def test_the_key_that_is_wrong_is_named_among_others():
    with pytest.raises(
        ConfigError, match=r"^models\.transfomer\.depth=1: .*'models\.transformer\."
    ):
        config.load(["models=tiny-wan", "infer.dtype=auto", "models.transfomer.depth=1"])


def test_all_that_is_wrong_is_named():
    with pytest.raises(ConfigError, match=r"infer\.a=1: .*; infer\.b=2: "):
        config.load(["+infer.a=1", "+infer.b=2"])


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


@pytest.fixture
def args():
    """What hydra's compose() gives to a program with a configuration of its own."""
    GlobalHydra.instance().clear()
    with initialize(config_path="../../examples/config", version_base=None):
        return compose(config_name="wan")


def test_a_program_composes_and_assigns(args, tmp_path):
    args.models.ckpt_dir = str(tmp_path)
    args.infer.attn_type = "sage"
    args.infer.diffusion.low_mem_level = 2
    checked = config.check(args)
    assert checked.models.ckpt_dir == str(tmp_path)
    assert (checked.infer.attn_type, checked.infer.diffusion.low_mem_level) == ("sage", 2)
    assert config.check(checked) == checked
    assert config.check(OmegaConf.to_container(args, resolve=True)) == checked


def test_a_program_cannot_assign_what_is_not_there(args):
    with pytest.raises(OmegaConfBaseException, match="low_memory"):
        args.infer.diffusion.low_memory = 2
    with pytest.raises(OmegaConfBaseException, match="Integer"):
        args.infer.diffusion.low_mem_level = "much"


def test_a_wrong_attribute_of_a_configuration_is_refused():
    loaded = config.load()
    loaded.infer.attn_typ = "sage"
    with pytest.raises(ConfigError, match=r"attn_typ='sage': .*did you mean 'infer\.attn_type'"):
        config.check(loaded)


def test_a_program_keeps_its_own_hydra():
    with initialize(config_path="../../examples/config", version_base=None):
        config.load(["models=tiny-wan2.2"])
        assert compose(config_name="wan").models.name == "tiny-wan"
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize("wrong", [None, 3, "wan", ["models"]])
def test_something_else_than_a_configuration_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be what"):
        config.check(wrong)


def test_a_dictionary_with_a_wrong_key_is_refused():
    with pytest.raises(ConfigError, match=r"models\.ckptdir='x': .*mean 'models\.ckpt_dir'"):
        config.check({"models": {"ckptdir": "x"}})


def test_a_part_of_a_configuration_is_refused():
    tree = OmegaConf.to_container(OmegaConf.structured(config.load()))
    del tree["models"], tree["infer"]
    with pytest.raises(ConfigError, match="without models, infer: must have the sections models,"):
        config.check(tree)


LEVEL = "infer.diffusion.low_mem_level=${oc.env:CHITU_LEVEL,1}"


@pytest.mark.parametrize(("value", "level"), [("2", 2), ("", 1), (None, 1)])
def test_environment_variables_get_the_type_of_their_key(monkeypatch, value, level):
    monkeypatch.delenv("CHITU_LEVEL", raising=False)
    if value is not None:
        monkeypatch.setenv("CHITU_LEVEL", value)
    assert config.load([LEVEL]).infer.diffusion.low_mem_level == level
    assert os.environ.get("CHITU_LEVEL") == value


@pytest.mark.parametrize("word", ["false", "False", "0", "no", "off"])
def test_false_words_are_false(monkeypatch, word):
    monkeypatch.setenv("CHITU_FLAG", word)
    tree = OmegaConf.create({"flag": "${oc.env:CHITU_FLAG}"})
    values, origins = resolved(tree)
    merged = OmegaConf.merge(OmegaConf.structured(Flag), values)
    assert OmegaConf.to_object(merged) == Flag(False)
    assert origins == {"flag": f"environment variable CHITU_FLAG={word!r}"}


@dataclass
class Flag:
    flag: bool = True


@pytest.mark.parametrize("value", ["abc", "7"])
def test_a_wrong_variable_is_named_with_its_key(monkeypatch, value):
    monkeypatch.setenv("CHITU_LEVEL", value)
    message = (
        rf"low_mem_level='?{value}'? \(environment variable CHITU_LEVEL='{value}'\): .*0 and 3"
    )
    with pytest.raises(ConfigError, match=message):
        config.load([LEVEL])


def test_a_wrong_variable_in_a_list_is_named(monkeypatch):
    monkeypatch.setenv("CHITU_PATCH", "abc")
    with pytest.raises(ConfigError, match=r"patch_size=.*CHITU_PATCH='abc'\): must be 3 integers"):
        config.load(["models.transformer.patch_size=[1,${oc.env:CHITU_PATCH},2]"])


@pytest.mark.parametrize("value", ["", None])
def test_a_missing_variable_without_a_default_is_named(monkeypatch, value):
    monkeypatch.delenv("CHITU_LEVEL", raising=False)
    if value is not None:
        monkeypatch.setenv("CHITU_LEVEL", value)
    with pytest.raises(ConfigError, match=r"low_mem_level: .*CHITU_LEVEL is not set or empty"):
        config.load(["infer.diffusion.low_mem_level=${oc.env:CHITU_LEVEL}"])


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_paths_do_not_follow_hydras_job_folder(tmp_path, monkeypatch, chdir):
    monkeypatch.chdir(tmp_path)
    loaded = config.load(["models.ckpt_dir=./tiny", f"hydra.job.chdir={chdir}"])
    assert loaded.models.ckpt_dir == str(tmp_path / "tiny")


APP = f"""
import hydra, os
from chitu_diffusion import config
@hydra.main(config_path={str(ROOT / "examples" / "config")!r}, config_name="wan", version_base=None)
def main(args):
    checked = config.check(args)
    print(os.getcwd(), checked.models.ckpt_dir, checked.orchestrator.results_url)
main()
"""


def test_paths_do_not_follow_the_job_folder_of_a_hydra_program(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    output = subprocess.run(
        [sys.executable, "app.py", "models.ckpt_dir=./tiny", "hydra.job.chdir=true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    place, ckpt_dir, results = output.split()
    assert Path(place).parent.parent == tmp_path / "outputs", "hydra has gone there"
    assert (ckpt_dir, results) == (str(tmp_path / "tiny"), str(tmp_path / "out" / "results"))

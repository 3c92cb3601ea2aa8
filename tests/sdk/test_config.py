import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import pytest
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chitu_diffusion import config
from chitu_diffusion.config.environment import resolved
from chitu_diffusion.config.schema import Config
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
        ("infer.num_threads=abc", "infer.num_threads"),
        ("+infer.nonsense=1", "nonsense"),
        ("++foo=1", "foo"),
        ("services.vae.crf=99", "between 0 and 51"),
        ("services.vae.preset=warp", "ultrafast"),
        ("models.boundary_ratio=0.5", "guidance_scale_high"),
        ("models.transformer.num_heads=7", "multiple of"),
        ("models.request_defaults.solver=ddpm", "unipc"),
        ("models.request_defaults.num_frames=10", r"num_frames=10: must be 4n\+1"),
        ("models.request_defaults.height=20480", "at most"),
        ("models.transformer.patch_size=[1,2]", "three numbers"),
        ("models.transformer.patch_size=[1,2,0]", "between 1 and 16"),
        ("infer.diffusion.low_mem_level=4", "infer.diffusion.low_mem_level=4: .* 0 and 3"),
        ("infer.diffusion.low_mem_level=x", "infer.diffusion.low_mem_level=x: .*Integer"),
        ("infer.attn_type=sage2", "must be one of 'auto', 'sdpa', 'flash_attn', 'sage', 'sparge'"),
        ("distributed.cfg_size=3", "between 1 and 2"),
        ("distributed.ulysses_degree=4", "must divide models.transformer.num_heads=6"),
        ("services.stop_grace_s=nan", "between 0 and 3600"),
        ("services.stop_grace_s=inf", "between 0 and 3600"),
        ("~infer.dtyp", "infer.dtyp"),
        ("+infer.atn_type=sdpa", "did you mean 'infer.attn_type'"),
        ("++distributed.ring_degre=1", "did you mean 'distributed.ring_degree'"),
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


@pytest.mark.parametrize("wrong", [None, 3, "wan", ["models"]])
def test_something_else_than_a_configuration_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be what"):
        config.check(wrong)


def test_a_dictionary_with_a_wrong_key_is_refused():
    with pytest.raises(ConfigError, match=r"did you mean 'models\.ckpt_dir'"):
        config.check({"models": {"ckptdir": "x"}})


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
    merged = OmegaConf.merge(OmegaConf.structured(Flag), resolved(tree))
    assert OmegaConf.to_object(merged) == Flag(False)


@dataclass
class Flag:
    flag: bool = True


def test_a_wrong_variable_is_named_with_its_key(monkeypatch):
    monkeypatch.setenv("CHITU_LEVEL", "abc")
    with pytest.raises(ConfigError, match=r"low_mem_level: .*CHITU_LEVEL='abc'.*Integer"):
        config.load([LEVEL])
    monkeypatch.setenv("CHITU_LEVEL", "7")
    with pytest.raises(ConfigError, match="low_mem_level=7: must be between 0 and 3"):
        config.load([LEVEL])
    for value in ("", None):
        monkeypatch.setenv("CHITU_LEVEL", value) if value == "" else monkeypatch.delenv(
            "CHITU_LEVEL"
        )
        with pytest.raises(ConfigError, match="CHITU_LEVEL is not set or empty"):
            config.load(["infer.diffusion.low_mem_level=${oc.env:CHITU_LEVEL}"])


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_paths_do_not_follow_hydras_job_folder(tmp_path, monkeypatch, chdir):
    monkeypatch.chdir(tmp_path)
    loaded = config.load(["models.ckpt_dir=./tiny", f"hydra.job.chdir={chdir}"])
    assert loaded.models.ckpt_dir == str(tmp_path / "tiny")


@pytest.mark.parametrize(
    "module", ["services.encoder", "services.dit", "services.vae", "orchestrator"]
)
def test_every_process_stops_at_a_wrong_key(module):
    process = subprocess.run(
        [sys.executable, "-m", module, "+infer.atn_type=sdpa"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert "atn_type" in line
    assert "did you mean 'infer.attn_type'" in line


def test_a_service_starts_where_nothing_can_be_written():
    # Nobody can make a file in /proc, not even root.
    process = subprocess.Popen(
        [sys.executable, "-m", "services.vae", "services.vae.listen=127.0.0.1:0"],
        cwd="/proc",
        env={"PATH": os.environ["PATH"], "HOME": "/proc", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        log = [process.stdout.readline()]
        for line in process.stderr:
            log.append(line)
            if "vae is serving" in line:
                break
        else:
            pytest.fail("".join(log))
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    text = "".join(log)
    assert text.count("low_mem_level") == 1, "the configuration is told once"


NUMBERS = {int: st.integers, float: st.floats}


def values_of(field: dataclasses.Field) -> st.SearchStrategy:
    """Any value that the schema allows for a field."""
    if "choices" in field.metadata:
        return st.sampled_from(field.metadata["choices"])
    kind = float if "float" in str(field.type) else int
    low, high = field.metadata["range"]
    if str(field.type).startswith("list"):
        return st.lists(st.integers(low, high), min_size=3, max_size=3)
    return NUMBERS[kind](low, min(high, 2**31))


def fields_of(node, prefix="") -> dict[str, dataclasses.Field]:
    """Every leaf of the schema that has a range or choices."""
    found = {}
    for field in dataclasses.fields(node):
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            found |= fields_of(value, f"{key}.")
        elif field.metadata:
            found[key] = field
    return found


LEAVES = fields_of(config.load())
# These belong together, or to a checkpoint: changed one by one they break a rule between fields.
TOGETHER = ("models.", "distributed.")
FREE = {key: field for key, field in LEAVES.items() if not key.startswith(TOGETHER)}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_valid_configuration_survives_yaml(data):
    overrides = {key: data.draw(values_of(field), label=key) for key, field in FREE.items()}
    model = data.draw(st.sampled_from(config.model_names()))
    loaded = config.load([f"models={model}"])
    for key, value in overrides.items():
        owner, _, name = key.rpartition(".")
        setattr(attrgetter(owner)(loaded), name, value)
    checked = config.check(loaded)
    assert config.check(OmegaConf.create(config.to_yaml(checked))) == checked


@pytest.mark.parametrize("key", LEAVES)
def test_a_value_out_of_range_is_refused_by_key(key):
    field = LEAVES[key]
    if "choices" in field.metadata:
        wrong = ["", "AUTO", "nonsense"]
    else:
        low, high = field.metadata["range"]
        wrong = [low - 1, high * 2 + 1, "abc", "nan", [low]]
        wrong = [[w, w, w] if str(field.type).startswith("list") else w for w in wrong]
    for value in wrong:
        tree = OmegaConf.to_container(OmegaConf.structured(config.load()))
        owner = tree
        for part in key.split(".")[:-1]:
            owner = owner[part]
        owner[key.split(".")[-1]] = value
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            config.check(tree)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(LEAVES)), st.data())
def test_a_key_with_one_wrong_letter_is_refused(key, data):
    tree = OmegaConf.to_container(OmegaConf.structured(config.load()))
    parts = key.split(".")
    depth = data.draw(st.integers(0, len(parts) - 1))
    place = data.draw(st.integers(0, len(parts[depth]) - 1))
    owner = tree
    for part in parts[:depth]:
        owner = owner[part]
    name = parts[depth]
    wrong = name[:place] + ("x" if name[place] != "x" else "y") + name[place + 1 :]
    owner[wrong] = owner.pop(name)
    with pytest.raises(ConfigError, match=wrong):
        config.check(tree)


def test_the_reference_lists_every_key_with_its_default():
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \| `([^`]*)` \|", text, flags=re.M))
    assert rows == reference_rows()


def reference_rows() -> dict[str, str]:
    """Every key of the schema and its default; what a model's file must give is "required"."""
    rows = {}

    def walk(node, prefix):
        for field in dataclasses.fields(node):
            key, value = f"{prefix}{field.name}", getattr(node, field.name)
            if dataclasses.is_dataclass(value):
                walk(value, f"{key}.")
            else:
                rows[key] = (
                    "required" if value == MISSING else "unset" if value is None else str(value)
                )

    walk(Config(), "")
    return rows

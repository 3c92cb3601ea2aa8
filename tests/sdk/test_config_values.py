"""Every key of the schema: what it takes, what it refuses, and that the reference has it."""

import copy
import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from omegaconf import MISSING, OmegaConf

from chitu_diffusion import config
from chitu_diffusion.config.fields import allowed, walk
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import ConfigError

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"
TREE = OmegaConf.to_container(OmegaConf.structured(config.load()))
LEAVES = {key: field for key, field, value in walk(Config()) if not dataclasses.is_dataclass(value)}
MAY_BE_EMPTY = "models.request_defaults.negative_prompt"
# "$" begins an interpolation, and "~" a home.
TEXT = st.text(st.characters(exclude_characters="$~", exclude_categories=["Cs"]), max_size=20)
ADDRESS = st.builds("{}:{}".format, st.sampled_from(["vae", "[::1]"]), st.integers(0, 65535))


def put(tree, key, value):
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value


def values_of(key: str, field: dataclasses.Field) -> st.SearchStrategy:
    """What the schema allows for a field."""
    rule, name = field.metadata, key.rpartition(".")[2]
    if "choices" in rule:
        values = st.sampled_from(rule["choices"])
    elif "length" in rule:
        values = st.lists(st.integers(*rule["range"]), min_size=3, max_size=3)
    elif "range" in rule:
        values = (st.floats if "float" in field.type else st.integers)(*rule["range"])
    elif name == "device":
        values = st.sampled_from(["auto", "cpu", "cuda", "cuda:3"])
    elif name.endswith(("listen", "address", "rendezvous")):
        values = ADDRESS | st.just("unix:/run/a")
    elif name == "warmup":
        values = st.sampled_from(["default", "off"])
    else:
        values = TEXT.filter(rule["holds"])
    return st.none() | values if "None" in field.type else values


@st.composite
def trees(draw):
    """Valid configurations: the ranges of the schema, then what its fields owe each other."""
    tree = copy.deepcopy(TREE)
    for key, field in LEAVES.items():
        put(tree, key, draw(values_of(key, field), label=key))
    transformer, limits = tree["models"]["transformer"], tree["models"]["limits"]
    heads = transformer["num_heads"]
    transformer["hidden_size"] = heads * 2 * draw(st.integers(1, 65536 // (2 * heads)))
    transformer["freq_dim"] -= transformer["freq_dim"] % 2
    divisors = [degree for degree in range(1, heads + 1) if heads % degree == 0]
    distributed = tree["distributed"]
    distributed["ulysses_degree"] = draw(st.sampled_from([0, *divisors]))
    degrees = [distributed[name] or 1 for name in ("cfg_size", "ulysses_degree")]
    most = max(1, 1024 // math.prod(degrees))
    distributed["ring_degree"] = draw(st.integers(0, most))
    size = math.prod(degrees) * (distributed["ring_degree"] or 1)
    distributed["world_size"] = size * draw(st.integers(0, max(1, 1024 // size)))
    world = distributed["world_size"] or size
    assume(world <= 1024)
    nodes = [nodes for nodes in range(1, world + 1) if world % nodes == 0]
    distributed["nodes"] = draw(st.sampled_from(nodes))
    if distributed["nodes"] > 1:
        distributed["rendezvous"] = "node-0:29400"
        tree["services"]["dit"]["ranks_listen"] = "0.0.0.0:50062"
    if world > 1 and ":" in tree["infer"]["device"]:
        tree["infer"]["device"] = "cuda"
    two_experts = draw(st.booleans())
    tree["models"]["boundary_ratio"] = draw(st.floats(0.001, 0.999)) if two_experts else None
    if not two_experts:
        tree["services"]["dit"] |= {"expert": "all", "low_noise_address": None}
    defaults = tree["models"]["request_defaults"]
    defaults["guidance_scale_high"] = draw(st.floats(0, 100)) if two_experts else None
    steps = st.integers(1, limits["max_num_inference_steps"])
    defaults["num_inference_steps"] = draw(steps)
    defaults["negative_prompt"] = defaults["negative_prompt"][: limits["max_prompt_chars"]]
    pixels = min(limits["max_pixels"], limits["max_pixel_frames"])
    height = defaults["height"] = 16 * draw(st.integers(1, pixels // 256))
    width = defaults["width"] = 16 * draw(st.integers(1, pixels // 16 // height))
    frames = min(limits["max_num_frames"], limits["max_pixel_frames"] // (height * width))
    defaults["num_frames"] = 1 + 4 * draw(st.integers(0, (frames - 1) // 4))
    return tree


@settings(max_examples=30, deadline=None)
@given(trees())
def test_any_valid_configuration_survives_yaml(tree):
    checked = config.check(tree)
    assert config.check(OmegaConf.create(config.to_yaml(checked))) == checked
    assert config.check(checked) == checked


@pytest.mark.parametrize("key", LEAVES)
def test_a_wrong_value_is_refused_by_key(key):
    rule, optional = LEAVES[key].metadata, "None" in LEAVES[key].type
    wrong = [{"a": 1}, [[1]], *([] if optional else [None])]
    if "choices" in rule:
        wrong += ["", rule["choices"][0].upper(), "nonsense"]
    elif "range" in rule:
        low, high = rule["range"]
        outside = [low - 1, high * 2 + 1, "abc", True, float("nan"), float("inf")]
        wrong += [[value] * rule["length"] if "length" in rule else value for value in outside]
    else:
        wrong += [*(["", "  "] if key != MAY_BE_EMPTY else []), "unix:a\n", "a\x85b:1"]
    for value in wrong:
        tree = copy.deepcopy(TREE)
        put(tree, key, value)
        with pytest.raises(ConfigError, match=f"{re.escape(key)}[ =].*: must be "):
            config.check(tree)


def test_every_number_has_a_range_and_every_text_a_rule():
    assert [key for key, field in LEAVES.items() if not field.metadata] == []
    numbers = {key for key, field in LEAVES.items() if re.search("int|float", field.type)}
    assert numbers == {key for key, field in LEAVES.items() if "range" in field.metadata}


EDITS = st.tuples(st.sampled_from(["change", "drop", "add"]), st.sampled_from("abexyz_1"))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LEAVES)), EDITS, st.data())
def test_a_key_with_one_wrong_letter_is_refused(key, edit, data):
    tree = owner = copy.deepcopy(TREE)
    *sections, name = key.split(".")[: data.draw(st.integers(1, key.count(".") + 1))]
    for section in sections:
        owner = owner[section]
    place = data.draw(st.integers(0, len(name) - 1))
    kind, letter = edit
    kept = name[place:] if kind == "add" else name[place + 1 :]
    wrong = name[:place] + ("" if kind == "drop" else letter) + kept
    assume(wrong not in owner)
    owner[wrong] = owner.pop(name)
    with pytest.raises(ConfigError, match=rf"(^|[.; ]){wrong}=.*no such key"):
        config.check(tree)


def test_the_reference_lists_every_key_with_default_and_range():
    rows = re.findall(
        r"^\| `([^`]+)` \| `([^`]*)` \| (.+?) \| (.+) \|$", REFERENCE.read_text(), re.M
    )
    told = {key: (default, rule) for key, default, rule, _ in rows}
    assert len(rows) == len(told)
    assert told == {
        key: (default_of(value), allowed(field))
        for key, field, value in walk(Config())
        if not dataclasses.is_dataclass(value)
    }


def default_of(value) -> str:
    if value == MISSING:
        return "required"
    return "unset" if value is None else str(value)

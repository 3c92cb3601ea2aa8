import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu_diffusion import config
from chitu_diffusion.errors import InvalidRequestError
from chitu_diffusion.request import GenerationRequest
from chitu_diffusion.v1 import dit_pb2, generation_pb2

ONE_EXPERT = config.load(["models=tiny-wan"]).models
TWO_EXPERTS = config.load(["models=tiny-wan2.2"]).models


def resolve(request, model=ONE_EXPERT):
    return request.resolve(model, seed=5, attn_type="sdpa")


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_frames", 0, "4n.1"),
        ("num_frames", -3, "4n.1"),
        ("num_frames", 16, "4n.1"),
        ("num_frames", True, "integer"),
        ("num_frames", "17", "integer"),
        ("num_frames", 10**12, "at most"),
        ("height", 72, "multiple of 16"),
        ("width", 0, "multiple of 16"),
        ("width", -64, "multiple of 16"),
        ("num_inference_steps", 0, ">= 1"),
        ("num_inference_steps", -1, ">= 1"),
        ("guidance_scale", math.nan, "finite"),
        ("guidance_scale", math.inf, "finite"),
        ("guidance_scale", -0.5, "between 0 and 100"),
        ("guidance_scale_high", 101, "between 0 and 100"),
        ("boundary_ratio", 1.5, "between 0 and 1"),
        ("flow_shift", 0.0, "> 0"),
        ("seed", -1, "between 0"),
        ("seed", 2**63, "between 0"),
        ("fps", 0, "between 1 and 120"),
        ("solver", "ddpm", "unipc"),
        ("output_format", "MP4", "mp4"),
        ("attn_type", "fast", "sdpa"),
        ("prompt", "a\ud800b", "Unicode"),
        ("prompt", 3, "text"),
        ("prompt", None, "text"),
        ("negative_prompt", b"x", "text"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(field, value, rule):
    with pytest.raises(ValueError, match=rf"params\.{field}: .*{rule}") as caught:
        GenerationRequest(**{"prompt": "x", field: value})
    assert [v.field for v in caught.value.violations] == [f"params.{field}"]


def test_every_violation_is_reported_at_once():
    with pytest.raises(InvalidRequestError) as caught:
        GenerationRequest(num_frames=2, height=7, fps=500)
    assert {v.field for v in caught.value.violations} == {
        "params.num_frames",
        "params.height",
        "params.fps",
    }


def test_zero_is_a_value_and_not_a_default():
    resolved = resolve(GenerationRequest(seed=0, guidance_scale=0, negative_prompt=""))
    assert (resolved.seed, resolved.guidance_scale, resolved.negative_prompt) == (0, 0, "")
    message = resolved.to_proto()
    assert message.HasField("seed")
    assert message.HasField("guidance_scale")


def test_defaults_come_from_the_model_and_the_request_wins():
    resolved = resolve(GenerationRequest(num_inference_steps=8))
    defaults = ONE_EXPERT.request_defaults
    assert resolved.num_inference_steps == 8
    assert resolved.num_frames == defaults.num_frames
    assert resolved.guidance_scale == defaults.guidance_scale
    assert resolved.seed == 5
    assert resolved.model == "tiny-wan"


@pytest.mark.parametrize("field", ["guidance_scale_high", "boundary_ratio"])
def test_two_expert_fields_are_refused_by_a_model_with_one(field):
    with pytest.raises(InvalidRequestError, match=f"{field}.*two experts"):
        resolve(GenerationRequest(**{field: 0.5}))


def test_two_expert_fields_resolve_on_a_model_with_two():
    resolved = resolve(GenerationRequest(boundary_ratio=0.5), TWO_EXPERTS)
    assert resolved.boundary_ratio == 0.5
    assert resolved.guidance_scale_high == TWO_EXPERTS.request_defaults.guidance_scale_high


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"num_frames": 4001}, "num_frames"),
        ({"height": 16384, "width": 16384, "num_frames": 321}, "height"),
        ({"height": 720, "width": 1280, "num_frames": 321}, "num_frames"),
        ({"num_inference_steps": 1_000_000}, "num_inference_steps"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"negative_prompt": "x" * 1_000_000}, "negative_prompt"),
    ],
)
def test_limits_of_the_model_hold(kwargs, field):
    with pytest.raises(InvalidRequestError) as caught:
        resolve(GenerationRequest(**kwargs))
    assert [v.field for v in caught.value.violations] == [f"params.{field}"]


def test_another_attention_back_end_than_the_servers_is_refused():
    assert resolve(GenerationRequest(attn_type="auto")).attn_type == "sdpa"
    with pytest.raises(InvalidRequestError, match="this server runs 'sdpa'"):
        resolve(GenerationRequest(attn_type="flash_attn"))


@pytest.mark.parametrize(
    "params",
    [
        generation_pb2.GenerationParams(preview_interval=2),
        generation_pb2.GenerationParams(flexcache=dit_pb2.FlexCacheParams(strategy="teacache")),
    ],
)
def test_what_the_server_cannot_do_is_refused_and_not_ignored(params):
    with pytest.raises(InvalidRequestError, match="not supported"):
        GenerationRequest.from_proto(params)


@given(
    st.builds(
        GenerationRequest,
        prompt=st.text(max_size=40),
        negative_prompt=st.none() | st.text(max_size=10),
        num_frames=st.none() | st.integers(0, 80).map(lambda n: 4 * n + 1),
        height=st.none() | st.integers(1, 40).map(lambda n: 16 * n),
        num_inference_steps=st.none() | st.integers(1, 1000),
        guidance_scale=st.none() | st.floats(0, 100),
        seed=st.none() | st.integers(0, 2**63 - 1),
        solver=st.none() | st.sampled_from(["unipc", "dpm++", "euler"]),
        fps=st.none() | st.integers(1, 120),
    )
)
def test_a_request_survives_the_wire(request_):
    message = generation_pb2.GenerationParams.FromString(request_.to_proto().SerializeToString())
    assert GenerationRequest.from_proto(message) == request_

"""Options and the decision."""

from __future__ import annotations

import math

import pytest

from nanscan.policy import ACTIONS, Policy, clip_factor, eps_is_lost, valid_limit
from nanscan.report import StepReport

REPORT = StepReport(False, math.nan, 1.0, 1.0, 1, 0, 4, (), ())


@pytest.mark.parametrize("action", ACTIONS)
def test_action_is_the_option_or_what_the_function_returns(action):
    assert Policy(on_nonfinite=action).decide(REPORT) == action
    assert Policy(on_nonfinite=lambda report: action if report is REPORT else "raise").decide(REPORT) == action


@pytest.mark.parametrize("norm, limit, factor", [(0.5, 1.0, 1.0), (1.0, 1.0, 1.0 / (1.0 + 1e-6)), (0.0, 1.0, 1.0)])
def test_clip_factor_is_torchs(norm, limit, factor):
    assert clip_factor(norm, limit) == factor


def test_clip_factor_of_huge_and_of_no_limit():
    assert clip_factor(1e300, 1.0) == 1.0 / (1e300 + 1e-6)
    assert clip_factor(1e300, None) == 1.0


@pytest.mark.parametrize("value, limit", [(None, None), (math.inf, None), (10**400, None), (2, 2.0), (1e-30, 1e-30)])
def test_valid_limits(value, limit):
    assert valid_limit("clip_norm", value) == limit


def test_limits_of_a_policy_are_floats():
    policy = Policy(clip_norm=1, clip_value=math.inf)
    assert (policy.clip_norm, type(policy.clip_norm), policy.clip_value) == (1.0, float, None)


def test_updated_replaces_only_what_is_not_at_its_default():
    policy = Policy(clip_norm=1.0, on_nonfinite="warn", history=5)
    new = policy.updated(clip_norm=None, clip_value=2.0, on_nonfinite="skip", max_consecutive_skips=3)
    assert new == Policy(clip_norm=1.0, clip_value=2.0, on_nonfinite="warn", history=5, max_consecutive_skips=3)
    with pytest.raises(ValueError, match="clip_norm must be a positive number, got -1"):
        policy.updated(clip_norm=-1)


@pytest.mark.parametrize(
    "group, dtype, lost",
    [
        ({"eps": 1e-8}, "float16", True),
        ({"eps": 6e-8}, "float16", False),
        ({"eps": 1e-8}, "bfloat16", False),
        ({"eps": 1e-8, "fused": True}, "float16", False),
        ({"eps": (None, 1e-3)}, "float16", False),
        ({"eps": 0.0}, "float32", True),
        ({"eps": 0, "fused": True}, "bfloat16", True),
        ({}, "float16", False),
    ],
)
def test_eps_that_float16_cannot_hold(group, dtype, lost):
    assert eps_is_lost(group, dtype) == lost

import pytest

from nvfp4_train.config.schema import PhaseConfig, PrecisionConfig, RuleConfig
from nvfp4_train.errors import ConfigError
from nvfp4_train.precision.recipe import (
    OPERANDS,
    LinearPlan,
    block_range,
    check_rules,
    default_bf16_blocks,
    phase_at,
    plan_for,
)

NAME = "layers.5.mixer.up_proj"


def nvfp4(**fields):
    return PrecisionConfig(name="nvfp4", **fields)


def quantized(cfg, block=5, n=62, phase="main", name=NAME):
    return plan_for(cfg, name, block, n, phase).quantized


@pytest.mark.parametrize(
    ("n", "expected"), [(62, (2, 8)), (52, (2, 7)), (118, (4, 15)), (24, (1, 3)), (7, (0, 1))]
)
def test_edges_in_bf16_follow_the_papers_share(n, expected):
    assert default_bf16_blocks(nvfp4(), n) == expected


def test_the_default_recipe_quantizes_all_operands_of_the_middle():
    assert quantized(nvfp4()) == frozenset(OPERANDS)
    assert not quantized(nvfp4(), block=1)
    assert quantized(nvfp4(), block=2)
    assert quantized(nvfp4(), block=53)
    assert not quantized(nvfp4(), block=54)
    assert not quantized(PrecisionConfig(name="bf16"))


def test_the_last_matching_rule_wins():
    rules = [
        RuleConfig(modules="*.up_proj", format="bf16"),
        RuleConfig(modules="*.up_proj", blocks="5", operands=["fprop.*"], format="nvfp4"),
    ]
    assert quantized(nvfp4(rules=rules)) == {"fprop.input", "fprop.weight"}
    assert not quantized(nvfp4(rules=rules), block=6)
    assert quantized(nvfp4(rules=rules), name="layers.5.mixer.down_proj") == frozenset(OPERANDS)


def test_a_forward_only_bf16_tail():
    cfg = nvfp4(
        phases=[PhaseConfig("main", 0.0), PhaseConfig("tail", 0.82)],
        rules=[RuleConfig(phase="tail", operands=["fprop.*"], format="bf16")],
    )
    assert phase_at(cfg, 0.0) == "main"
    assert phase_at(cfg, 0.8199) == "main"
    assert phase_at(cfg, 0.82) == phase_at(cfg, 1.0) == "tail"
    assert quantized(cfg, phase="main") == frozenset(OPERANDS)
    assert quantized(cfg, phase="tail") == {o for o in OPERANDS if not o.startswith("fprop")}


def test_hadamard_needs_both_wgrad_operands():
    assert LinearPlan(frozenset(OPERANDS)).rotates_wgrad
    assert not LinearPlan(frozenset(OPERANDS) - {"wgrad.input"}).rotates_wgrad
    assert not LinearPlan(frozenset(OPERANDS), hadamard=False).rotates_wgrad


def test_spec_round_trip():
    plan = LinearPlan(frozenset({"dgrad.grad", "fprop.input"}), hadamard=False)
    assert LinearPlan.from_spec(plan.spec) == plan
    assert LinearPlan.from_spec(LinearPlan().spec) == LinearPlan()
    plan = plan_for(nvfp4(hardware_rounding=True, four_over_six="all"), NAME, 5, 62, "main")
    assert plan.hardware_rounding
    assert LinearPlan.from_spec(plan.spec) == plan


def test_block_ranges():
    assert list(block_range("all", 3)) == [0, 1, 2]
    assert list(block_range("first:2", 5)) == [0, 1]
    assert list(block_range("last:2", 5)) == [3, 4]
    assert list(block_range("3", 5)) == [3]
    assert list(block_range("1-3", 5)) == [1, 2, 3]
    assert not list(block_range("last:0", 5))


@pytest.mark.parametrize("text", ["7", "3-9", "4-2", "final:2", ""])
def test_bad_block_ranges_are_named(text):
    with pytest.raises(ConfigError, match="names no blocks of this model; write all, first:N"):
        block_range(text, 5)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (nvfp4(rules=[RuleConfig(format="int4")]), "format='int4' is not one of nvfp4, mxfp4, fp8, bf16"),
        (
            nvfp4(rules=[RuleConfig(format="bf16", operands=["backward"])]),
            "'backward' matches none of fprop.input",
        ),
        (
            nvfp4(rules=[RuleConfig(format="bf16", modules="*.upproj")]),
            r"'\*.upproj' matches no linear layer",
        ),
        (nvfp4(rules=[RuleConfig(format="bf16", phase="tail")]), "phase='tail' matches none of main"),
        (nvfp4(phases=[PhaseConfig("a", 0.5)]), r"starts=\[0.5\] must begin with 0"),
        (nvfp4(phases=[PhaseConfig("a", 0.0), PhaseConfig("a", 0.5)]), "must differ"),
    ],
)
def test_rules_that_mean_nothing_are_refused(cfg, message):
    with pytest.raises(ConfigError, match=message):
        check_rules(cfg, 62, [NAME])

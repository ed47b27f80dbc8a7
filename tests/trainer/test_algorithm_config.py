"""The algorithm in a recipe: every name loads, incompatible parts are refused, and dumped TOML reads back."""

from __future__ import annotations

import json
import tomllib
from contextlib import suppress

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from tandem.protos.errors import ConfigError
from tandem.reward.options.tree import known_keys, tables
from tandem.services.config.docs import as_toml, explained, keys, page
from tandem.services.config.other_names import explain
from tandem.services.config.overrides import apply_overrides
from tandem.trainer.algorithm import AlgorithmConfig, CriticConfig, LossKl, RewardKl
from tandem.trainer.config import LoraOptions
from tandem.trainer.estimators.options import NAMES_ELSEWHERE as ESTIMATORS_ELSEWHERE
from tandem.trainer.estimators.options import GaeOptions, GrpoOptions, RlooOptions, estimator_models
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.off_policy.presets import PRESETS
from tandem.trainer.policy_losses.options import NAMES_ELSEWHERE as LOSSES_ELSEWHERE
from tandem.trainer.policy_losses.options import ClippedSurrogateOptions, GspoOptions, loss_models

QUIET = settings(deadline=None, max_examples=60)  # a busy machine must not fail the test


class Trainer(AlgorithmConfig):
    """`[trainer]`: the section with these and other keys."""

    lora: LoraOptions | None = None
    """Train low-rank adapters alone."""


class Whole(BaseModel):
    """A recipe with only `[trainer]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    trainer: Trainer = Trainer()


def read(text: str = "", *overrides: str) -> Trainer:
    """The algorithm of the TOML under `[trainer]`, with overrides."""
    values = tomllib.loads(f"[trainer]\n{text}")
    apply_overrides(values, overrides, Whole)
    return Whole.model_validate(values).trainer


def complaint(text: str, *overrides: str) -> str:
    with pytest.raises(ValidationError) as caught:
        read(text, *overrides)
    line = explain(Whole, caught.value)
    assert "\n" not in line
    return line


# ---- reading ----


def test_the_default_is_grpo_with_ppo_s_clip_around_proximal_and_behavior_policy() -> None:
    algorithm = read()
    assert algorithm == Trainer()
    assert not (algorithm.needs_critic or algorithm.needs_reference or algorithm.needs_baselines)
    assert (algorithm.advantage, algorithm.loss) == (GrpoOptions(), ClippedSurrogateOptions())
    weights = algorithm.correction.weights
    assert (algorithm.correction.preset, weights.low, weights.high, weights.outside) == ("token_clip", 0.8, 2.0, "stop")
    assert algorithm.aggregation == "token-mean"


def test_names_tables_and_overrides_are_equivalent() -> None:
    algorithm = read('advantage = "rloo"\ncorrection = "icepop"\n[trainer.loss]\nname = "gspo"\nclip_low = 1e-4')
    assert algorithm.advantage == RlooOptions()
    assert algorithm.correction == CorrectionOptions.model_validate({"preset": "icepop"})
    assert algorithm.correction.weights.outside == "zero"
    assert algorithm.loss == GspoOptions(clip_low=1e-4)
    by_hand = ["advantage=rloo", "correction=icepop", "loss=gspo", "loss.clip_low=1e-4"]
    assert read("", *(f"trainer.{one}" for one in by_hand)) == algorithm
    assert read('loss = "gspo"', "trainer.loss.clip_low=1e-4").loss == algorithm.loss
    assert read("", "trainer.loss.clip_high=0.28").loss == ClippedSurrogateOptions(clip_high=0.28)


@pytest.mark.parametrize(
    ("key", "name", "model"),
    [("advantage", *pair) for pair in estimator_models().items()] + [("loss", *pair) for pair in loss_models().items()],
)
def test_every_estimator_and_loss_is_selected_by_its_name(key: str, name: str, model: type[BaseModel]) -> None:
    assert getattr(read(f'{key} = "{name}"'), key) == model()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_selected_by_its_name_and_can_be_overridden(name: str) -> None:
    bent = read(f'loss = "reinforce"\ncorrection = "{name}"', "trainer.correction.weights.high=7").correction
    plain = read(f'loss = "reinforce"\ncorrection = "{name}"').correction
    assert plain.preset == bent.preset == name
    assert bent.weights == plain.weights.model_copy(update={"high": 7.0})
    assert (bent.rejections, bent.veto, bent.proximal) == (plain.rejections, plain.veto, plain.proximal)


def test_overriding_the_preset_of_a_saved_recipe_replaces_it() -> None:
    saved = json.loads(json.dumps(Whole(trainer=read('correction = "geo_rs_veto"')).model_dump(mode="json")))
    for override in ("trainer.correction=icepop", "trainer.correction.preset=icepop"):
        values = json.loads(json.dumps(saved))
        apply_overrides(values, [override], Whole)
        assert Whole.model_validate(values).trainer.correction == read('correction = "icepop"').correction


# ---- refused combinations ----


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('advantage = "grop"', "trainer.advantage: there is no 'grop'; did you mean grpo?"),
        (
            'advantage = "reinforce++"',
            "trainer.advantage: there is no 'reinforce++'; did you mean reinforce_plus_plus?",
        ),
        ('loss = "dapo"', "trainer.loss: there is no 'dapo'; did you mean clipped_surrogate?"),
        ('[trainer.loss]\nname = "gsop"', "trainer.loss: there is no 'gsop'; did you mean gspo?"),
        ('correction = "icepopp"', "trainer.correction.preset: there is no 'icepopp'; did you mean icepop?"),
        ('aggregation = "token_mean"', "trainer.aggregation: there is no 'token_mean'; did you mean token-mean?"),
        ("clip_low = 0.1", "unknown key trainer.clip_low; did you mean trainer.loss.clip_low?"),
        (
            '[trainer.loss]\nname = "gspo"\ndual_clip = 3',
            "unknown key trainer.loss.dual_clip: it belongs to clipped_surrogate, not to gspo",
        ),
        ("[trainer.loss]\ncliplow = 3", "unknown key trainer.loss.cliplow; did you mean trainer.loss.clip_low?"),
        ("[trainer.loss]\ndual_clip = 0.5", "trainer.loss.dual_clip: must be above 1, or 0 to switch it off (got 0.5)"),
        (
            '[trainer.loss]\nname = "clip_cov"\ncovariance_low = 9',
            "trainer.loss: covariance_low (9.0) must lie below covariance_high (5.0)",
        ),
        (
            "[trainer.correction.weights]\nlow = 3",
            "trainer.correction.weights: low must be below high, got low = 3 and high = 2",
        ),
        (
            "[trainer.kl.loss]\nunbiased = true\nestimator = 'abs'",
            "trainer.kl.loss: unbiased needs the estimator k1 or k3, not abs: the others' expectation is not the KL",
        ),
        ("[trainer.kl.loss]\nestimator = 'k33'", "trainer.kl.loss.estimator: there is no 'k33'; did you mean k3?"),
        (
            "[trainer.kl]\ncoefficient = 1",
            "unknown key trainer.kl.coefficient; "
            "did you mean trainer.kl.reward.coefficient or trainer.kl.loss.coefficient?",
        ),
        (
            "drop_zero_variance = true",
            "unknown key trainer.drop_zero_variance; did you mean trainer.selection.drop_zero_variance?",
        ),
        (
            "[trainer.selection]\nreward_clip = [1, 0]",
            "trainer.selection: reward_clip is [lowest, highest], not [1.0, 0.0]",
        ),
        ("[trainer.selection.overlong_penalty]", "trainer.selection.overlong_penalty.buffer_tokens is missing"),
        ("[trainer.lora]\nranks = 8", "unknown key trainer.lora.ranks; did you mean trainer.lora.rank?"),
        ("[trainer.critic]\nclip = 8", "unknown key trainer.critic.clip; did you mean trainer.critic.value_clip?"),
        (
            '[[trainer.correction.rejections]]\nlevel = "token"',
            "trainer.correction.rejections[0]: token ratio rejects nothing: give low or high",
        ),
    ],
)
def test_an_error_is_one_line_with_the_place_and_the_nearest_known_name(text: str, line: str) -> None:
    assert complaint(text) == line


@pytest.mark.parametrize(
    ("key", "name", "meant"),
    [
        *(("advantage", *pair) for pair in ESTIMATORS_ELSEWHERE.items()),
        *(("loss", *pair) for pair in LOSSES_ELSEWHERE.items()),
    ],
)
def test_names_of_other_libraries_suggest_ours(key: str, name: str, meant: str) -> None:
    assert complaint(f'{key} = "{name}"') == f"trainer.{key}: there is no {name!r}; did you mean {meant}?"
    assert complaint(f'{key} = "{name.upper()}"').endswith(f"; did you mean {meant}?")


def test_an_unknown_name_lists_the_valid_ones() -> None:
    assert complaint('loss = "zzzz"') == f"trainer.loss: there is no 'zzzz'; there are {', '.join(loss_models())}"
    assert complaint("advantage = 3") == "trainer.advantage: should be a name or table (got 3)"


@pytest.mark.parametrize("loss", sorted(loss_models()))
def test_a_loss_with_a_ratio_refuses_presets_that_bypass_the_proximal_policy(loss: str) -> None:
    for preset in PRESETS:
        text = f'loss = "{loss}"\ncorrection = "{preset}"'
        if CorrectionOptions(preset=preset).needs_ratio_free_loss and loss_models()[loss].has_ratio:
            assert complaint(text).startswith(f"trainer: correction {preset} bypasses")
        else:
            assert read(text).correction.preset == preset


def test_only_gae_has_a_critic() -> None:
    assert all(read(f'advantage = "{name}"').needs_critic for name in ("gae", "turn_gae")) and not read().needs_critic
    text = "[trainer.critic]\nlearning_rate = 1e-4"
    assert read(text, "trainer.advantage=gae").critic == CriticConfig(learning_rate=1e-4)
    assert complaint(text).startswith("trainer: critic is set, but advantage grpo has none")
    assert read(text, "trainer.critic={}").critic == CriticConfig()


def test_only_a_kl_penalty_needs_a_reference_policy() -> None:
    assert not read().needs_reference
    in_loss = read("", "trainer.kl.loss.coefficient=0.01")
    assert in_loss.needs_reference and in_loss.kl.loss == LossKl(coefficient=0.01) and in_loss.kl.reward is None
    both = read("[trainer.kl]\nreward = {}\nloss = {}")
    assert both.needs_reference and both.kl.reward == RewardKl() and both.kl.loss == LossKl()
    assert not read("[trainer.kl.loss]\ncoefficient = 0.1", "trainer.kl.loss=none").needs_reference


KL_REWARD, OVERLONG = "[trainer.kl.reward]", "[trainer.selection.overlong_penalty]\nbuffer_tokens = 4"
IGNORED, NEGATIVE = "changes the reward, and advantage gdpo", "makes rewards negative, and advantage maxrl"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("gdpo", KL_REWARD, f"kl.reward {IGNORED}"),
        ("gdpo", OVERLONG, f"selection.overlong_penalty {IGNORED}"),
        ("gdpo", "[trainer.selection]\nreward_clip = [-1, 1]", f"selection.reward_clip {IGNORED}"),
        (
            "gdpo",
            "[trainer.selection]\ndrop_zero_variance = true",
            "selection.drop_zero_variance compares whole rewards, and advantage gdpo their",
        ),
        ("maxrl", KL_REWARD, f"kl.reward {NEGATIVE}"),
        ("maxrl", OVERLONG, f"selection.overlong_penalty {NEGATIVE}"),
    ],
)
def test_estimators_refuse_options_on_rewards_that_do_not_fit_them(name: str, text: str, line: str) -> None:
    assert complaint(text, f"trainer.advantage={name}").startswith(f"trainer: {line}")
    for other in ("grpo", "dr_grpo"):
        read(text, f"trainer.advantage={other}")
    assert read("[trainer.kl.loss]", "trainer.advantage=gdpo").needs_components
    read("[trainer.kl.loss]\n[trainer.selection]\nreward_clip = [0, 1]", "trainer.advantage=maxrl")


@pytest.mark.parametrize(
    "over",
    [
        "trainer.correction.veto=1e-4",
        "trainer.correction.weights.normalize=true",
        'trainer.correction.rejections=[{level = "token", high = 2.0}]',
    ],
)
def test_options_over_the_whole_batch_refuse_loglinear(over: str) -> None:
    line = complaint('correction = "areal_loglinear"', over)
    assert line.startswith("trainer: correction.proximal loglinear is known only in the pass that trains a token")
    assert read('correction = "areal"', over).correction.needs_whole_batch
    for name in loss_models():
        assert read(f'correction = "areal_loglinear"\nloss = "{name}"').correction.proximal == "loglinear"


def check(algorithm: AlgorithmConfig, samples: int = 8, min_scored: int = 0, tokens: int = 256) -> None:
    algorithm.check_sampling(samples_per_prompt=samples, min_scored_samples=min_scored, max_response_tokens=tokens)


@pytest.mark.parametrize("name", estimator_models())
def test_a_group_too_small_for_the_estimator_is_refused(name: str) -> None:
    algorithm = read(f'advantage = "{name}"')
    fewest_scored = algorithm.advantage.min_group_size
    fewest = max(2, fewest_scored) if algorithm.advantage.compares_answers else 1
    check(algorithm)
    check(algorithm, fewest)
    if fewest > 1:
        with pytest.raises(ValueError, match=rf"{name} compares {fewest} .*samples_per_prompt \(now {fewest - 1}\)"):
            check(algorithm, fewest - 1)
    check(algorithm, min_scored=fewest_scored)
    if fewest_scored > 1:
        with pytest.raises(ValueError, match=r"min_scored_samples \(now 1\)"):
            check(algorithm, min_scored=1)


def test_an_overlong_penalty_needs_answers_as_long_as_its_buffer() -> None:
    algorithm = read("", "trainer.selection.overlong_penalty.buffer_tokens=64")
    check(algorithm, tokens=64)
    with pytest.raises(ValueError, match=r"buffer_tokens \(64\) is above rollout.max_response_tokens \(63\)"):
        check(algorithm, tokens=63)


# ---- documentation and dumps ----


def test_every_key_is_documented_and_every_table_defaults_to_its_own_defaults() -> None:
    assert {f"{key.section}.{key.name}" for key in keys(Whole)} <= set(known_keys(Whole))
    for key in keys(Whole):
        assert len(key.doc) > 10, key
    for table in tables(Whole):
        if table.default is not None and not table.shape.many:
            assert table.default == type(table.default)(), (
                f"a recipe with an empty [{table.path}] would change something"
            )
    assert page(Whole).count("\n### ") == len(loss_models()) + len(estimator_models())
    assert sum(line.startswith("trainer.loss.clip_low of ") for line in explained(Whole)) > 3


def test_a_bare_name_is_dumped_with_all_options_and_their_defaults() -> None:
    lines = as_toml(Whole(trainer=read('loss = "gspo"\ncorrection = "icepop"'))).split("\n")
    assert 'name = "gspo"  # default: "clipped_surrogate"' in lines
    assert 'preset = "icepop"  # default: "token_clip"' in lines
    assert 'outside = "zero"  # default: "clamp"' in lines


leaves = sorted({key.section.partition(".")[2] + "." + key.name for key in keys(Whole) if "." in key.section})


@st.composite
def algorithms(draw: st.DrawFn) -> Trainer:
    overrides = [
        f"trainer.advantage={draw(st.sampled_from(sorted(estimator_models())))}",
        f"trainer.loss={draw(st.sampled_from(sorted(loss_models())))}",
        f"trainer.correction={draw(st.sampled_from(sorted(PRESETS)))}",
    ]
    for _ in range(draw(st.integers(0, 4))):  # overrides that are not valid together are left out
        value = draw(st.sampled_from(["0.3", "2", "1.5", "true", "k3", "[]"]))
        more = [*overrides, f"trainer.{draw(st.sampled_from(leaves))}={value}"]
        with suppress(ConfigError, ValidationError):  # a table and a key inside it, or incompatible values
            read("", *more)
            overrides = more
    try:
        return read("", *overrides)
    except ValidationError:
        assume(False)
        raise


@QUIET
@given(algorithms())
def test_dumped_json_and_toml_read_back_as_the_same_table(algorithm: Trainer) -> None:
    whole = Whole(trainer=algorithm)
    assert Whole.model_validate(json.loads(json.dumps(whole.model_dump(mode="json")))) == whole
    assert Whole.model_validate(tomllib.loads(as_toml(whole))) == whole
    assert Whole.model_validate(whole.model_dump()) == whole


@QUIET
@given(algorithms(), st.sampled_from(leaves), st.data())
def test_a_misspelt_key_is_a_one_line_error(algorithm: Trainer, leaf: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(leaf) - 1))
    slip = leaf[:place] + leaf[place + 1 :]
    assume(
        slip.count(".") == leaf.count(".") and ".." not in f".{slip}." and f"trainer.{slip}" not in known_keys(Whole)
    )
    values = Whole(trainer=algorithm).model_dump(mode="json")
    apply_overrides(values, [f"trainer.{slip}=1"], Whole)
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(values)
    line = explain(Whole, caught.value)
    assert "\n" not in line and line.startswith("unknown key trainer.")


def test_a_lora_key_enables_adapters_and_none_disables_them() -> None:
    assert read("", "trainer.lora.rank=8").lora == LoraOptions(rank=8)
    assert read("[trainer.lora]\nrank = 8", "trainer.lora=none").lora is None


def test_ppo_with_two_lambdas() -> None:
    algorithm = read('[trainer.advantage]\nname = "gae"\nlam = 0.95\ncritic_lam = 1.0')
    assert algorithm.advantage == GaeOptions(lam=0.95, critic_lam=1.0)
    assert (
        read("", 'trainer.advantage={name="gae", critic_lam=0.5}', "trainer.advantage.critic_lam=none").advantage
        == GaeOptions()
    )

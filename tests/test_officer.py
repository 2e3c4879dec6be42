"""A privacy officer's list, that of NIST SP 800-226: each point is computed, answered by people, or said to be not stated."""

import json
import math
from dataclasses import fields, replace

import pytest

from dpft import guarantee as guarantees
from dpft.card import CAUTION, FACTOR_CAP, QUESTIONS, rounded_up
from dpft.curve import privacy_curve
from dpft.guarantee import Guarantee, Statement
from dpft.privacy import SampledGaussian

PLAN = [SampledGaussian(1.0, 0.01, 300, "train")]
ASKED = {  # a point of the list that only people can answer -> where its answer stands
    "which data, and of when": "data_name", "whose data": "data_owner", "provenance of the base model": "base_model",
    "licences of both models": "licence", "trust model: who sees data, checkpoint and logs": "trust",
    "utility over subgroups": "subgroups", "linked rows, and why the unit covers a person": "unit_choice",
    "whether epsilon is small enough": "epsilon_choice", "how settings were chosen": "hyperparameters",
    "timing and other side channels": "side_channels", "retention": "retention", "who ran it, and when": "author"}
COMPUTED = {  # a point that the run itself answers -> what the card says of it
    "privacy unit": "| unit | patient |", "relation of neighbours": "| adjacency | add/remove one unit |",
    "what a group is promised": "A person to whom two of them belong is protected with epsilon",
    "replace-one": "If neighbours replace one patient instead", "sampling": "| sampling | Poisson |",
    "accountant": "| accountant | rdp |", "mechanism": "noise multiplier 1, sampling rate 0.01, 300 steps",
    "bound on a contribution": "bound 0.5", "what was public": "Assumed to be public:",
    "what was not charged": "Accesses to private data that were not charged:", "arithmetic of the noise": "Assumed about the arithmetic:",
    "versions": "| version of torch |", "what is not covered": "What is not covered:",
    "what an attacker finds": "accepts 1 % of false alarms", "cost of other runs": "Other runs on the same data have a privacy cost too"}


def example(**knobs):
    usual = dict(target_delta=1e-5, spent=PLAN, planned=PLAN, unit="patient", accountant="rdp", clip=0.5, secure_mode=False)
    return Guarantee(PLAN, **(usual | knobs))


@pytest.mark.parametrize("point", ASKED)
def test_a_point_is_answered_or_not_stated(point):
    name = ASKED[point]
    line = f"| {QUESTIONS[name]} | "
    assert line + "not stated |" in example().report()
    answered = example(statement=Statement(**{name: "as agreed with the board"}))
    assert line + "as agreed with the board |" in answered.report() and line + "not stated |" not in answered.report()
    assert answered.report().count("not stated") == len(QUESTIONS) - 1


def test_every_question_is_on_the_list_and_every_answer_has_a_question():
    assert set(ASKED.values()) == set(QUESTIONS) == {one.name for one in fields(Statement)}


@pytest.mark.parametrize("point", COMPUTED)
def test_what_a_run_knows_it_says(point):
    assert COMPUTED[point] in example().report()


def test_answers_are_saved_with_the_card_and_sealed(tmp_path):
    told = example(statement=Statement(trust="two engineers", retention="five years"))
    told.publish(tmp_path)
    card, content = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "guarantee.json").read_text())
    assert "two engineers" in card and content["statement"]["retention"] == "five years"
    assert guarantees.content_digest(content) != guarantees.content_digest(json.loads(json.dumps(
        replace(told, statement=Statement()).content())))
    assert Guarantee.load(tmp_path / "guarantee.json").statement == told.statement


@pytest.mark.parametrize("sigma, loud", [(5.0, False), (0.1, True)])
def test_no_factor_beyond_the_cap_and_a_caution_above_ten(sigma, loud):
    mechanisms = [SampledGaussian(sigma, 0.5, 100, "train")]
    one = replace(example(), mechanisms=mechanisms, spent=mechanisms, planned=mechanisms)
    report, value = one.report(), one.epsilon()
    assert ((value > CAUTION) == loud) and ("Caution: epsilon is above 10" in report) == (value > CAUTION)
    assert (f"may be more than {FACTOR_CAP:,.0f}" in report) == (value > math.log(FACTOR_CAP))
    assert ("at most a factor of" in report) == (value <= math.log(FACTOR_CAP))


def test_replace_one_is_computed_as_such():
    "From the curve of the relation, not from that of adding or removing one."
    one = example()
    assert one.replace_epsilon() == pytest.approx(privacy_curve(tuple(one.stated), 1, "replace").epsilon(1e-5), rel=1e-9)
    assert f"epsilon is {rounded_up(one.replace_epsilon()):.2f}" in one.report() and abs(one.replace_epsilon() - one.epsilon()) > 0.01

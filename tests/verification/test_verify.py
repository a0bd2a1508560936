"""`verify` itself: what it takes and refuses, what it makes of what checks find, and what it leaves as it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from misbehaving import HEADS, MODULE_READING, READING, WIDTH, Head, right
from torch import nn

import saccade
from saccade.verification import (
    Check,
    Finding,
    Hints,
    Inapplicable,
    Limits,
    Location,
    Outcome,
    Promise,
    Report,
    TargetError,
    Undecided,
    assert_correct,
    verify,
)
from saccade.verification._verify import _chosen
from saccade.verification.checks import CHECKS
from saccade.verification.findings._finding import FAMILIES
from saccade.verification.running._causes import explained


def finding(check, severity="error", family=None, **more):
    return Finding(check, family or check, severity, f"{check} is broken.", **more)


def checks(**runs):
    return tuple(Check(name, name, f"{name} holds", "", "", run) for name, run in runs.items())


def passes(subject):
    yield from ()


def fails(subject):
    yield Finding("scale", "scale", "error", "it is twice too large", evidence={"ratio": torch.tensor(2.0)})


@pytest.fixture
def with_checks(monkeypatch):
    return lambda *made: monkeypatch.setattr("saccade.verification.checks.CHECKS", made)


# The report


def test_a_report_says_what_was_found_and_how_it_was_called(with_checks):
    with_checks(*checks(scale=fails, softmax=passes))
    report = verify(right, False, how=READING)
    assert not report.ok
    assert report.target == "right"
    assert report.called == f"right(q, k, v) with q, k and v each (batch, heads, length, {WIDTH}), {HEADS} heads"
    assert (report.causal, report.assumed) == (False, ())
    assert [(outcome.name, outcome.family, outcome.promise, outcome.status) for outcome in report.outcomes] == [
        ("scale", "scale", "scale holds", "failed"),
        ("softmax", "softmax", "softmax holds", "passed"),
    ]
    assert report.errors == report.findings
    assert report.findings[0].evidence == {"ratio": 2.0}
    assert 0 < sum(outcome.seconds for outcome in report.outcomes) < report.seconds
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize("isolated", [True, False])
def test_direction_is_found_where_it_is_not_promised(with_checks, isolated):
    with_checks(*checks(scale=passes))
    report = verify(right, how=READING, isolated=isolated)
    assert report.causal is False
    assert report.assumed == ("it is bidirectional: every output depends on every input (otherwise --causal)",)

    def causal(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    report = verify(causal, how=READING, isolated=isolated)
    assert report.causal is True
    assert report.assumed == ("it is causal: no output depends on a later input (otherwise --bidirectional)",)


def test_in_this_process_and_in_a_child_the_same_is_found():
    def doubled(q, k, v):
        return (q @ k.mT * (2 * q.shape[-1] ** -0.5)).softmax(-1) @ v

    def told(report):
        return [(finding.family, finding.severity, finding.message) for finding in report.findings], [
            (outcome.name, outcome.status, outcome.reason) for outcome in report.outcomes
        ]

    families = ["scale", "causal-leak", "mixing", "order"]
    reports = [verify(doubled, False, how=READING, checks=families, isolated=isolated) for isolated in (True, False)]
    assert told(reports[0]) == told(reports[1])


@pytest.mark.parametrize("isolated", [True, False])
def test_the_target_and_the_random_state_are_as_they_were(isolated):
    head = Head().train()
    before, state = copy.deepcopy(head.state_dict()), torch.get_rng_state()
    verify(head, False, how=MODULE_READING, checks=["mixing", "dropout"], isolated=isolated)
    assert head.training
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    assert all(parameter.grad is None for parameter in head.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in head.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_every_check_works_on_a_copy(with_checks):
    def spoils(subject):
        with torch.no_grad():
            subject.module.out.weight.zero_()
        yield from ()

    def sees(subject):
        if not subject.module.out.weight.any():
            yield Finding("mixing", "mixing", "error", "it is spoilt")

    with_checks(*checks(scale=spoils, mixing=sees))
    assert verify(Head(), False, how=MODULE_READING, isolated=False).ok


def test_a_target_that_cannot_be_copied_is_verified_as_it_is(with_checks):
    class Stubborn(Head):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    def called(subject):
        subject(subject.inputs())
        yield from ()

    def copied(subject):
        subject.to(torch.float64)
        yield from ()

    with_checks(*checks(scale=called, precision=copied))
    report = verify(Stubborn(), False, how=MODULE_READING)
    assert [(outcome.status, outcome.reason) for outcome in report.outcomes] == [
        ("passed", ""),
        ("n/a", "it cannot be copied (RuntimeError: no copies)"),
    ]


def test_what_breaks_off_in_a_check_is_not_laid_to_the_target(with_checks):
    def broken(subject):
        yield from {}["nothing"]

    broken.__code__ = broken.__code__.replace(co_filename=saccade.__file__)
    with_checks(*checks(scale=broken, softmax=passes))
    report = verify(right, False, how=READING)
    assert not report.errors and not report.ok and report.untested == "1 check broke off"
    assert [(finding.severity, finding.family) for finding in report.findings] == [("warning", "scale")]
    assert "broke off with KeyError: 'nothing'" in report.findings[0].message
    assert [outcome.status for outcome in report.outcomes] == ["n/a", "passed"]


def test_the_same_defect_of_ours_is_told_once(with_checks):
    def broken(subject):
        yield from {}["nothing"]

    broken.__code__ = broken.__code__.replace(co_filename=saccade.__file__)
    with_checks(*checks(scale=broken, softmax=broken))
    assert len(verify(right, False, how=READING).findings) == 1


def test_what_mixes_no_positions_is_not_taken_for_attention():
    families = ["scale", "softmax", "causal-leak", "causal-blindness", "mask-meaning", "order"]
    report = verify(nn.Linear(WIDTH, WIDTH), how=MODULE_READING, checks=families)
    assert not report.ok and report.untested == "no attention was seen"
    assert not report.errors and report.causal is None and report.assumed == ()
    assert "No output depends on the input of another position." in str(report)
    assert str(report).startswith("No attention was seen in Linear: ")


def test_progress_is_told_each_stage(with_checks):
    with_checks(*checks(scale=passes, softmax=passes))
    told = []
    verify(right, False, how=READING, progress=lambda *stage: told.append(stage))
    stages = [(0, 2, "loading"), (0, 2, "calling"), (0, 2, "looking"), (0, 2, "scale"), (1, 2, "softmax")]
    assert told == stages


# What it takes


def test_families_are_chosen():
    report = verify(right, False, how=READING, checks=["order", "causal-leak"])
    assert [outcome.family for outcome in report.outcomes] == ["causal-leak", "order"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"checks": ["scales"]}, ValueError, "checks: scales: expected some of scale, softmax"),
        ({"checks": []}, ValueError, "checks: none: expected some of"),
        ({"checks": "scale"}, TypeError, "checks: expected families in a list, got the string 'scale'"),
        ({"how": 3}, TypeError, "how: expected Hints, Reading, a function or a string that names one, got int"),
        ({"causal": True, "promise": Promise(causal=False)}, ValueError, "causal=True and promise.causal=False contra"),
    ],
)
def test_what_cannot_be_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        verify(right, **options)


def test_strings_are_checked_before_a_process_is_started(monkeypatch):
    monkeypatch.setattr("saccade.verification.running._child.Child", None)
    with pytest.raises(ValueError, match="there is no file nowhere.py"):
        verify("nowhere.py:attend")
    with pytest.raises(ValueError, match="there is no file nowhere.py"):
        verify(right, how="nowhere.py:adapter")


@pytest.mark.parametrize("isolated", [True, False])
def test_candidates_reach_the_caller(monkeypatch, isolated):
    def undecided(*_):
        raise Undecided("two ways fit", [("(batch, heads, length, width)", "--layout BHLD")])

    monkeypatch.setattr("saccade.verification.subject.discovery._discover.discover", undecided)
    with pytest.raises(Undecided) as raised:
        verify(right, isolated=isolated)
    assert raised.value.message == "two ways fit"
    assert raised.value.candidates == (("(batch, heads, length, width)", "--layout BHLD"),)


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def broken(*_):
        raise KeyError("ours")

    broken.__code__ = broken.__code__.replace(co_filename=saccade.__file__)
    monkeypatch.setattr("saccade.verification.subject.discovery._discover.discover", broken)
    with pytest.raises(KeyError, match="ours") as raised:
        verify(right)
    assert "in the child process" in str(raised.value.__cause__)
    assert "in broken" in str(raised.value.__cause__)


def test_hints_and_sizes_are_joined(monkeypatch):
    seen = []

    def discovered(target, hints, *_):
        seen.append(hints)
        raise Undecided("seen")

    monkeypatch.setattr("saccade.verification.subject.discovery._discover.discover", discovered)
    with pytest.raises(Undecided):
        verify(right, embed_dim=13, how=Hints(form="attention", num_heads=7), isolated=False)
    assert seen == [Hints(form="attention", embed_dim=13, num_heads=7)]


def test_an_adapter_wins(with_checks):
    with_checks(*checks(scale=passes))

    def odd(everything, *, quietly):
        return {"answer": right(*everything)}

    def adapter(target, query, key, value):
        return target((query, key, value), quietly=True)["answer"]

    report = verify(adapter and odd, False, how=adapter)
    assert report.outcomes[0].status == "passed", str(report)
    assert report.called.startswith("odd(query, key, value) with")


def test_a_class_is_made_with_its_arguments(with_checks):
    with_checks(*checks(scale=passes))
    report = verify(Head, False, arguments={"width": 13})
    assert report.called == "forward(x) with x (batch, length, 13)"


def test_a_file_is_run_in_the_child_alone(tmp_path, with_checks):
    with_checks(*checks(scale=passes))
    path = tmp_path / "theirs_alone.py"
    path.write_text(
        "import sys\nimport torch\nsys.dirty = True\n\n"
        "def attend(q, k, v):\n    return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"
    )
    import sys

    report = verify(f"{path}:attend", how=READING)
    assert report.ok and report.outcomes[0].status == "passed"
    assert report.target == f"{path}:attend"
    assert not hasattr(sys, "dirty") and "theirs_alone" not in sys.modules


def test_assert_correct_raises_with_the_report(with_checks):
    with_checks(*checks(scale=fails))
    with pytest.raises(AssertionError, match=r"(?s)right breaks a promise of attention: scale\..*twice too large"):
        assert_correct(right, False, how=READING)
    with_checks(*checks(scale=passes))
    assert_correct(right, False, how=READING)


def test_it_is_at_the_top_of_the_package():
    assert saccade.verify is verify


# The checks as a whole


def test_every_family_has_a_check_that_says_what_it_does():
    assert {check.family for check in CHECKS} == set(FAMILIES)
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert check.promise and check.how and check.why, check.name
        assert set(check.follows_from) <= set(FAMILIES), check.name


# What follows from what


def explain(made, findings):
    outcomes = [
        Outcome(check.name, check.family, "", "failed" if any(f.check == check.name for f in findings) else "passed")
        for check in made
    ]
    return explained(made, findings, outcomes)


def chain(**follows):
    return [Check(name, name, "", "", "", passes, tuple(from_)) for name, from_ in follows.items()]


def severities(findings):
    return {finding.check: finding.severity for finding in findings}


def test_what_follows_is_a_note_that_says_from_what():
    made = chain(scale=(), softmax=("scale",), padding=("cache",))
    told, outcomes = explain(made, [finding("softmax"), finding("scale"), finding("padding")])
    assert severities(told) == {"scale": "error", "padding": "error", "softmax": "note"}
    assert told[-1].message == "softmax is broken. Probably follows from scale."
    assert [outcome.status for outcome in outcomes] == ["failed", "n/a", "failed"]


def test_warnings_explain_nothing_and_are_not_explained():
    made = chain(scale=(), softmax=("scale",))
    told, _ = explain(made, [finding("scale", "warning"), finding("softmax")])
    assert severities(told) == {"scale": "warning", "softmax": "error"}
    told, _ = explain(made, [finding("scale"), finding("softmax", "warning")])
    assert severities(told) == {"scale": "error", "softmax": "warning"}


def test_a_call_that_raised_follows_from_sizes_that_are_not_taken():
    made = chain(**{"causal-leak": (), "robustness": (), "padding": ()})
    stopped = finding("causal-leak", evidence={"raised": "RuntimeError: shapes"})
    sized = finding("robustness", evidence={"raised": "RuntimeError: invalid for input", "batch": 1})
    told, outcomes = explain(made, [stopped, finding("padding"), sized])
    assert [(one.check, one.severity) for one in told] == [
        ("robustness", "error"),
        ("padding", "error"),
        ("causal-leak", "note"),
    ]
    assert "follows from robustness" in told[-1].message
    assert outcomes[0].status == "n/a"
    told, _ = explain(made, [stopped, finding("robustness", evidence={"draws": []})])
    assert severities(told) == {"causal-leak": "error", "robustness": "error"}


UNUSED = {"projection": "qkv", "channels": [0, 1]}
NOTHING = [("precision", {"finite": 0}), ("causal-blindness", {"mixes": False}), ("mixing", UNUSED)]


@pytest.mark.parametrize("severity", ["error", "warning"])
@pytest.mark.parametrize(("name", "evidence"), NOTHING)
def test_a_mask_that_hides_all_explains_what_it_leaves_undone(name, evidence, severity):
    made = chain(**{"mask-meaning": ("mixing",), name: ()})
    blind = finding(name, severity, evidence=evidence)
    told, outcomes = explain(made, [blind, finding("mask-meaning", evidence={"hides_all": True})])
    assert severities(told) == {"mask-meaning": "error", name: "note"}
    assert told[-1].message == f"{name} is broken. Probably follows from mask-meaning."
    assert outcomes[0].status == "failed"
    told, _ = explain(made, [blind, finding("mask-meaning", evidence={"hides_all": False})])
    assert severities(told)[name] == severity


def test_a_constant_that_a_dtype_lacks_follows_from_nothing():
    made = chain(**{"causal-blindness": (), "precision": ("causal-blindness",)})
    constant = finding("precision", evidence={"dtype": "float16", "raised": "RuntimeError: overflow"})
    told, outcomes = explain(made, [finding("causal-blindness"), constant])
    assert severities(told) == {"causal-blindness": "error", "precision": "error"}
    assert [outcome.status for outcome in outcomes] == ["failed", "failed"]
    told, _ = explain(made, [finding("causal-blindness"), finding("precision", evidence={"dtype": "float16"})])
    assert severities(told) == {"causal-blindness": "error", "precision": "note"}


def test_a_chain_has_one_cause():
    made = chain(scale=(), softmax=("scale",), padding=("softmax",))
    told, _ = explain(made, [finding(name) for name in ("scale", "softmax", "padding")])
    assert severities(told) == {"scale": "error", "softmax": "note", "padding": "note"}
    told, _ = explain(made, [finding(name) for name in ("scale", "padding")])
    assert severities(told) == {"scale": "error", "padding": "error"}  # what joins them is not there


def test_of_a_circle_the_first_is_the_cause():
    made = chain(scale=("padding",), softmax=("scale",), padding=("softmax",))
    told, _ = explain(made, [finding(name) for name in ("padding", "softmax", "scale")])
    assert severities(told) == {"scale": "error", "softmax": "note", "padding": "note"}


def test_a_circle_with_a_cause_outside_is_explained_by_it():
    made = chain(scale=("padding", "cache"), padding=("scale",), cache=())
    told, _ = explain(made, [finding(name) for name in ("scale", "padding", "cache")])
    assert severities(told) == {"cache": "error", "scale": "note", "padding": "note"}


def test_findings_are_sorted_by_weight_and_then_by_check():
    made = chain(scale=(), softmax=(), padding=())
    mixed = [
        finding("padding", "note"),
        finding("padding"),
        finding("softmax", "warning"),
        finding("scale", "note"),
        finding("softmax"),
    ]
    told, _ = explain(made, mixed)
    assert [(one.severity, one.check) for one in told] == [
        ("error", "softmax"),
        ("error", "padding"),
        ("warning", "softmax"),
        ("note", "scale"),
        ("note", "padding"),
    ]


def test_the_same_error_of_a_call_is_told_once(with_checks):
    def raising(subject):
        raise TargetError("ValueError: sizes 3 and 5 differ", Location("/theirs.py", 7, "x = y"))
        yield

    def raising_elsewhere(subject):
        raise TargetError("ValueError: sizes 3 and 5 differ", Location("/theirs.py", 8, "x = y"))
        yield

    with_checks(*checks(scale=raising, softmax=raising, padding=raising_elsewhere, order=passes))
    report = verify(right, False, how=READING)
    assert [(finding.family, finding.location.line) for finding in report.errors] == [("scale", 7), ("padding", 8)]
    assert [(outcome.name, outcome.status) for outcome in report.outcomes] == [
        ("scale", "failed"),
        ("softmax", "n/a"),
        ("padding", "failed"),
        ("order", "passed"),
    ]
    assert report.outcomes[1].reason == "stopped by the error reported under scale"


def test_who_looks_for_an_error_tells_it(with_checks):
    where = Location("/theirs.py", 7, "x = y")

    def raising(subject):
        raise TargetError("RuntimeError: expected Float", where)
        yield

    def looking(subject):
        raised = {"raised": "RuntimeError: expected Float", "dtype": "bfloat16"}
        yield Finding("robustness", "robustness", "error", "It takes no bfloat16.", evidence=raised, location=where)

    with_checks(*checks(precision=raising, robustness=looking))
    report = verify(right, False, how=READING)
    assert [(finding.check, finding.message) for finding in report.errors] == [("robustness", "It takes no bfloat16.")]


def test_a_check_that_does_not_apply_says_why(with_checks):
    def inapplicable(subject):
        raise Inapplicable("it takes no mask")
        yield

    with_checks(*checks(padding=inapplicable))
    report = verify(right, False, how=READING)
    assert [(outcome.status, outcome.reason) for outcome in report.outcomes] == [("n/a", "it takes no mask")]
    assert not report.ok and report.untested == "no check applies" and report.findings == ()


def test_limits_can_be_given(with_checks):
    with_checks(*checks(scale=passes))
    assert verify(right, False, how=READING, limits=Limits(5.0, 1.0)).ok


@pytest.mark.slow
def test_modules_of_any_form_are_called(with_checks):
    with_checks(*checks(scale=passes))
    report = verify(nn.MultiheadAttention(24, 4, batch_first=True), False)
    assert isinstance(report, Report)
    assert [outcome.status for outcome in report.outcomes] == ["passed"], str(report)


def test_checks_are_chosen_by_the_names_of_rows_and_a_family_names_all_of_it():
    def names(*wanted):
        return [check.name for check in _chosen(wanted)]

    assert names("compile") == ["compile"]
    assert names("dtype and device", "scale") == ["scale", "dtype and device"]
    assert names("robustness") == ["robustness", "dtype and device", "compile"]

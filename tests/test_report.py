"""Reports: what they hold, when they are filled, how they travel."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys

import pytest
import torch

import nanscan
from nanscan.engine.result import Row, total
from nanscan.report import Label, Report, ScanSource, StepReport, TensorReport
from nanscan.report_rows import unravel

NAN, INF = math.nan, math.inf
LABELS = [
    Label(("emb.weight", "head.weight"), (2, 3), "float32", "cpu", "grad"),
    Label(("bias",), (4,), "float16", "cuda:1", "grad"),
    Label(("head.weight",), (2, 3), "float32", "cpu", "grad"),
]
ROWS = [Row(0, (2,), 5.0, 4.0, 0, 0, -1), Row(1, (), 1.0, 1.0, 2, 1, 3)]


class Counting:
    """An engine's result that counts what is asked of it."""

    def __init__(self):
        self.scan, self.asked = total(ROWS, (), 10), []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.scan, name)


def step_report(**known):
    return StepReport.from_scan(total(ROWS, (), 10), LABELS, step=7, skipped=True, action="skip", time=1.5, **known)


def test_fields_are_taken_from_the_scan_when_they_are_read_and_once():
    scan = Counting()
    report = StepReport.from_scan(scan, LABELS, step=7)
    assert scan.asked == []
    assert report.finite is False
    assert report.finite is False
    assert scan.asked == ["finite"]
    assert report.step == 7
    assert (report.origin, report.buffers, report.parameters, report.action) == (None, (), (), "step")
    assert scan.asked == ["finite"]


def test_table_is_not_kept_by_the_report_that_was_asked_for_it():
    report = step_report()
    assert len(report.tensors) == 2
    assert "tensors" not in vars(report)
    assert report.bad is report.bad


def test_rows_have_names_shapes_and_index_tuples():
    report = step_report()
    tied, bias = report.tensors
    assert tied.name == "emb.weight (= head.weight)"
    assert (tied.shape, tied.norm, tied.inf_norm, tied.first_bad, tied.finite) == ((2, 3), 5.0, 4.0, None, True)
    assert (bias.name, bias.dtype, bias.device, bias.first_bad) == ("bias", "float16", "cuda:1", (3,))
    assert math.isnan(bias.norm)
    assert (bias.nan_count, bias.inf_count, bias.numel) == (2, 1, 4)
    assert [row.name for row in report.bad] == ["bias"]


def test_row_with_inf_only_has_norm_inf():
    report = Report.from_scan(total([Row(0, (), 1.0, 1.0, 0, 1, 0)], (), 4), [LABELS[1]])
    assert report.norm == report.bad[0].norm == INF


def test_places_given_by_the_caller_win_over_the_flat_index():
    report = Report.from_scan(total(ROWS, (), 10), LABELS, {1: (9,)})
    assert report.bad[0].first_bad == (9,)


def test_totals_of_a_bad_scan():
    report = step_report()
    assert math.isnan(report.norm)
    assert report.finite_norm == pytest.approx(math.sqrt(26))
    assert (report.inf_norm, report.nan_count, report.inf_count, report.numel) == (4.0, 2, 1, 10)


@pytest.mark.parametrize("report_type", [Report, StepReport, TensorReport])
def test_reports_are_frozen(report_type):
    report = TensorReport("a", (), "float32", "cpu", 0.0, 0.0, 0, 0, None)
    if report_type is not TensorReport:
        report = report_type.from_scan(total(ROWS, (), 10), LABELS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.norm = 1.0


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'StepReport' object has no attribute 'norms'"):
        _ = step_report().norms


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, copy.copy, lambda r: pickle.loads(pickle.dumps(r))], ids=["deepcopy", "copy", "pickle"]
)
def test_copies_hold_everything(copying):
    twin = copying(step_report())
    assert twin.to_json() == step_report().to_json()
    assert twin.bad == step_report().bad or math.isnan(twin.bad[0].norm)
    assert type(twin) is StepReport


def test_pickle_is_plain_data_that_needs_no_engine():
    data = pickle.dumps(step_report())
    assert b"engine" not in data
    code = "import sys, pickle; r = pickle.loads(bytes.fromhex(sys.argv[1])); print(r.bad[0].name, r.step)"
    out = subprocess.run([sys.executable, "-c", code, data.hex()], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["bias", "7"]


def test_json_is_strict_and_round_trips():
    report = step_report()
    line = report.to_json()
    assert "\n" not in line

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    data = json.loads(line, parse_constant=refuse)
    assert data["norm"] == "NaN"
    assert data["bad"][0]["first_bad"] == [3]
    again = StepReport.from_dict(data)
    assert again.to_json() == line
    assert again.tensors[0] == report.tensors[0]
    assert math.isnan(again.norm)


def test_json_without_its_table_keeps_the_bad_rows():
    data = json.loads(step_report().to_json(tensors=False))
    assert "tensors" not in data
    assert [row.name for row in StepReport.from_dict(data).tensors] == ["bias"]


def test_from_dict_says_what_is_missing():
    with pytest.raises(ValueError, match="not a Report: norm, finite_norm, inf_norm, nan_count, inf_count, numel, bad"):
        Report.from_dict({"finite": True, "tensors": []})


def test_to_dict_keeps_floats_and_has_the_field_names():
    data = step_report().to_dict()
    assert list(data) == [field.name for field in dataclasses.fields(StepReport)]
    assert math.isnan(data["norm"])


def test_without_table_keeps_totals_and_bad_rows():
    slim = step_report().without_table()
    assert [row.name for row in slim.tensors] == ["bias"]
    assert (slim.finite_norm, slim.step, slim.nan_count) == (step_report().finite_norm, 7, 2)


@pytest.mark.parametrize(
    "kind, text",
    [
        ("grad", "grad of 'fc.bias' has 2 NaN, 0 Inf of 10 (first at [3])"),
        ("loss", "fc.bias has 2 NaN, 0 Inf of 10 (first at [3])"),
        ("buffer", "buffer 'fc.bias' has 2 NaN, 0 Inf of 10 (first at [3])"),
        ("parameter", "parameter 'fc.bias' has 2 NaN, 0 Inf of 10 (first at [3])"),
        ("state", "optimizer state fc.bias has 2 NaN, 0 Inf of 10 (first at [3])"),
        ("tensor", "'fc.bias' has 2 NaN, 0 Inf of 10 (first at [3])"),
    ],
)
def test_row_in_words(kind, text):
    row = TensorReport("fc.bias", (10,), "float32", "cpu", NAN, 0.5, 2, 0, (3,), kind=kind)
    assert row.describe() == text


def test_row_in_words_with_rank_without_place_and_when_finite():
    row = TensorReport("w", (2,), "float32", "cpu", INF, 0.5, 0, 1, None, rank=3, kind="grad")
    assert row.describe() == "grad of 'w' on rank 3 has 0 NaN, 1 Inf of 2"
    row = TensorReport("w", (2,), "float32", "cpu", 2.0, 0.5, 0, 0, None)
    assert row.describe() == "'w' is finite (norm 2)"


def test_report_in_words_names_five_and_counts_the_rest():
    rows = [Row(i, (), 0.0, 0.0, 1, 0, 0) for i in range(8)]
    labels = [Label((f"p{i}",), (1,), "float32", "cpu", "grad") for i in range(8)]
    text = Report.from_scan(total(rows, (), 8), labels).describe()
    assert text.count("grad of") == 5
    assert text.endswith("; and 3 more")
    assert Report.from_scan(total([], (), 0), []).describe() == "all finite, norm 0 over 0 elements"
    report = nanscan.scan({"small": torch.ones(3), "huge": torch.full((3,), 1e12)})
    assert report.describe().endswith("; most in 'huge' 1.73205e+12, 'small' 1.73205")


def test_a_bad_loss_is_among_the_five_that_are_named():
    rows = [Row(i, (), 0.0, 0.0, 1, 0, 0) for i in range(8)]
    labels = [Label((f"p{i}",), (1,), "float32", "cpu", "grad") for i in range(7)]
    labels.append(Label(("loss",), (), "float32", "cpu", "loss"))
    text = Report.from_scan(total(rows, (), 8), labels).describe()
    assert text.startswith("grad of 'p0'") and text.count("grad of") == 4
    assert "; loss has 1 NaN" in text and text.endswith("; and 3 more")


@pytest.mark.parametrize("flat, shape, index", [(0, (), ()), (5, (6,), (5,)), (23, (2, 3, 4), (1, 2, 3))])
def test_unravel(flat, shape, index):
    assert unravel(flat, shape) == index


def test_report_module_imports_no_torch():
    code = (
        "import sys, importlib.util as u\n"
        "import nanscan.report as r\n"
        "names = {n for n in vars(r)}\n"
        "assert 'torch' not in names, names\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "torch" not in ScanSource.__init__.__code__.co_names

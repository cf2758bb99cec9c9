"""What a log holds beside its steps, how a log in any state is read, and what is said of it."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nanscan
from nanscan.log import JsonLog
from nanscan.report import StepReport
from nanscan.reporting import lines as line_reading
from nanscan.reporting.advice import ending
from nanscan.reporting.data import page_data
from nanscan.reporting.page import page
from nanscan.reporting.reading import read_log
from nanscan.reporting.summary import summary
from tests.report_logs import EVIL, origin, skipped, step, train, write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_given_as_the_log_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"give a file, such as run\.jsonl"):
        nanscan.wrap(torch.optim.SGD([torch.ones(1)], lr=0.1), log=tmp_path)


def test_every_step_stays_one_line_that_reads_as_its_report(run: Path) -> None:
    steps = [line for line in lines_of(run) if "kind" not in line]
    assert [StepReport.from_dict(line).step for line in steps] == list(range(40))
    assert len({line["run_id"] for line in steps}) == 1


def test_first_line_says_versions_engine_settings_and_parameters(run: Path) -> None:
    first, *rest = [line for line in lines_of(run) if "kind" not in line]
    about = first["run"]
    assert about["nanscan"] == nanscan.__version__ and about["packages"]["torch"] == torch.__version__
    assert about["engine"]["engine"] == nanscan.engine_info().engine
    assert about["settings"]["optimizer"] == "AdamW" and about["settings"]["guard"]["clip_norm"] == 0.5
    assert about["parameters"][0] == ["0.weight", [8, 4], "float32"]
    assert not any("run" in line for line in rest)


def test_loss_keeps_its_sign_and_layer_norms_make_up_the_norm(run: Path) -> None:
    first = lines_of(run)[0]
    assert first["loss"] < 0, "the mean of squares, minus 50"
    assert list(first["layer_norms"]) == ["0", "2"]
    assert math.hypot(*first["layer_norms"].values()) == pytest.approx(first["norm"], rel=1e-3)


def test_layer_norms_become_rare_and_stay_dense_enough(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.0), log=tmp_path / "run.jsonl")
    for _ in range(1500):
        weight.grad = torch.ones(2)
        optimizer.step()
    noted = [line["step"] for line in lines_of(tmp_path / "run.jsonl") if "layer_norms" in line]
    assert noted[:256] == list(range(256))
    assert 500 < len(noted) < 700 and max(b - a for a, b in zip(noted, noted[1:], strict=False)) <= 8


def test_summary_of_a_real_run_counts_what_happened(run: Path) -> None:
    about = summary(read_log(run))
    assert about["steps"] == 40 and about["skipped"] == 4 and about["first_skipped_step"] == 10
    assert about["rollbacks"] == 1
    assert about["checkpoints"] == {"saved": 1, "refused": 1, "failed": 0}
    assert about["origins"][0]["op"] == "input" and about["origins"][0]["file"].endswith("report_logs.py")
    assert about["offenders"][0]["steps"] == 4
    assert about["problems"] == []
    assert about["verdict"] == "4 of 40 steps were skipped; 1 rollback."


def test_ranges_and_the_first_out_of_range_are_in_the_log(run: Path) -> None:
    (found,) = read_log(run).runs
    assert {row["module"] for row in found.notes["ranges"][0]["rows"]} == {"0", "1", "2"}
    (bad,) = found.notes["out_of_range"]
    assert bad["tensor"] == "activation" and "non-finite" in bad["reason"]


def test_device_decided_steps_log_their_loss(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.1, fused=True), log=tmp_path / "run.jsonl")
    optimizer._deferred = True  # as on CUDA
    for loss in (-2.0, float("nan")):
        weight.grad = torch.ones(2)
        optimizer.observe(torch.tensor([loss, loss]))
        optimizer.step()
    with pytest.warns(nanscan.NonFiniteWarning):
        assert optimizer.skipped_steps == 1
    assert [line["loss"] for line in lines_of(tmp_path / "run.jsonl")] == [-2.0, "NaN"]


BROKEN = {
    "empty": ("", ["There is no step in this log"]),
    "cut": (json.dumps(step(0)) + "\n" + json.dumps(step(1))[:40], ["last line is cut off", "environment is unknown"]),
    "tokens": ('{"step": 0, "norm": NaN, "loss": Infinity, "skipped": true}\n', ["environment is unknown"]),
    "foreign": ('hello\n{"a": 1}\n[1]\n' + json.dumps(step(3)) + "\n", ["1 line is no", "2 lines are", "begin at 3"]),
    "binary": ("\x00\xff\x1b\n" + json.dumps(step(0)) + "\n", ["1 line is no JSON"]),
    "gap": ("".join(json.dumps(step(n)) + "\n" for n in (0, 1, 5, 9)), ["6 steps missing in the log: 2–4, 6–8"]),
    "types": (json.dumps(step(0, norm=[], loss="x", bad={"a": 1}, spike=3, origin=5, layer_norms=[1])) + "\n", []),
    "types of facts": (json.dumps(step(0, run={"gpus": 1.5, "devices": {}, "parameters": {"a": [1, 2, 3]}})), []),
    "back": ("".join(json.dumps(step(n)) + "\n" for n in (0, 1, 2, 3, 1, 2, 3, 4)), ["The log holds 2 runs: it was"]),
    "notes first": (json.dumps({"kind": "rollback", "to_step": None}) + "\n" + json.dumps(step(0)) + "\n", []),
    "huge": (json.dumps(step(0, norm=10**400, nan_count=10**30)) + '\n{"step": 1e999, "norm": 1}\n', ["1 line is"]),
    "deep": ("[" * 100_000 + "\n", ["1 line is no JSON"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_log_opens_and_says_what_is_missing(name: str, tmp_path: Path) -> None:
    text, words = BROKEN[name]
    path = tmp_path / "run.jsonl"
    path.write_bytes(text.encode("latin-1" if name == "binary" else "utf-8"))
    log = read_log(path)
    said = " ".join(log.problems)
    assert [word for word in words if word not in said] == []
    json.dumps([summary(log), page_data(log)])
    assert "</html>" in page(log)


def test_two_runs_in_one_file_are_told_apart(tmp_path: Path) -> None:
    runs = [[step(n, run_id=name) for n in range(5)] for name in ("a", "b")]
    mixed = [line for pair in zip(*runs, strict=True) for line in pair]
    old = [{key: value for key, value in step(n).items() if key != "run_id"} for n in (0, 1, 2, 0, 1)]
    for lines, sizes in ((mixed, [5, 5]), (old, [3, 2])):
        log = read_log(write(tmp_path / "run.jsonl", *lines))
        assert [run.steps for run in log.runs] == sizes
        assert "The log holds 2 runs" in log.problems[0]
        assert [run["x"] for run in page_data(log)["runs"]] == [0, sizes[0]]


def test_no_skip_is_ever_thinned_away_and_extremes_stay(tmp_path: Path) -> None:
    bad = {7, 8, 9, 11, 5_000, 29_999}
    lines = [skipped(n, "w") if n in bad else step(n, norm=50.0 if n == 12_345 else 1.0) for n in range(30_000)]
    data = page_data(read_log(write(tmp_path / "run.jsonl", *lines)))
    assert data["marks"]["skip"] == [[7, 3], [11, 1], [5_000, 1], [29_999, 1]]
    assert len(data["series"]["norm"]) <= 10_000 and [12_345, 50.0] in data["series"]["norm"]
    assert [(group["first"], group["count"]) for group in data["groups"]] == [(7, 3), (11, 1), (5_000, 1), (29_999, 1)]


def test_notebook_views_escape_names_and_name_the_culprit() -> None:
    report = nanscan.scan({EVIL: torch.tensor([1.0, float("nan")]), "fine": torch.ones(2)})
    html = report._repr_html_()
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html
    assert "1 NaN, 0 Inf" in html and "fine" not in html
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([{"params": [weight], "param_names": [EVIL]}], lr=0.1))
    for value in (1.0, 2.0, float("nan")):
        weight.grad = torch.full((2,), value)
        with pytest.warns() if value != value else _nothing():
            optimizer.step()
    html = optimizer.history._repr_html_()
    assert "3 of at most 1024 steps, 1 skipped" in html and "<svg" in html and "<script" not in html
    assert "step 2, skip" in optimizer.last_report._repr_html_()


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_origin_keeps_its_source_line_and_hint(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "run.jsonl", step(0), skipped(1, origin=origin())))
    (found,) = summary(log)["origins"]
    assert (found["file"], found["line"], found["code"]) == ("train.py", 7, "y = x.log()")
    assert page_data(log)["details"]["1"]["origin"]["hint"] == "clamp the argument first"


DIES = """
import torch, nanscan
weight = torch.nn.Parameter(torch.ones(2))
optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.1), max_consecutive_skips=2, log="run.jsonl")
for value in (1.0, float("nan"), float("nan")):
    weight.grad = torch.full((2,), value)
    optimizer.step()
"""


def test_log_says_which_error_ended_the_program(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", DIES], cwd=tmp_path, stderr=subprocess.PIPE, check=False)
    about = summary(read_log(tmp_path / "run.jsonl"))
    assert about["ended"].startswith("TrainingDiverged: step 2 skipped")
    assert about["verdict"].endswith("it ended with 2 skipped in a row; the program ended with TrainingDiverged.")
    assert "find_origin=True" in about["advice"][0]


def test_thousands_of_layers_become_rows_that_tell_them_apart(tmp_path: Path) -> None:
    norms = {f"model.layers.{layer}.experts.{expert}": 1.0 for layer in range(100) for expert in range(40)}
    data = page_data(read_log(write(tmp_path / "run.jsonl", step(0, layer_norms=norms))))
    assert 40 <= len(data["layers"]["rows"]) <= 80
    assert data["layers"]["rows"][0] == "model.layers.0 … 1" and data["layers"]["rows"][-1].endswith("99")


def test_a_skipped_step_has_no_clip_factor(tmp_path: Path) -> None:
    data = page_data(read_log(write(tmp_path / "run.jsonl", step(0), skipped(1, clip_factor=0.9), step(2))))
    assert data["series"]["clip_factor"] == [[0, 0.5], [1, None], [2, 0.5]]
    assert summary(read_log(tmp_path / "run.jsonl"))["clipped_steps"] == 2


ADVICE = {
    "healthy": ([step(0), step(1)], "Nothing to do."),
    "origin": ([step(0), skipped(1, origin=origin()), step(2)], "Mend aten.log in head (train.py:7): clamp the"),
    "no origin": (
        [step(0), skipped(1, "head.bias")],
        "find_origin=True) names the line of code. Most often bad: head.b",
    ),
    "every layer": (
        [step(0), skipped(1, "stem.bias", "head.bias")],
        "Most often bad: stem.bias, and others as often. The backward pass spreads",
    ),
    "bad loss": (
        [
            step(0),
            step(1, skipped=True, bad=[{"name": "head.bias", "kind": "grad"}, {"name": "loss", "kind": "loss"}]),
        ],
        "The loss itself was NaN or Inf each time: the forward pass made it",
    ),
    "spike": ([step(0), step(1, spike={"what": "loss", "value": 9.0})], "Look at the batches of the spikes, step 1."),
    "weights": (
        [step(8), {"kind": "checkpoint", "step": 9, "path": "c/9.pt"}, step(9, parameters=[{"name": "w"}])],
        "from step 9 on: they held NaN or Inf. The last checkpoint that was saved before is of step 9",
    ),
    "clipped": ([step(n) for n in range(120)], "100% of the steps were clipped"),
    "nothing finite": ([skipped(n) for n in range(120)], "Find out what makes the NaN or Inf"),
    "paddle": (
        [step(0, run={"packages": {"torch": "2", "paddle": "3"}, "settings": {"guard": {}}}), skipped(1)],
        "FLAGS_check_nan_inf",
    ),
    "empty": ([], "Give nanscan.wrap(..., log=...) this path"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_summary_says_what_to_do_next(name: str, tmp_path: Path) -> None:
    given, words = ADVICE[name]
    assert words in summary(read_log(write(tmp_path / "run.jsonl", *given)))["advice"][0]


def test_advice_does_not_recommend_what_was_on(tmp_path: Path) -> None:
    for found in (False, True):
        model = torch.nn.Linear(2, 1)
        optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), log=tmp_path / f"{found}.jsonl")
        optimizer = nanscan.wrap(optimizer, model, find_origin=found, clip_norm=3.0)
        model.weight.grad = torch.tensor([[float("nan"), 0.0]])  # no forward that could be run again
        with pytest.warns(nanscan.NonFiniteWarning):
            optimizer.step()
        about = summary(read_log(tmp_path / f"{found}.jsonl"))
        guard = about["environment"][0]["settings"]["guard"]
        assert (guard["find_origin"], guard["clip_norm"]) == (found, 3.0), "what a second wrap has changed is in it"
        assert ("find_origin was on and found no operation" in about["advice"][0]) == found
        assert ("find_origin=True) names" in about["advice"][0]) == (not found)


def test_weights_that_went_bad_do_not_hide_their_cause(tmp_path: Path) -> None:
    bad = step(1, parameters=[{"name": "w"}], bad=[{"name": "w"}], finite=False, action="warn")
    known = {**bad, "origin": origin()}
    for line, words in ((bad, "find_origin=True) names the line"), (known, "Mend aten.log in head")):
        advice = summary(read_log(write(tmp_path / "run.jsonl", step(0), line)))["advice"]
        assert advice[0].startswith("Don't use weights from step 1") and words in advice[1]


def test_error_without_words_is_told_by_its_kind(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "run.jsonl")
    log(StepReport(True, 1.0, 1.0, 1.0, 0, 0, 4, (), ()))
    log.end(KeyboardInterrupt())
    about = summary(read_log(tmp_path / "run.jsonl"))
    assert about["ended"] == "KeyboardInterrupt"
    assert about["verdict"] == "Its one step was taken, then the program ended with KeyboardInterrupt."


def test_process_that_went_back_to_a_checkpoint_is_shown_in_two_parts(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = nanscan.wrap(torch.optim.SGD([weight], lr=0.1), log=tmp_path / "run.jsonl")
    for number in range(8):
        if number == 3:
            state = optimizer.guard_state_dict()
        if number == 5:
            optimizer.load_guard_state_dict(state)
        weight.grad = torch.ones(2)
        optimizer.step()
    first, second = read_log(tmp_path / "run.jsonl").runs
    assert (first.columns["step"], second.columns["step"]) == ([0, 1, 2, 3, 4], [3, 4, 5])
    assert ending(first) == "went back to step 3" and second.facts == first.facts != {}


def test_texts_of_any_length_make_no_large_page_and_steer_nothing(tmp_path: Path) -> None:
    long = "x" * 1_000_000 + "\u202e\x1b[2J"
    steering = "a\u202eb\x1b[2J\x9b2J\u200fc"
    facts = {"program": steering, "system": long, "settings": {"optimizer": long}}
    facts["parameters"] = [[long[:3000], long[:3000], long[:3000]]] * 3000
    notes = [{"kind": "checkpoint", "step": n, "path": long, "error": steering} for n in range(3)]
    log = read_log(write(tmp_path / "run.jsonl", step(0, run=facts), *notes, skipped(1, long, steering)))
    text = page(log)
    assert len(text) < 5_000_000
    body = text[text.index("<main>") : text.index("</main>")]
    assert "a\\u202eb\\x1b[2J\\x9b2J\\u200fc" in body and not set(body) & set("\u202e\x1b\x9b\u200f")


def test_compressed_log_is_read_and_one_that_is_cut_says_so(tmp_path: Path) -> None:
    plain = write(tmp_path / "run.jsonl", *[step(n, loss=n * 0.37) for n in range(500)]).read_bytes()
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(plain))
    assert read_log(packed).steps == 500
    packed.write_bytes(gzip.compress(plain)[:-200])
    cut = read_log(packed)
    assert 0 < cut.steps < 500 and any("compressed file can't be read to its end" in said for said in cut.problems)


def test_line_without_an_end_is_told_and_the_lines_around_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_reading, "MAX_LINE", 1 << 12)
    log = read_log(write(tmp_path / "run.jsonl", step(0), "x" * 10_000, step(1)))
    assert log.steps == 2 and "longer than" in " ".join(log.problems)


def test_findings_before_the_first_step_are_noted_in_the_log(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = nanscan.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, log=tmp_path / "run.jsonl")
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    found = nanscan.preflight(model, optimizer)
    (note,) = lines_of(tmp_path / "run.jsonl")
    assert note["kind"] == "preflight" and note["findings"][0]["code"] == found[0].code == "NS101"
    assert "NS101" in found._repr_html_() and "weight" in found._repr_html_()


def test_origin_and_watch_show_themselves_in_a_notebook_with_names_escaped() -> None:
    suspect = torch.nn.Sequential()
    suspect.add_module("<script>", torch.nn.Linear(2, 2))
    with nanscan.watch(suspect) as watched, nanscan.trace(suspect) as traced:
        suspect(torch.full((1, 2), float("inf"))).sum().backward()
    for html in (watched._repr_html_(), traced.origin._repr_html_()):
        assert "<table>" in html and "<script" not in html and "&lt;script&gt;" in html
    assert "non-finite" in watched._repr_html_() and "<b>Hint:</b>" in traced.origin._repr_html_()

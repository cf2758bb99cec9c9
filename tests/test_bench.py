"""The shapes that are measured, the way they are timed, and the quick benchmark on the command line."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time

import pytest
import torch

from nanscan.bench import WORKLOADS, Plan, interleave, quick_bench, workload
from nanscan.bench.goals import GOALS, Goal, cell, goals_for, step_bound
from nanscan.bench.gradients import make_gradients
from nanscan.bench.peers import check_commands, loop_check, loop_clip
from nanscan.bench.step_rows import Twins, measure_clipped, measure_step
from nanscan.bench.timing import Timings

BRIEF = Plan(seconds=0.05, min_rounds=3)


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("small", 1000, 64_000),
        ("lora", 480, 5_898_240),
        ("mlp", 16, 132_096),
        ("resnet50", 161, 25_557_032),
        ("bert", 199, 109_482_240),
        ("gpt2", 148, 124_439_808),
    ],
)
def test_shape_lists_have_the_published_numbers_of_parameters(name: str, tensors: int, elements: int) -> None:
    assert (workload(name).tensors, workload(name).elements) == (tensors, elements)


def test_every_workload_has_goals() -> None:
    assert list(GOALS) == list(WORKLOADS)


def test_unknown_row_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^there is no benchmark row 'vgg': use one of small, lora, mlp, resnet50, b"):
        workload("vgg")


def test_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'int8': use one of float32, bfloat16, float16\.$"):
        quick_bench(["mlp"], ["int8"])


def test_each_round_runs_every_command_once_in_a_changing_order() -> None:
    calls: list[str] = []
    commands = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = interleave(commands, Plan(seconds=0.0, min_rounds=40, block=0.0))
    rounds = [tuple(calls[at : at + 3]) for at in range(9, len(calls), 3)]  # 3 warm-up calls of each come first
    assert timings.rounds == len(rounds) == 40
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) == 6


def test_short_commands_are_repeated_within_their_turn() -> None:
    turns: list[int] = []

    def timer(command: object, repeats: int) -> float:
        turns.append(repeats)
        return 2.0**-20

    interleave({"a": lambda: None}, Plan(seconds=0.0, min_rounds=2, block=2.0**-10, timer=timer))
    assert turns == [1, 1, 1, 1024, 1024]


def test_prepare_runs_before_every_turn_untimed() -> None:
    state = {"ready": False}

    def prepare() -> None:
        state["ready"] = True
        time.sleep(0.002)

    def command() -> None:
        assert state["ready"]
        state["ready"] = False

    timings = interleave({"a": command, "b": command}, Plan(seconds=0.0, min_rounds=5, prepare=prepare))
    assert max(timings.samples["a"]) < 0.002


def test_ratios_are_of_medians() -> None:
    timings = Timings({"theirs": [30.0, 10.0, 20.0], "ours": [4.0, 5.0, 400.0]})
    assert timings.ratio("theirs", "ours") == 4.0
    assert timings.fastest("theirs", "ours", "absent") == 5.0


def test_differences_are_taken_within_rounds() -> None:
    disturbed = Timings({"guarded": [30.0, 12.0, 14.0], "bare": [10.0, 11.0, 13.0]})
    assert disturbed.difference("guarded", "bare") == 1.0


def test_samples_are_seconds_per_call() -> None:
    def wait() -> None:
        end = time.perf_counter() + 2e-3
        while time.perf_counter() < end:
            pass

    timings = interleave({"wait": wait}, Plan(seconds=0.5, block=7e-3))
    assert 2e-3 <= min(timings.samples["wait"]) < 4e-3  # four calls fill a turn of 8 ms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_lie_in_one_flat_buffer_without_overlap(dtype: torch.dtype) -> None:
    shapes = [(3,), (5, 7), (64,), (1,), (33, 2)]
    made = make_gradients(shapes, dtype)
    assert [tuple(grad.shape) for grad in made.grads] == shapes
    assert all(grad.data_ptr() % 64 == made.flat.data_ptr() % 64 for grad in made.grads)
    made.flat.zero_()
    for index, grad in enumerate(made.grads):
        grad.fill_(index + 1)
    assert [float(grad.double().mean()) for grad in made.grads] == [1.0, 2.0, 3.0, 4.0, 5.0]
    owned = sum(grad.numel() for grad in made.grads) * dtype.itemsize
    assert owned <= owned + made.padding <= made.nbytes < owned + 64 * len(shapes)


def test_loop_sees_what_is_there() -> None:
    made = make_gradients([(4,), (4,)])
    norm = float(torch.linalg.vector_norm(torch.cat([grad.double() for grad in made.grads])))
    assert loop_check(made.parameters) == (False, pytest.approx(norm, rel=1e-6))
    assert loop_clip(made.parameters, norm / 2)
    assert loop_check(made.parameters)[1] == pytest.approx(norm / 2, rel=1e-3)
    made.grads[1][2] = float("inf")
    assert loop_check(made.parameters)[0]
    before = made.flat.clone()
    assert not loop_clip(made.parameters, norm / 4)
    assert torch.equal(made.flat, before)


def test_all_commands_of_a_row_leave_the_gradients_alone() -> None:
    made = make_gradients([(3, 5), (64,), (1000,)], torch.bfloat16)
    before = made.flat.clone()
    for name, command in check_commands(made).items():
        command()
        assert torch.equal(made.flat, before), name


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_twins_share_one_state(fused: bool) -> None:
    made = make_gradients([(3,), (4, 4)])
    twins = Twins(made, fused)
    one, two = twins.optimizer(), twins.optimizer()
    one.step()
    two.step()
    assert int(two.state[made.parameters[0]]["step"]) == 3  # the first of all fills the state


def test_step_rows_hold_what_they_say() -> None:
    row = measure_step(workload("mlp"), BRIEF)
    guarded, bare = (row.timings.samples[name] for name in ("guarded", "bare"))
    assert row.added == pytest.approx(statistics.median(a - b for a, b in zip(guarded, bare, strict=True)))
    assert row.allowed == pytest.approx(1.15 * row.flat_read + 16 * 100e-9 + 10e-6)
    assert row.used == pytest.approx(row.added / row.allowed)
    assert row.to_dict()["verdict"] == ("ok" if row.used <= 1.0 else "short")


def test_every_clipped_step_clips() -> None:
    seen: list[float] = []

    def peer(twins: Twins) -> object:
        return lambda: seen.append(float(torch.linalg.vector_norm(twins.made.flat)))

    row = measure_clipped(workload("mlp"), True, BRIEF, {"peer": peer})
    assert max(seen) - min(seen) < 1e-4 * max(seen)  # each turn, this one too, finds the gradients restored
    assert row.advantage == pytest.approx(row.loop_added / row.added) or row.added <= 0.0


def test_goals_are_printed_with_their_verdict() -> None:
    assert cell(0.949, Goal(0.95)) == "0.95 (≥ 0.95 short)"
    assert cell(80.0, Goal(at_most=80.0), 1) == "80.0 (≤ 80 ok)"
    assert goals_for("bert", "float16") == {
        "loop": Goal(1.0),
        "foreach": Goal(1.0),
        "scaler": Goal(1.0),
        "limit": Goal(0.95),
    }
    assert step_bound(0.0, 0) == 10e-6


def test_bench_command_prints_every_suite_as_json_within_twenty_seconds() -> None:
    command = [sys.executable, "-m", "nanscan", "bench", "--row", "mlp", "--seconds", "1", "--json"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that wait for each other on a busy machine take forever
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["seconds"] < 20.0
    assert [row["row"] for row in result["scan"]] == ["mlp"]
    assert [row["row"] for row in result["step"]] == ["mlp"]
    assert [row["optimizer"] for row in result["clipped"]] == ["AdamW fused", "AdamW foreach"]
    for row in result["scan"]:
        ours, loop = row["medians"]["ours"], row["medians"]["loop"]
        assert row["loop"] == pytest.approx(loop / ours)
        assert set(row["verdicts"].values()) <= {"ok", "short"}
    assert result["machine"]["torch"] == torch.__version__


def test_order_does_not_depend_on_the_global_seed() -> None:
    random.seed(0)
    state = random.getstate()
    interleave({"a": lambda: None, "b": lambda: None}, BRIEF)
    assert random.getstate() == state

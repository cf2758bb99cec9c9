"""Every script under examples/ runs as a reader would run it, and shows what its text promises."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import torchrun

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, *arguments: str, code: int = 0) -> str:
    """The output of one script, which ends with this exit code and writes for a pipe: no control codes.

    Each takes well under a minute on two quiet cores; the limit is for cores that have other work.
    """
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}  # a source tree need not be installed
    with tempfile.TemporaryDirectory() as elsewhere:  # bytes: text would lose a \r
        done = subprocess.run(command, capture_output=True, timeout=180, env=environment, cwd=elsewhere)
    output = done.stdout.decode()
    assert done.returncode == code, f"{done.stderr.decode()}\n{output}"
    assert "\r" not in output and "\x1b" not in output
    return output


def run_in_terminal(name: str, *arguments: str) -> str:
    """What one script shows in a terminal of 120 columns."""
    control, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "COLUMNS": "120", "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error, not an empty read
        while part := os.read(control, 65536):
            shown += part
    os.close(control)
    assert process.wait(timeout=60) == 0, shown.decode()
    return shown.decode()


def number(pattern: str, output: str) -> float:
    """The number that the pattern's group finds in the output."""
    found = re.search(pattern, output)
    assert found is not None, f"{pattern!r} not found in:\n{output}"
    return float(found.group(1))


def test_plain_loop_loses_one_step_an_epoch_and_learns() -> None:
    output = run_example("plain_loop.py")
    assert number(r"skipped (\d+) of 320", output) == 20  # the bad row is in one batch of each of the 20 epochs
    assert "epoch 0: grad of '0.weight' has 256 NaN, 0 Inf of 256 (first at [0, 0])" in output
    assert re.search(r"^step 319  norm .*  20 skipped so far  last bad: step 3\d\d 0.weight and 3 more$", output, re.M)
    assert number(r"mean squared error (\S+)", output) < 0.05


def test_grad_scaler_skips_until_the_scale_fits_and_the_report_is_unscaled() -> None:
    output = run_example("amp_grad_scaler.py")
    skips = number(r"skipped (\d+) of 200", output)
    assert 1 <= skips < 100
    assert output.count(": skipped, grad of ") == skips
    assert number(r"loss (\S+);", output) < 0.1
    assert number(r"norm (\S+)\n", output) < 10  # times the loss scale it would be thousands


def test_lbfgs_leaves_the_domain_and_still_reaches_the_minimum() -> None:
    output = run_example("lbfgs_closure.py")
    assert number(r"skipped (\d+)", output) >= 1
    assert "step 0: " in output and "NaN" in output
    assert "x = [1.0, 1.0, 1.0]" in output


def test_accumulation_loses_one_window_an_epoch_or_only_its_bad_microbatch() -> None:
    window, only = run_example("gradient_accumulation.py").split("drop=True")
    for part, skips, drops in ((window, 50, 0), (only, 0, 50)):
        assert "rows 96..103: micro-batch 0 of step 3: grad of 'weight'" in part
        assert number(r"skipped (\d+) of 500", part) == skips
        assert number(r"dropped (\d+) of 2000", part) == drops
        assert number(r"loss (\S+);", part) < 0.5
        assert "weights finite: True" in part


def test_checkpointed_training_goes_on_where_it_was_and_ends_the_same(tmp_path: Path) -> None:
    options = ["--out", str(tmp_path), "--epochs", "4", "--keep", "9"]
    output = run_example("checkpointed_training.py", *options)
    assert "resumed from step 0\n" in output
    assert number(r"step 92: test accuracy (\S+)", output) > 0.9
    whole = (tmp_path / "final.pt").read_bytes()
    for path in sorted((tmp_path / "checkpoints").glob("step-*.pt"))[2:]:  # as if it had been killed after step 40
        path.unlink()
    (tmp_path / "final.pt").unlink()
    assert "resumed from step 40\n" in run_example("checkpointed_training.py", *options)
    assert (tmp_path / "final.pt").read_bytes() == whole


def test_recovery_reaches_the_healthy_accuracy_where_plain_training_ends_in_nan() -> None:
    output = run_example("recovery_divergence.py")
    for part in output.split("learning rate 2.0 instead of 0.2, ")[1:]:
        assert "plain:     accuracy 7.8%, loss nan" in part
        assert "back to step 0: 2 bad steps in a row" in part and "learning rate now 0.2" in part
        healthy, recovered = (number(rf"{name}: +accuracy (\S+)%", part) for name in ("healthy", "recovered"))
        assert healthy > 95 and recovered > healthy - 2
    assert "float32" in output and "float16" in output


def test_the_origin_is_found_by_itself_and_by_hand() -> None:
    output = run_example("find_the_origin.py")
    assert "step 5 was skipped\nNaN made by aten.div in 'pool' at " in output
    assert "hint 0 / 0 at [3, 0]" in output and "traced by hand: aten.div in 'pool', sample 3" in output


def test_the_first_layer_out_of_its_range_is_named_before_the_loss_is_nan() -> None:
    output = run_example("watch_ranges.py")
    assert "learning rate 0.2, torch.float32: all well\n    nothing left its range in 46 steps" in output
    for dtype in ("float32", "float16"):
        part = output.split(f"learning rate 2.0, torch.{dtype}: ")[1]
        died, named = number(r"not finite at step (\d+)", part), number(r"step (\d+), activation of ", part)
        assert named < died
        assert "times the median of its last" in part


def test_three_kinds_of_bad_rows_are_named_and_the_rest_is_learnt() -> None:
    output = run_example("checked_loader.py")
    assert "has 10, allowed 0..9 (num_classes 10)" in output
    assert "images look not scaled" in output and " NaN, " in output
    assert 10 <= number(r"skipped (\d+) of 450 batches", output) <= 30
    assert number(r"accuracy ([\d.]+)", output) > 0.85


def test_the_hugging_face_trainer_loses_one_step_an_epoch_and_learns() -> None:
    output = run_example("transformers_trainer.py")
    assert "plain:   weights finite: False" in output
    assert "; loss has 1 NaN, 0 Inf of 1" in output
    assert "grad of 'transformer.wte.weight (= lm_head.weight)' has 1024 NaN, 0 Inf of 1024" in output
    assert number(r"skipped (\d+) of 80 steps", output) == 5
    assert number(r"loss \S+ -> (\S+),", output) < 2.0 < number(r"loss (\S+) ->", output)


def test_the_accelerate_loop_and_its_schedule_lose_one_step_an_epoch() -> None:
    output = run_example("accelerate_loop.py")
    assert "epoch 0: grad of '0.weight' has 256 NaN, 0 Inf of 256" in output
    assert number(r"skipped (\d+) of 320 steps", output) == 20
    assert number(r"mean squared error (\S+)", output) < 0.05


def test_lightning_trains_in_half_precision_with_a_fused_optimizer_and_clipping_and_resumes() -> None:
    output = run_example("lightning_training.py")
    assert "plain, float32:    accuracy 9.1%, weights finite: False" in output
    assert "plain, half:       The current optimizer, AdamW, does not allow for gradient clipping" in output
    assert number(r"callback: accuracy (\S+)%, skipped 16 of 240 steps", output) > 80
    assert 0 < number(r"clipped (\d+) steps", output) < 240
    assert output.count("hidden.weight; nan of aten.div in scaled = centred / images.std(1, keepdim=True)") == 2
    assert "it ends with the same weights: True" in output


def test_tensorboard_gets_curves_and_the_origin_of_each_bad_step(tmp_path: Path) -> None:
    output = run_example("tensorboard_log.py", str(tmp_path))
    assert number(r"skipped (\d+) of 200", output) == 10  # the bad row is in one batch of each of the 10 epochs
    assert number(r"loss (\S+)\n", output) < 0.1
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "kind" not in line] == list(range(200))
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_adaptive_clipping_and_skipping_save_a_run_from_one_loud_batch() -> None:
    output = run_example("adaptive_clipping.py")
    lost, clipped, skipped = (number(rf"{name}: +accuracy (\S+)%", output) for name in ("clipping", "zclip", "spikes"))
    assert lost < 60 < 80 < min(clipped, skipped)
    assert "skip spikes: accuracy" in output and output.count("spikes 1, skipped 1") == 1
    assert output.count("the norm 1") == 2


def test_eight_bit_optimizer_loses_one_step_an_epoch_and_keeps_its_state() -> None:
    output = run_example("eight_bit_optimizer.py")
    assert "rows 768..831: grad of '0.weight' has 4096 NaN" in output
    assert number(r"skipped (\d+) of 320", output) == 10
    assert number(r"loss (\S+)\n", output) < 0.2
    assert "8192 elements of torch.uint8" in output and "restored bit for bit: True" in output


def test_paddle_fine_tuning_ends_in_nan_in_three_ways_unless_it_is_guarded() -> None:
    output = run_example("paddle_finetune.py")
    parts = dict(part.split(":\n", 1) for part in re.split(r"^(?=[a-z])", output, flags=re.MULTILINE) if ":\n" in part)
    assert list(parts) == ["too long", "overflow", "learning rate"]
    for part in parts.values():
        plain, guarded = part.splitlines()[:2]
        assert "weights not finite after step" in plain and number(r"accuracy (\S+)%", plain) < 60
        assert "not finite" not in guarded and number(r"accuracy (\S+)%", guarded) > 75
    assert "skipped 2 of 100 steps; step 20: grad of 'words.weight' has " in parts["too long"]
    assert "skipped 2 of 100 steps; step 20: grad of 'words.weight' has " in parts["overflow"]


def test_adapters_of_a_frozen_transformer_learn_and_are_saved_by_themselves(tmp_path: Path) -> None:
    output = run_example("lora_finetuning.py", str(tmp_path))
    assert "192 adapter tensors, 29,184 of 170,666 numbers are trained" in output
    upright, lying = (number(rf"{name} ([\d.]+)%", output) for name in ("upright", "lying"))
    assert lying < 30 and upright > 70 and number(r"steps; lying (\S+)%", output) > 75
    skips = number(r"skipped (\d+) of 125", output)
    assert skips >= 1 and f"{skips:.0f} skipped so far  last bad: step " in output
    assert "skipped: 193 tensors, grad of 'blocks.0.query.a' has " in output  # all adapters, and the loss
    assert "loaded onto the frozen model, same answers: True" in output
    assert set(load_file(tmp_path / "adapters.safetensors")) >= {"blocks.0.query.a", "blocks.11.mix.b"}


def test_a_character_gpt_learns_from_pythons_documentation_and_leaves_a_report(tmp_path: Path) -> None:
    output = run_example("char_gpt.py", "--out", str(tmp_path))
    assert number(r"has not seen: (\S+) nats", output) < 2.4 < number(r"by chance (\S+)\)", output)
    assert re.search(r"^step 299  norm \S+  loss \S+ .*none skipped$", output, flags=re.MULTILINE)
    assert len(output.split("--- it writes:\n")[1].split("\n---")[0]) == len("The ") + 200
    assert "<html" in (tmp_path / "char_gpt.html").read_text() and str(tmp_path / "char_gpt.html") in output


def test_a_run_that_sigterm_ends_goes_on_from_that_very_step_and_ends_the_same(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    shown = run_in_terminal("resume_after_sigterm.py", "--out", str(whole))
    assert "begins at step 0\r\n" in shown and number(r"accuracy (\S+)%", shown) > 95
    assert re.search(r"training .* step \d+  norm \S+ .*none skipped", shown) and "\x1b[2K" in shown  # a bar, redrawn
    assert not re.search(r"\x1b\[[\d;]*3[0-8]", shown)  # without colour, as NO_COLOR asks
    output = run_example("resume_after_sigterm.py", "--out", str(broken), "--preempt", code=143)
    assert "SIGTERM: saved step 150, start me again" in output and not (broken / "final.pt").exists()
    output = run_example("resume_after_sigterm.py", "--out", str(broken))
    assert "begins at step 150\n" in output
    assert (broken / "final.pt").read_bytes() == (whole / "final.pt").read_bytes()


def test_a_job_with_a_lock_inside_is_sent_to_another_process_once_the_lock_is_found() -> None:
    output = run_example("spawned_function.py")
    assert "sent as it is: cannot pickle '_thread.RLock' object\n  job.cache.lock (_thread.RLock): " in output
    assert "nanscan.TransientState does both" in output and "with TransientState: 0 problems" in output
    here, there = (int(text) for text in re.findall(r"process (\d+)", output))
    assert here != there
    assert "step 199" in output and "its report of step 30, read here: grad of '0.weight' has 256 NaN" in output
    assert "skipped 5 of 200 steps" in output
    before, after = number(r"error (\S+) before", output), number(r"error (\S+) of what came back", output)
    assert after < 0.05 < before == number(r"(\S+) of what is here", output)  # the job that stayed is untouched
    assert "entries of its cache: 0" in output


def test_a_folder_is_checked_and_each_kind_of_bad_file_is_told(tmp_path: Path) -> None:
    output = run_example("check_checkpoints.py", code=1)
    verdicts = dict(re.findall(r"^(\S+\.pt) +(good|damaged|refused|not finite)\b", output, flags=re.MULTILINE))
    assert verdicts == {
        "step-00000100.pt": "good",
        "step-00000150.pt": "good",
        "step-00000200.pt": "damaged",
        "colleague.pt": "refused",
        "unguarded.pt": "not finite",
    }
    assert '\'state["model"]["0.weight"]\' has 512 NaN' in output
    folder = Path(re.search(r"2 of 5 good; go on from (\S+)", output)[1])
    assert folder.name == "step-00000150.pt"
    shutil.copy(folder, tmp_path / "only.pt")
    assert "1 of 1 good" in run_example("check_checkpoints.py", str(tmp_path))


def torchrun_example(name: str, *arguments: str) -> str:
    """The output of one script started in two processes, by the line that it gives."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = torchrun.run([*command, str(EXAMPLES / name), *arguments], timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_processes_of_ddp_skip_together_and_say_whose_loss_it_was() -> None:
    assert "skipped 20 of 100" in run_example("ddp_training.py")
    output = torchrun_example("ddp_training.py")
    assert "step 4 skipped on all ranks; the loss was NaN on rank 1" in output
    assert number(r"2 processes, skipped (\d+) of 100", output) == 20 and number(r"loss (\d\S+)", output) < 0.1
    assert "weights equal on all ranks: True" in output


def test_shards_are_judged_as_one_model_and_resumed_by_another_number_of_processes(tmp_path: Path) -> None:
    output = torchrun_example("fsdp2_training.py", str(tmp_path))
    shutil.rmtree(tmp_path / "step-00000100")
    resumed = run_example("fsdp2_training.py", str(tmp_path))
    assert "began at step 75; checkpoints: step-00000075, step-00000100" in resumed
    assert "1 processes, skipped 1 of 100" in resumed and number(r"loss (\d\S+)", resumed) < 0.1
    what = "step 10 skipped, grad of '0.weight' on rank 1 has 1 NaN, 0 Inf of 256 (first at [31, 3])"
    assert f"rank 0: {what}" in output and f"rank 1: {what}" in output and "norm over 321 elements" in output
    assert number(r"2 processes, skipped (\d+) of 100", output) == 1 and number(r"loss (\d\S+)", output) < 0.1


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text()
    missing = [path.name for path in EXAMPLES.glob("*.py") if f'run_example("{path.name}"' not in here]
    assert missing == []


def test_the_list_of_examples_has_each_of_them_and_no_other() -> None:
    listed = re.findall(r"\]\(([\w/]+(?:\.py)?)\)", (EXAMPLES / "README.md").read_text())
    folders = [path.parent.name for path in EXAMPLES.glob("*/README.md")]
    assert sorted(listed) == sorted([path.name for path in EXAMPLES.glob("*.py")] + folders)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_says_how_to_run_it(path: Path) -> None:
    assert re.search(rf"Run: .*\bexamples/{path.name}", path.read_text())

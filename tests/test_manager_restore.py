"""A run is resumed as a whole, bit for bit, from the newest checkpoint that can be trusted, or not at all."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nanscan
from nanscan import CheckpointError, CheckpointManager, CheckpointWarning, CorruptCheckpoint
from tests.manager_runs import Run, flip_byte, same

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def saved_run(folder: Path, steps: int = 2, **options: Any) -> Run:
    """A run that took some steps and was saved after each of them."""
    run = Run()
    with CheckpointManager(folder, keep=9, background=False) as manager:
        for step in range(1, steps + 1):
            run.step()
            manager.save(step, epoch=step // 2, extra={"mark": step}, **run.parts, **options)
    return run


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_resumed_losses_are_those_of_the_uninterrupted_run_bit_for_bit(tmp_path: Path, background: bool) -> None:
    run = Run()
    with CheckpointManager(tmp_path, background=background) as manager:
        [run.step() for _ in range(2)]
        manager.save(2, epoch=1, **run.parts)
        wanted = [run.step() for _ in range(3)]
    other = Run(seed=7)
    [other.step() for _ in range(5)]
    restored = CheckpointManager(tmp_path).restore(**other.parts)
    assert restored is not None and (restored.step, restored.epoch) == (2, 1)
    assert (restored.missing, restored.unused, restored.passed_over) == ((), (), ())
    assert [other.step() for _ in range(3)] == wanted
    assert same(other.state(), run.state())


def test_python_and_numpy_draws_repeat_too(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1)
        wanted = random.random(), np.random.rand(), torch.rand(2).tolist()
        manager.restore()
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == wanted


def other_kind(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(optimizer.param_groups[0]["params"])


def test_state_of_another_kind_of_optimizer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    optimizer = other_kind(run.optimizer)
    run.step()
    before, options = run.state(), optimizer.state_dict()
    with pytest.raises(CheckpointError, match="another kind than RMSprop: its groups have .* and lack 'alpha'"):
        CheckpointManager(tmp_path).restore(**{**run.parts, "optimizer": optimizer})
    assert same(run.state(), before) and optimizer.state_dict() == options
    with pytest.warns(CheckpointWarning, match="another kind than RMSprop"):
        CheckpointManager(tmp_path).restore(**{**run.parts, "optimizer": optimizer}, strict=False)


def test_options_of_schedulers_and_other_versions_make_no_other_kind_of_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5, cycle_momentum=False)
    CheckpointManager(tmp_path, background=False).save(1, model=model, optimizer=optimizer)
    newer = torch.optim.SGD(model.parameters(), lr=0.1)
    newer.defaults["option_of_a_newer_torch"] = newer.param_groups[0]["option_of_a_newer_torch"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointManager(tmp_path).restore(model=model, optimizer=newer)


def test_folder_that_became_a_file_is_one_clear_error(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    (tmp_path / "run").write_text("")
    for look in (manager.restore, manager.checkpoints, manager.best_checkpoint):
        with pytest.raises(nanscan.CheckpointSystemError, match="run': it is a file; give a folder"):
            look()
    assert "run" in repr(manager)


def test_empty_or_absent_folder_restores_nothing(tmp_path: Path) -> None:
    run = Run()
    before = run.state()
    assert CheckpointManager(tmp_path).restore(**run.parts) is None
    assert CheckpointManager(tmp_path / "none").restore(**run.parts) is None
    assert same(run.state(), before)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text"])
def test_damaged_checkpoint_is_passed_over_with_the_reason_and_the_next_one_is_taken(
    tmp_path: Path, damage: str
) -> None:
    saved_run(tmp_path, 3)
    newest = tmp_path / "step-00000003.pt"
    if damage == "flip":
        flip_byte(newest)
    else:
        content = newest.read_bytes()
        newest.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"hello, world" * 50}[damage])
    run = Run(seed=1)
    with pytest.warns(CheckpointWarning, match=r"step-00000003.pt' is passed over: ") as said:
        restored = CheckpointManager(tmp_path).restore(**run.parts)
    assert restored is not None and restored.step == 2 and restored.extra == {"mark": 2}
    assert [item.path for item in restored.passed_over] == [newest]
    assert restored.passed_over[0].reason in str(said[0].message)
    assert said[0].filename == __file__


def test_folder_of_damaged_checkpoints_is_an_error_that_lists_each(tmp_path: Path) -> None:
    saved_run(tmp_path, 2)
    for path in tmp_path.glob("step-*.pt"):
        flip_byte(path)
    run = Run(seed=1)
    before = run.state()
    with (
        pytest.warns(CheckpointWarning, match="step-00000002.pt"),
        pytest.raises(
            CorruptCheckpoint, match=r"(?s)none of the 2 checkpoints.*step-00000002.pt: .*step-00000001.pt: "
        ),
    ):
        CheckpointManager(tmp_path).restore(**run.parts)
    assert same(run.state(), before)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    saved_run(tmp_path, 1)
    torch.save({"model": Evil(), "step": 2}, tmp_path / "step-00000002.pt")
    with pytest.warns(CheckpointWarning, match="step-00000002.pt"):
        restored = CheckpointManager(tmp_path).restore(**Run().parts)
    assert restored is not None and restored.step == 1
    assert not (tmp_path / "ran").exists()


def test_parts_missing_in_an_old_file_are_named_in_a_warning(tmp_path: Path) -> None:
    run = Run()
    run.step()
    torch.save(
        {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, tmp_path / "step-00000009.pt"
    )
    with pytest.warns(CheckpointWarning, match="left as they are: scheduler, scaler, rng"):
        restored = CheckpointManager(tmp_path).restore(**Run(seed=1).parts)
    assert restored is not None and restored.missing == ("scheduler", "scaler", "rng") and restored.step == 9


def test_parts_in_the_file_that_were_not_asked_for_are_named_in_a_warning(tmp_path: Path) -> None:
    saved_run(tmp_path)
    with pytest.warns(CheckpointWarning, match=r"not restored: optimizer, scheduler, scaler. .*scaler=scaler"):
        restored = CheckpointManager(tmp_path).restore(model=Run(seed=1).model)
    assert restored is not None and restored.unused == ("optimizer", "scheduler", "scaler")


def test_plain_torch_file_with_the_usual_names_is_accepted(tmp_path: Path) -> None:
    run = Run()
    run.step()
    plain = {
        "epoch": 4,
        "model_state_dict": run.model.state_dict(),
        "optimizer_state_dict": run.optimizer.state_dict(),
        "loss": 0.5,
    }
    torch.save(plain, tmp_path / "step-00000009.pt")
    other = Run(seed=1)
    with pytest.warns(CheckpointWarning, match="left as they are: rng"):
        restored = CheckpointManager(tmp_path).restore(model=other.model, optimizer=other.optimizer)
    assert restored is not None and (restored.epoch, restored.extra) == (4, {"loss": 0.5})
    assert same(other.state(), [*run.state()[:-2], *other.state()[-2:]])


@pytest.mark.parametrize("around", [None, "state_dict", "net"], ids=str)
def test_state_of_a_model_alone_is_accepted_with_its_prefixes_and_counted(tmp_path: Path, around: str | None) -> None:
    source, model = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {f"_orig_mod.module.{name}": value for name, value in source.state_dict().items()}
    torch.save({around: state, "accuracy": 0.5} if around else state, tmp_path / "theirs.pt")
    with CheckpointManager(tmp_path) as manager, pytest.warns(CheckpointWarning, match="not in the checkpoint.*: rng"):
        restored = manager.restore(model=model, path=tmp_path / "theirs.pt")
    assert restored is not None and restored.extra == ({"accuracy": 0.5} if around else {})
    assert restored.model_match is not None and len(restored.model_match.adapted) == 2
    assert torch.equal(model.weight, source.weight) and torch.equal(model.bias, source.bias)


@pytest.mark.parametrize("content", [[1, 2], {"weights": torch.ones(1)}, {"optimizer": {}}, {"model": 3}], ids=str)
def test_file_without_the_model_that_is_asked_for_is_passed_over(tmp_path: Path, content: object) -> None:
    saved_run(tmp_path, 1)
    torch.save(content, tmp_path / "step-00000009.pt")
    with pytest.warns(CheckpointWarning, match="step-00000009.pt' is passed over: it "):
        restored = CheckpointManager(tmp_path).restore(**Run().parts)
    assert restored is not None and restored.step == 1


def test_file_of_a_newer_format_is_passed_over(tmp_path: Path) -> None:
    saved_run(tmp_path, 1)
    newer = {"format": "nanscan-checkpoint", "version": 2, "step": 9, "model": {}}
    nanscan.save(newer, tmp_path / "step-00000009.pt")
    with pytest.warns(CheckpointWarning, match="version 2 of the format"):
        restored = CheckpointManager(tmp_path).restore(**Run().parts)
    assert restored is not None and restored.step == 1


# ---- all or nothing --------------------------------------------------------------------------------------------------


def everything(run: Run) -> list[Any]:
    return [run.state(), run.scheduler.state_dict(), run.scaler.state_dict(), torch.get_rng_state().tolist()]


def assert_unchanged(run: Run, before: list[Any]) -> None:
    now = everything(run)
    assert same(now[0], before[0]) and now[1:] == before[1:]


def test_other_model_is_an_error_and_no_part_is_changed(tmp_path: Path) -> None:
    saved_run(tmp_path)
    run = Run(seed=1, width=5)
    run.step()
    before = everything(run)
    with pytest.raises(CheckpointError, match=r"0.weight.*shape"):
        CheckpointManager(tmp_path).restore(**run.parts)
    assert_unchanged(run, before)


@pytest.mark.parametrize("part", ["scheduler", "scaler", "optimizer", "rng"])
@pytest.mark.parametrize("broken", [None, {"nonsense": 1}, [1]], ids=["None", "other", "list"])
def test_part_that_can_not_be_loaded_is_an_error_and_no_part_is_changed(
    tmp_path: Path, part: str, broken: object
) -> None:
    saved_run(tmp_path, 1)
    path = tmp_path / "step-00000001.pt"
    saved = nanscan.load(path)
    saved[part] = {"python": broken} if part == "rng" else broken
    nanscan.save(saved, path)
    run = Run(seed=1)
    run.step()
    if part == "scheduler":  # torch's own take whatever they are given
        run.scheduler.load_state_dict = lambda state: state["last_epoch"]
    before = everything(run)
    with pytest.raises(CheckpointError):
        restore_quietly(tmp_path, run)
    assert_unchanged(run, before)


def restore_quietly(folder: Path, run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        CheckpointManager(folder).restore(**run.parts)


def test_scheduler_of_another_kind_is_warned_about(tmp_path: Path) -> None:
    saved_run(tmp_path)
    run = Run(seed=1)
    other = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    with pytest.warns(CheckpointWarning, match=r"another kind than CosineAnnealingLR: it has 'gamma', 'step_size'"):
        CheckpointManager(tmp_path).restore(**{**run.parts, "scheduler": other})


def test_partial_match_is_loaded_only_where_strict_is_false(tmp_path: Path) -> None:
    saved_run(tmp_path)
    saved = nanscan.load(tmp_path / "step-00000002.pt")["model"]
    larger = nn.Sequential(*Run(seed=1).model, nn.Linear(1, 3))
    manager = CheckpointManager(tmp_path)
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="3.weight"):
        manager.restore(model=larger)
    with pytest.warns(CheckpointWarning, match="'3.weight', '3.bias'"):
        restored = manager.restore(model=larger, strict=False)
    assert restored is not None and restored.model_match is not None
    assert restored.model_match.missing == ("3.weight", "3.bias")
    assert torch.equal(larger[0].weight, saved["0.weight"])
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match="nothing of this state matches"):
        manager.restore(model=nn.ModuleDict({"other": nn.Linear(9, 9)}), strict=False)


# ---- other kinds of parts --------------------------------------------------------------------------------------------


def test_wrapped_and_compiled_models_exchange_checkpoints_with_plain_ones(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "plain")
    wrapped = nn.DataParallel(torch.compile(Run(seed=1).model, backend="eager"))
    with pytest.warns(CheckpointWarning, match="not restored"):
        CheckpointManager(tmp_path / "plain").restore(model=wrapped)
    assert same(list(wrapped.state_dict().values()), list(run.model.state_dict().values()))
    with CheckpointManager(tmp_path / "wrapped") as manager:
        manager.save(1, model=wrapped)
    other = Run(seed=2).model
    CheckpointManager(tmp_path / "wrapped").restore(model=other)
    assert same(list(other.state_dict().values()), list(run.model.state_dict().values()))


def test_optimizer_state_follows_the_names_and_keeps_its_precision(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape, dtype=torch.float32)
    wanted = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    other = nn.Linear(3, 2).to(torch.bfloat16)
    reordered = torch.optim.SGD([other.bias, other.weight], lr=0.5, momentum=0.9)
    restored = CheckpointManager(tmp_path).restore(model=other, optimizer=reordered)
    assert restored is not None and restored.optimizer_match is not None and restored.optimizer_match.complete
    for name, parameter in other.named_parameters():
        buffer = reordered.state[parameter]["momentum_buffer"]
        assert buffer.dtype is torch.float32 and torch.equal(buffer, wanted[name])


def test_guarded_optimizer_goes_on_counting(tmp_path: Path) -> None:
    def guarded(run: Run) -> Any:
        return nanscan.wrap(run.optimizer, run.model)

    run = Run()
    optimizer = guarded(run)
    for poison in (False, True, False):
        run.model(torch.full((2, 4), float("nan") if poison else 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, model=run.model, optimizer=optimizer)
    other = Run(seed=1)
    resumed = guarded(other)
    CheckpointManager(tmp_path).restore(model=other.model, optimizer=resumed)
    assert (resumed.skipped_steps, resumed.consecutive_skips, resumed.first_skipped_step) == (1, 0, 1)
    other.model(torch.ones(2, 4)).sum().backward()
    resumed.step()
    assert resumed.last_report.step == 3
    assert same(list(other.model.state_dict().values()), list(run.model.state_dict().values())) is False


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.filterwarnings("ignore::nanscan.CheckpointWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_goes_on_as_if_not_interrupted(tmp_path: Path, kind: str) -> None:
    def rates(optimizer: Any, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    def build() -> Any:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    model, optimizer, scheduler = build()
    rates(optimizer, scheduler, 5)
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, model=model, optimizer=optimizer, scheduler=scheduler)
    wanted = rates(optimizer, scheduler, 6)
    model, optimizer, scheduler = build()
    CheckpointManager(tmp_path).restore(model=model, optimizer=optimizer, scheduler=scheduler)
    assert rates(optimizer, scheduler, 6) == wanted


def test_given_path_is_taken_instead_of_the_newest(tmp_path: Path) -> None:
    saved_run(tmp_path, 3)
    run = Run(seed=1)
    restored = CheckpointManager(tmp_path).restore(**run.parts, path=tmp_path / "step-00000001.pt")
    assert restored is not None and restored.step == 1 and restored.path == tmp_path / "step-00000001.pt"
    with pytest.raises(CheckpointError, match="no such file"):
        CheckpointManager(tmp_path).restore(**run.parts, path=tmp_path / "step-00000007.pt")


def test_version_numbers_of_modules_survive(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        path = manager.save(1, model=nn.DataParallel(nn.Sequential(nn.BatchNorm1d(2))))
    assert path is not None
    state = nanscan.load(path)["model"]
    assert isinstance(state, OrderedDict)
    assert state._metadata["0"] == {"version": 2}


@pytest.mark.cuda
def test_run_on_cuda_resumes_on_the_cpu_and_back(tmp_path: Path) -> None:
    run = Run()
    run.model.cuda()
    optimizer = torch.optim.Adam(run.model.parameters())
    run.model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=run.model, optimizer=optimizer)
    other = Run(seed=1)
    CheckpointManager(tmp_path).restore(model=other.model, optimizer=other.optimizer)
    assert all(value.device.type == "cpu" for value in other.state())
    assert same(list(other.model.state_dict().values()), [v.cpu() for v in run.model.state_dict().values()])


@pytest.mark.parametrize("path", [7, ["step-00000001.pt"], b"step-00000001.pt", ""])
def test_a_path_that_is_none_is_refused(tmp_path: Path, path: Any) -> None:
    with pytest.raises(TypeError, match="path must be that of a checkpoint, as in manager.checkpoints"):
        CheckpointManager(tmp_path).restore(model=nn.Linear(1, 1), path=path)


def test_the_folder_of_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=f"'{tmp_path}' is an incomplete .* Give the path of one checkpoint"):
        CheckpointManager(tmp_path).restore(model=nn.Linear(1, 1), path=tmp_path)

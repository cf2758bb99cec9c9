"""`NanScanCallback` in automatic optimization: what is skipped, named, raised, traced; and nothing else changes."""

from __future__ import annotations

import copy
import json
import linecache
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import nanscan
from nanscan.integrations.lightning import NanScanCallback
from tests.integrations.lightning_runs import Regression, fitted, loader, module, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")


def no_dropout(net: Any) -> Any:
    net.body[2].p = 0.0
    return net


def test_a_bad_batch_is_left_out_and_nothing_else() -> None:
    net, callback = fitted(loader(nan=[3]), {}, no_dropout(module()))
    without, _ = fitted(loader(keep=[0, 1, 2, 4, 5, 6, 7, 8, 9]), None, no_dropout(module()))
    assert weights(net) == weights(without)
    bad = callback.optimizer.history[3]
    assert (bad.skipped, callback.optimizer.skipped_steps, bad.bad[0].name) == (True, 1, "body.0.weight")


def test_the_closure_runs_once_and_no_weights_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanscan.closure.Snapshot", lambda optimizer: pytest.fail("weights were copied"))
    net, _ = fitted(loader(nan=[3]), {})
    assert net.calls == 10


def test_the_loss_joins_the_scan() -> None:
    net, callback = fitted(loader(log=[5]), {})
    assert callback.optimizer.history[5].bad[-1].name == "loss"
    assert len(callback.optimizer.history[5].bad) == 5


def test_the_loss_of_every_micro_batch_joins_the_scan() -> None:
    net, callback = fitted(loader(log=[2]), {}, accumulate_grad_batches=2)
    assert [report.skipped for report in callback.optimizer.history] == [False, True, False, False, False]
    assert callback.optimizer.history[1].bad[-1].name == "loss[0]"
    assert torch.isfinite(torch.tensor(weights(net))).all()


def test_a_training_step_that_returns_none_is_no_fault_of_the_gradients() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net, callback = fitted(loader(), {}, no_dropout(module(none_at=[4])))
    assert [str(w.message) for w in seen if "no gradients" in str(w.message)] == []
    without, _ = fitted(loader(keep=[0, 1, 2, 3, 5, 6, 7, 8, 9]), None, no_dropout(module()))
    assert weights(net) == weights(without) and callback.optimizer.skipped_steps == 0


def test_raise_ends_the_fit_with_the_name_and_leaves_trainer_and_module_as_they_were() -> None:
    schedule = {"interval": "step"}
    net = module(schedule=lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 5), **schedule})
    callback = NanScanCallback(on_nonfinite="raise", find_origin=True)
    run = trainer(callback)
    with pytest.raises(nanscan.NonFiniteError, match=r"step 3 not taken: grad of 'body\.0\.weight' has 32 NaN"):
        run.fit(net, loader(nan=[3]))
    assert "lr_scheduler_step" not in vars(net) and "clip_gradients" not in vars(run.precision_plugin)
    assert callback._recorder is None and torch.isnan(net.body[0].weight.grad).all()
    before = callback.optimizer
    run.fit(net, loader())
    assert callback.optimizer is not before and len(callback.optimizer.history) == 10
    assert "lr_scheduler_step" not in vars(net) and "clip_gradients" not in vars(run.precision_plugin)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_find_origin_names_the_op_of_the_loss_and_leaves_no_trace(accumulate: int, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": accumulate}
    net, callback = fitted(loader(log=[4]), {"find_origin": True, "log": tmp_path / "run.jsonl"}, **options)
    blind, _ = fitted(loader(log=[4]), {}, **options)
    report = callback.optimizer.history[4 // accumulate]
    assert (report.origin.op, report.origin.kind) == ("aten.log", "nan")
    assert "torch.log(100 - y[0])" in report.origin.code and report.origin.file.endswith("lightning_runs.py")
    assert weights(net) == weights(blind)  # dropout's random numbers too
    assert net.calls > blind.calls and net.trainer.callback_metrics["batches"] == 10
    first = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert first["run"]["settings"]["guard"]["find_origin"] is True


def test_a_step_that_cannot_run_again_is_said_and_training_goes_on() -> None:
    net = module()
    step = net.training_step

    def once(batch: Any, batch_idx: int) -> Any:
        if net.calls == 10:
            raise RuntimeError("the stream has ended")
        return step(batch, batch_idx)

    net.training_step = once
    with pytest.warns(nanscan.NonFiniteWarning, match="could not run training_step again on batch 9.*stream has ended"):
        _, callback = fitted(loader(nan=[9]), {"find_origin": True}, net)
    assert callback.optimizer.history[9].origin is None and callback.optimizer.skipped_steps == 1


def test_lbfgs_evaluates_as_often_as_it_likes() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, max_iter=3)

    plain, _ = fitted(None, None, no_dropout(module(make)))
    net, callback = fitted(None, {}, no_dropout(module(make)))
    assert weights(net) == weights(plain) and net.calls == plain.calls > 10
    net, callback = fitted(loader(nan=[3]), {}, no_dropout(module(make)))
    assert callback.optimizer.skipped_steps == 1 and torch.isfinite(torch.tensor(weights(net))).all()


def test_validation_test_and_prediction_go_as_without() -> None:
    callback, net = NanScanCallback(), module()
    run = trainer(callback)
    run.validate(net, loader(), verbose=False)
    assert callback.optimizers == [] and callback.state_dict() == {}
    with pytest.raises(RuntimeError, match=r"no optimizer before trainer\.fit"):
        _ = callback.optimizer
    run.fit(net, loader(), loader())
    assert len(run.predict(net, loader())) == 10 and run.test(net, loader(), verbose=False)


def test_warnings_point_at_the_line_of_the_user() -> None:
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    for net, line in ((module(), "run.fit(net, loader(nan=[3]))"), (Manual(), "self.optimizers().step()")):
        run = trainer(NanScanCallback())
        with pytest.warns(nanscan.NonFiniteWarning) as seen:
            run.fit(net, loader(nan=[3]))
        places = [(w.filename, w.lineno) for w in seen if w.category is nanscan.NonFiniteWarning]
        assert [linecache.getline(*place).strip() for place in places] == [line]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copy_after_a_run_has_the_options_and_begins_anew(copied: Any) -> None:
    _, callback = fitted(loader(nan=[3]), {"clip_norm": 0.5, "recovery": True})
    again = copied(callback)
    assert again.optimizers == [] and callback.optimizer.skipped_steps == 1
    trainer(again).fit(module(), loader())
    assert again.optimizer.policy.clip_norm == 0.5 and len(again.optimizer.history) == 10


def test_optimizers_that_are_made_anew_in_the_middle_are_guarded_too() -> None:
    class Renewed(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.strategy.setup_optimizers(self.trainer)

    net, callback = fitted(loader(nan=[3]), {"recovery": {"patience": 2}}, Renewed(), max_epochs=2)
    assert torch.isfinite(torch.tensor(weights(net))).all()
    assert callback.optimizer.skipped_steps == 1 and callback.optimizer.optimizer is net.trainer.optimizers[0]


def test_a_step_whose_closure_the_module_has_run_itself_hears_of_the_loss() -> None:
    class Before(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()
            optimizer.step()

    net, callback = fitted(loader(log=[5]), {}, Before())
    assert [row.name for row in callback.optimizer.history[5].bad].count("loss") == 1
    assert len(callback.optimizer.history[4].bad) == 0 and callback.optimizer.skipped_steps == 1


@pytest.mark.parametrize("bad", [2, 3])
def test_only_a_bad_micro_batch_is_dropped(bad: int) -> None:
    class Checked(Regression):
        def on_after_backward(self) -> None:
            self.optimizers().check_microbatch(drop=True)

    net, callback = fitted(loader(nan=[bad]), {}, Checked(), accumulate_grad_batches=2)
    assert [report.dropped for report in callback.optimizer.history] == [(), (bad - 2,), (), (), ()]
    assert callback.optimizer.skipped_steps == 0 and torch.isfinite(torch.tensor(weights(net))).all()


def test_two_callbacks_are_refused() -> None:
    class Mine(NanScanCallback):
        pass

    with pytest.raises(ValueError, match=r"takes one NanScanCallback, it has 2: NanScanCallback, Mine\. Give one all"):
        trainer(NanScanCallback(), Mine()).fit(module(), loader())


def test_options_are_checked_before_the_run() -> None:
    NanScanCallback(clip_norm=nanscan.AdaptiveClip("agc", exclude=["head"]))  # whose names only the run can check
    with pytest.raises(TypeError, match=r"no option 'clip_nrom'; those of nanscan\.wrap are: check_params_every, clip"):
        NanScanCallback(clip_nrom=1.0)
    with pytest.raises(ValueError, match="clip_norm must be a positive number, got 0"):
        NanScanCallback(clip_norm=0)
    with pytest.raises(ValueError, match=r"after 3 skipped steps, max_consecutive_skips=3 ends .*: make it larger"):
        NanScanCallback(recovery=True, max_consecutive_skips=3)
    with pytest.raises(ValueError, match=r"on_nonfinite='raise' ends the training at the first: leave one"):
        NanScanCallback(recovery={"patience": 2}, on_nonfinite="raise")
    with pytest.raises(
        TypeError, match=r"no option 'patiance'; those of nanscan\.Recovery are: lr_backoff, manager, m"
    ):
        NanScanCallback(recovery={"patiance": 2})

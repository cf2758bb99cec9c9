"""`NanScanCallback` in automatic optimization: what is skipped, named, raised, traced; and nothing else changes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import nanscan
from nanscan.integrations.lightning import NanScanCallback
from tests.integrations.lightning_runs import fitted, loader, module, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore")


def no_dropout(net: Any) -> Any:
    net.body[2].p = 0.0
    return net


def test_a_healthy_run_has_the_same_bits_as_without_the_callback() -> None:
    plain, _ = fitted()
    net, callback = fitted(guarded={"find_origin": True, "check_params_every": 1, "log_metrics": True})
    assert weights(net) == weights(plain)
    assert callback.optimizer.skipped_steps == 0 and len(callback.optimizer.history) == 10


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
def test_find_origin_names_the_op_of_the_loss_and_leaves_no_trace(accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    net, callback = fitted(loader(log=[4]), {"find_origin": True}, **options)
    blind, _ = fitted(loader(log=[4]), {}, **options)
    report = callback.optimizer.history[4 // accumulate]
    assert (report.origin.op, report.origin.kind) == ("aten.log", "nan")
    assert "torch.log(100 - y[0])" in report.origin.code and report.origin.file.endswith("lightning_runs.py")
    assert weights(net) == weights(blind)  # dropout's random numbers too
    assert net.calls > blind.calls and net.trainer.callback_metrics["batches"] == 10


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


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"detect_anomaly": True}, {"barebones": True}, {}])
def test_each_kind_of_run_finishes_guarded(options: dict[str, Any]) -> None:
    if "barebones" in options:  # it refuses to be given these
        options = {**options, "enable_checkpointing": None, "logger": None}
        options |= {"enable_progress_bar": None, "enable_model_summary": None}
    net, callback = fitted(loader(), {"log_metrics": True}, **options)
    assert len(callback.optimizer.history) == (1 if "fast_dev_run" in options else 10)


def test_options_are_checked_before_the_run() -> None:
    with pytest.raises(TypeError, match=r"no option 'clip_nrom'; those of nanscan\.wrap are: check_params_every, clip"):
        NanScanCallback(clip_nrom=1.0)
    with pytest.raises(ValueError, match="clip_norm must be a positive number, got 0"):
        NanScanCallback(clip_norm=0)

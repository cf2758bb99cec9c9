"""The batch: what `nanscan.check_batch` finds by the model's own sizes, equal samples, BatchNorm with one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from nanscan.preflight_checks.codes import found
from nanscan.preflight_checks.finding import Finding
from nanscan.preflight_checks.subject import Subject

__all__ = ["check_given_batch"]

_KINDS = {
    "nonfinite": "NS501", "label": "NS502", "no_target": "NS502", "token": "NS503", "length": "NS504", "scale": "NS505",
    "constant": "NS506", "mask": "NS507",
}  # fmt: skip


def check_given_batch(subject: Subject) -> Iterator[Finding]:
    """Judge the batch before the model sees it."""
    from nanscan.batches import check_batch
    from nanscan.batches.walk import leaves_of

    for problem in check_batch(subject.batch, _spec(subject)):
        yield found(_KINDS.get(problem.kind, "NS508"), problem.path, problem.reason, severity=problem.severity)
    tensors = [value for _, value in leaves_of(subject.batch) if isinstance(value, Tensor)]
    if tensors:
        yield from _equal_samples(tensors[0])
        yield from _shared_memory(tensors)
        yield from _batch_of_one(subject, tensors[0])


def _spec(subject: Subject) -> Any:
    """The sizes that can be read off the model, and the loss's ignore index."""
    from nanscan.batches import BatchSpec

    known: dict[str, Any] = {}
    index = getattr(subject.loss_fn, "ignore_index", None)
    if isinstance(index, int):
        known["ignore_index"] = (index, -100)
    if not _takes_classes(subject.loss_fn):
        known["num_classes"] = None
    return BatchSpec.from_model(subject.model, **known)


def _takes_classes(loss_fn: Any) -> bool:
    """A loss that is known to take numbers instead of classes has none of them."""
    others = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.GaussianNLLLoss, nn.CTCLoss)
    name = str(getattr(loss_fn, "__name__", ""))
    return not isinstance(loss_fn, others) and not name.startswith(("mse", "l1", "smooth_l1", "huber", "ctc"))


def _equal_samples(inputs: Tensor) -> Iterator[Finding]:
    if inputs.dim() < 2 or inputs.shape[0] < 2 or inputs.layout is not inputs.new_empty(0).layout:
        return
    values = inputs.detach()
    if inputs[0].numel() > 1 and bool((values[1] == values[0]).all()) and bool((values == values[:1]).all()):
        yield found("NS509", "batch", f"all {inputs.shape[0]} samples of the inputs {list(inputs.shape)} are equal")


def _shared_memory(tensors: list[Tensor]) -> Iterator[Finding]:
    for tensor in tensors:
        if tensor.dim() and tensor.is_floating_point() and not tensor.is_sparse:
            repeated = [i for i, size in enumerate(tensor.shape) if size > 1 and tensor.stride(i) == 0]
            if repeated:
                text = f"a tensor {list(tensor.shape)} is expanded along dimension {repeated[0]}: one memory for all"
                yield found("NS510", "batch", text)


def _batch_of_one(subject: Subject, inputs: Tensor) -> Iterator[Finding]:
    if not inputs.dim() or inputs.shape[0] != 1:
        return
    for name, module in subject.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            text = "the batch has one sample: the layer normalises it by itself, and the variance may be 0"
            yield found("NS210", name or "model", text)
            return

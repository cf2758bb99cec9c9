"""Hints for losses: nothing to average over, targets that can't be reached."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

from torch import Tensor

from nanscan.origin.hints.row import Row, names
from nanscan.origin.hints.view import View, short

__all__ = ["ROWS"]

_NLL = names("nll_loss_forward nll_loss2d_forward nll_loss nll_loss2d")
_CTC = names("_ctc_loss _cudnn_ctc_loss ctc_loss")


def _targets(view: View) -> tuple[Tensor, int] | None:
    targets = view.operand(1)
    if not isinstance(targets, Tensor) or targets.numel() == 0:
        return None
    return targets, int(view.setting(4, "ignore_index", -100))


def _all_ignored(view: View) -> str | None:
    found = _targets(view)
    if found is None or not bool((found[0] == found[1]).all()):
        return None
    targets, ignored = found
    return f"all {targets.numel()} targets equal ignore_index {ignored}, and the mean over none is 0/0"


def _weightless(view: View) -> str | None:
    found, weight = _targets(view), view.operand(2)
    if found is None or not isinstance(weight, Tensor):
        return None
    used = found[0][found[0] != found[1]]
    if used.numel() == 0 or bool((weight[used] != 0).any()):
        return None
    classes = sorted(set(used.reshape(-1).tolist()))[:8]
    return f"the weights of all target classes in the batch ({classes}) are 0, and the mean divides by their sum"


def _masked_target(view: View) -> str | None:
    """Index targets whose class has a log-probability of -inf."""
    found, scores = _targets(view), view.operand(0)
    if found is None or view.nan or not isinstance(scores, Tensor) or scores.dim() < 1:
        return None
    targets, ignored = found
    dim = 0 if scores.dim() == 1 else 1
    safe = targets.masked_fill(targets == ignored, 0).long().unsqueeze(dim)
    bad = ((scores.gather(dim, safe).squeeze(dim) == -math.inf) & (targets != ignored)).reshape(targets.shape).nonzero()
    if len(bad) == 0:
        return None
    place = bad[0].tolist()
    where = f"sample {place[0]}" + (f" at {place[1:]}" if len(place) > 1 else "") if place else "the sample"
    label = int(targets[tuple(place)])
    return f"{where} has target class {label}, whose log-probability is -inf ({len(bad)} of {targets.numel()} targets)"


def _ctc(view: View) -> str | None:
    """Repeated labels need a blank between them, so an alignment needs their number more time steps."""
    targets, inputs, lengths = (_as_list(view.operand(i)) for i in (1, 2, 3))
    starts = 0
    for sample, (steps, count) in enumerate(zip(inputs, lengths, strict=True)):
        labels = targets[sample][:count] if isinstance(targets[0], list) else targets[starts : starts + count]
        starts += count
        need = count + sum(a == b for a, b in pairwise(labels))
        if need > steps:
            return f"sample {sample}: its target needs {need} time steps (labels and repeats), its input has {steps}"
    return None


def _empty_batch(view: View) -> str | None:
    written = re.search(r"cross_entropy|CrossEntropy", view.code)
    return "cross_entropy of an empty batch, which PyTorch defines as NaN" if view.nan and written else None


def _as_list(value: Any) -> list[Any]:
    return list(value.tolist() if isinstance(value, Tensor) else value)


def _soft_targets(view: View) -> str | None:
    values = sorted(v for v in (view.value(0), view.value(1)) if v is not None)
    if values != [-math.inf, 0.0] or re.search(r"cross_entropy|kl_div|CrossEntropyLoss|KLDivLoss", view.code) is None:
        return None
    return f"a target of 0 met a log-probability of -inf{view.where}: 0 * -inf is NaN"


def _kl_of_negative(view: View) -> str | None:
    value = view.value(1)
    if value is None or value >= 0 or "kl_div" not in view.code and "KLDiv" not in view.code:
        return None
    return f"the target of kl_div is {short(value)}{view.where}: it must be a probability"


def _kl_by_hand(view: View) -> str | None:
    zero = view.value(0) == 0.0 and isinstance(view.operand(0), Tensor)
    written = re.search(r"(\w+)\s*\*\s*\(?\s*(?:torch\.log\(\s*\1\b|\1\.log\(\))", view.code)
    if not zero or written is None:
        return None
    return f"log(0){view.where} in a sum of {written[1]} * log({written[1]}), where 0 * -inf is NaN"


def _ctc_of_logits(view: View) -> str | None:
    scores = view.event.saved.get("log_probs")
    if not isinstance(scores, Tensor):
        return None
    total = float(scores.detach().float().logsumexp(-1).abs().max())
    return f"the probabilities of a time step sum to exp({short(total)}), not to 1" if total > 0.1 else None


ROWS = (
    Row(
        "cross-entropy with every target ignored",
        _NLL,
        "the mean over the targets that are not ignore_index is 0/0 when all are",
        "Skip such a batch, or sum with reduction='sum' and divide by max(count, 1); nanscan.check_batch reports it",
        _all_ignored,
    ),
    Row(
        "cross-entropy with weights of 0",
        _NLL,
        "the mean divides by the sum of the class weights of the targets, which is 0",
        "Give every class that occurs a positive weight, or use ignore_index",
        _weightless,
    ),
    Row(
        "cross-entropy of a masked class",
        _NLL,
        "the logit of the target class was masked with -inf, or its probability is 0, so the loss is Inf",
        "Mend the mask so that it never covers the target, give such samples ignore_index, or mask with -1e4",
        _masked_target,
    ),
    Row(
        "CTC without a possible alignment",
        _CTC,
        "a target that is longer than its input, counting a blank between repeated labels, has a loss of Inf",
        "Pass zero_infinity=True to the CTC loss, or leave such samples out and check input_lengths after downsampling",
        _ctc,
    ),
    Row(
        "CTC of numbers that are no log-probabilities",
        names("CtcLossBackward"),
        "ctc_loss takes log-probabilities; its gradient overflows where it gets logits",
        "Give it logits.log_softmax(-1)",
        _ctc_of_logits,
    ),
    Row(
        "cross-entropy of an empty batch",
        names("fill full"),
        "cross_entropy with probabilities as targets gives NaN for 0 samples",
        "Skip empty batches (drop_last, filters), or use reduction='sum'",
        _empty_batch,
    ),
    Row(
        "soft targets against -inf",
        names("mul"),
        "cross_entropy with probabilities, or kl_div with log_target, multiplies a target of 0 with a masked -inf",
        "Mask logits with a large finite number (-1e4) instead of -inf, or use class indices as targets",
        _soft_targets,
    ),
    Row(
        "kl_div with a target that is no probability",
        names("xlogy"),
        "kl_div takes target * log(target)",
        "Give probabilities as target, or pass log_target=True if they are log-probabilities",
        _kl_of_negative,
    ),
    Row(
        "p * log p by hand",
        names("log"),
        "in a sum of p * log(p) a probability of 0 gives 0 * -inf",
        "Use torch.special.entr(p), torch.special.xlogy(p, q) or torch.nn.functional.kl_div for the value; where its "
        "gradient is needed write p * logits.log_softmax(-1) with logits masked by -1e4 instead of -inf, or clamp p",
        _kl_by_hand,
    ),
)

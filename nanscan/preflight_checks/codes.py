"""The one table of everything that `nanscan.preflight` can find: code, severity, title and what to do."""

from __future__ import annotations

from typing import NamedTuple

from nanscan.preflight_checks.finding import Finding, Severity

__all__ = ["CODES", "Code", "found"]


class Code(NamedTuple):
    """A row of the table.

    Attributes:
        severity: the usual one; a check says so where it differs.
        title: what it is, in a few words; the first column of `docs/preflight.md`.
        fix: what to do.
    """

    severity: Severity
    title: str
    fix: str


# fmt: off
CODES: dict[str, Code] = {
    # initial weights
    "NS101": Code("error", "weights that are NaN or Inf",
        "Load another checkpoint, or initialise this parameter again."),
    "NS102": Code("warning", "a layer's weight is all zero",
        "Initialise it with values that differ, such as nn.init.kaiming_uniform_; zeros are right only for biases"
        " and for a last layer or residual branch that is to start at 0."),
    "NS103": Code("warning", "all rows of a weight are equal",
        "Initialise it at random: units that start equal get equal gradients and stay equal."),
    "NS104": Code("warning", "normal weights with a standard deviation near 1",
        "Scale by 1/sqrt(fan_in): nn.init.xavier_normal_, nn.init.kaiming_normal_, or std=0.02."),
    "NS105": Code("warning", "an embedding with a standard deviation near 1 is also the output layer",
        "nn.init.normal_(embedding.weight, std=0.02), as GPT-2 does: the logits would start sqrt(width) too "
        "large."),
    "NS106": Code("warning", "parameters without a shape or without memory yet",
        "Run the model once on a batch (lazy modules), or model.to_empty(device=...) and initialise (meta "
        "tensors), before the optimizer is made."),
    # parameters
    "NS201": Code("warning", "trainable parameters that the optimizer does not have",
        "Give the optimizer model.parameters(), made after the last change to the model; or requires_grad_(False)"
        " if they are to stay."),
    "NS202": Code("error", "a parameter that the optimizer has twice",
        "Leave it out of one of the groups: it would be updated twice in each step."),
    "NS203": Code("info", "frozen parameters in the optimizer",
        "Nothing, or filter(lambda p: p.requires_grad, model.parameters())."),
    "NS204": Code("error", "the optimizer's parameters are not the model's",
        "Make the optimizer from this model's parameters, after .to(device) or a copy replaced them."),
    "NS205": Code("warning", "trainable parameters that get no gradient",
        "Use them in forward, remove them, or freeze them; look for .detach(), no_grad() and .item() on the way "
        "to the loss."),
    "NS206": Code("warning", "weights whose gradient is exactly 0",
        "Look at what follows them: a dead activation, a mask that hides everything, a multiplication by 0."),
    "NS207": Code("info", "tied weights",
        "Nothing: they are counted and stepped once."),
    "NS208": Code("error", "parameters on different devices",
        "model.to(device) before the optimizer is made."),
    "NS209": Code("warning", "the model is in eval mode",
        "model.train() before training: dropout is off and BatchNorm uses its running statistics."),
    "NS210": Code("warning", "BatchNorm in training mode with a batch of one",
        "A larger batch, drop_last=True in the loader, or GroupNorm."),
    # settings of the optimizer
    "NS301": Code("error", "an eps that is 0 in float16",
        "eps=1e-4 or larger, float32 parameters, or fused=True, which computes in float32."),
    "NS302": Code("warning", "a learning rate outside of the optimizer's usual range",
        "Set it to a usual value, or silence this if it is meant."),
    "NS303": Code("warning", "a first update that is large against the weights",
        "Lower the learning rate, start with a warm-up, or clip: nanscan.wrap(optimizer, model, clip_norm=1.0)."),
    "NS304": Code("warning", "updates that are rounded away",
        "Keep the parameters in float32 (use autocast instead of .half() or .bfloat16()), or raise the learning "
        "rate."),
    "NS305": Code("warning", "a high learning rate for a model that is trained already",
        "Fine-tune with a tenth of the rate or less: 1e-5 to 5e-5 is usual for Adam on transformers."),
    "NS306": Code("info", "no clipping in a recurrent net or a deep transformer",
        "nanscan.wrap(optimizer, model, clip_norm=1.0)."),
    "NS307": Code("info", "no warm-up with Adam on a transformer",
        "Raise the learning rate over the first hundreds of steps, such as with "
        "torch.optim.lr_scheduler.LinearLR, and give scheduler= here."),
    "NS308": Code("info", "weight decay on norms and biases",
        "Put parameters with fewer than two dimensions into a group of their own with weight_decay=0."),
    # the first forward and backward pass
    "NS401": Code("error", "the first step raises an exception",
        "Repair the line that is named; nothing of the training was touched."),
    "NS402": Code("error", "the loss is no scalar",
        'Return one number: loss.mean(), reduction="mean".'),
    "NS403": Code("error", "the loss has no gradient",
        "Look for torch.no_grad(), .detach(), .item(), argmax and numpy between the model and the loss."),
    "NS404": Code("error", "the loss is NaN or Inf at the start",
        "See where it comes from; nanscan.find_origin(step) says more."),
    "NS405": Code("error", "gradients are NaN or Inf at the start",
        "See where they come from; nanscan.find_origin(step) says more."),
    "NS406": Code("warning", "the loss at the start is far above ln(classes)",
        "Scale the last layer's initial weights down; look at labels and at the inputs' scale."),
    "NS407": Code("warning", "softmax before a cross-entropy, or none in it",
        "Give cross_entropy the logits: it takes the log-softmax itself."),
    "NS408": Code("warning", "sigmoid before a loss that takes logits",
        "Give binary_cross_entropy_with_logits the logits, without the sigmoid."),
    "NS409": Code("warning", "saturated sigmoid or tanh",
        "Smaller initial weights, scaled inputs, or a norm layer before it: the gradient there is about 0."),
    "NS410": Code("warning", "dead ReLU",
        "Look at its bias and at the inputs' scale; smaller steps, LeakyReLU or a norm layer before it."),
    "NS411": Code("warning", "activations explode or vanish over the layers",
        "Scale the initial weights by 1/sqrt(fan_in), add norm layers or residual connections."),
    "NS412": Code("warning", "gradients vanish or explode over the layers",
        "Scaled initial weights, ReLU or GELU instead of sigmoid, norm layers, residual connections; clipping "
        "against explosions."),
    # the batch
    "NS501": Code("error", "NaN or Inf in the batch",
        "Clean the data; a constant image divided by its range is the usual cause."),
    "NS502": Code("error", "labels out of range",
        "Map labels to 0 ... classes - 1; give ignore_index to the loss for those to be ignored."),
    "NS503": Code("error", "token ids out of range",
        "Make the embedding as large as the tokenizer's vocabulary."),
    "NS504": Code("error", "more positions than the position table has",
        "Truncate the sequences, or make the table larger."),
    "NS505": Code("warning", "images that are not scaled, or scaled twice",
        "Scale to 0 ... 1 and normalise, once."),
    "NS506": Code("warning", "constant images",
        "Look at the loader: a constant image often is a failed read."),
    "NS507": Code("error", "a mask that hides everything",
        "Leave such samples out, or let one position be seen: softmax over nothing is NaN."),
    "NS508": Code("error", "shapes, dtypes or values of the batch that don't fit",
        "Look at the dataset and at collate_fn."),
    "NS509": Code("warning", "every sample of the batch is the same",
        "Look at the dataset's __getitem__ and at collate_fn."),
    "NS510": Code("info", "samples that share memory",
        "tensor.contiguous() before anything writes to it in place."),
    # precision
    "NS601": Code("warning", "float16 autocast without a gradient scaler",
        "torch.amp.GradScaler(), or bfloat16: small gradients are 0 in float16."),
    "NS602": Code("warning", "a gradient scaler with bfloat16 autocast",
        "Leave the scaler out: bfloat16 has float32's range."),
    "NS603": Code("error", "float16 parameters with a gradient scaler",
        "Keep the parameters in float32 and use autocast: the scaler refuses to unscale float16 gradients."),
    "NS604": Code("warning", "training of pure float16 parameters",
        "Keep the parameters in float32 and use autocast, or bfloat16."),
    # ops that make NaN
    "NS701": Code("info", "log of what can be 0",
        "log_softmax, logsigmoid or log1p, or x.clamp_min(eps).log()."),
    "NS702": Code("info", "square root or std of what can be 0",
        "(x + eps).sqrt(): the gradient at 0 is Inf."),
    "NS703": Code("info", "division by what can be 0",
        "x / y.clamp_min(eps); for means over a mask count.clamp_min(1)."),
    "NS704": Code("info", "acos, asin or atanh without a clamp",
        "x.clamp(-1 + eps, 1 - eps): the gradient at 1 is Inf."),
    "NS705": Code("info", "a fractional or negative power of what can be 0",
        "x.clamp_min(eps).pow(...)."),
    "NS706": Code("warning", "exp near its overflow",
        "Clamp what goes in, or use logsumexp, softmax or expm1."),
    # checkpoints
    "NS801": Code("info", "the model can't be pickled",
        "Save model.state_dict(), or see nanscan.find_unpicklable(model)."),
    "NS802": Code("info", "a scheduler's lambda is not in its state_dict",
        "Use a class with __call__, or make the scheduler from the same code on resuming."),
    "NS803": Code("warning", "too little disk space for checkpoints",
        "Free some, or write elsewhere: a new checkpoint stands beside the old one until it is complete."),
}
# fmt: on


def found(code: str, where: str, message: str, *, severity: Severity | None = None, fix: str | None = None) -> Finding:
    """A finding with what the table says of its code.

    >>> found("NS207", "head.weight", "is also embed.weight").severity
    'info'
    """
    row = CODES[code]
    return Finding(code, severity or row.severity, where, message, fix or row.fix)

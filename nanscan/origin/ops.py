"""What an operator is to a trace: one that makes nothing, makes numbers, overwrites memory, or fills in a constant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Kind", "aten_name", "drops_values", "ends_in_inf", "fills_with_inf", "kind_of", "never_masks", "tensors_in"]

# fmt: off
_FACTORIES = frozenset({
    "zeros", "ones", "eye", "arange", "range", "linspace", "logspace", "rand", "randn", "randint", "randperm",
    "normal", "scalar_tensor", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_empty_strided", "empty", "empty_like", "empty_strided",
    "empty_permuted", "empty_quantized", "_efficientzerotensor", "_unsafe_view", "lift", "lift_fresh",
    "lift_fresh_copy", "_cudnn_rnn_flatten_weight", "sym_size", "sym_stride", "bernoulli", "multinomial",
    "hann_window", "hamming_window", "kaiser_window",
})
# fmt: on
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
# fmt: off
_RANDOM_FILLS = frozenset({
    "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_",
    "random_", "set_", "resize_", "resize_as_", "_resize_output_", "record_stream",
})
# fmt: on
_OVERWRITES = frozenset({"copy_", "fill_", "_foreach_copy_", "_foreach_zero_", "arange", "eye"})
# Further outputs of these hold -inf or leftovers on purpose (the logsumexp of a masked row), or follow from the first.
_FIRST_ONLY = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention", "_batch_norm")
# fmt: off
_FIRST_ONLY_NAMES = frozenset({
    "native_batch_norm", "native_layer_norm", "native_group_norm", "_native_batch_norm_legit",
    "cudnn_batch_norm", "native_dropout", "_fused_rms_norm", "nll_loss_forward", "nll_loss2d_forward",
    "_ctc_loss", "max_pool2d_with_indices",
})
# fmt: on
_TRAINING = 5  # position of the flag of a batch norm
_STATISTICS = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
_PICKS = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d"})
# What these take is data or weights: an Inf in it is no mask. The first argument of some is added to the product.
# fmt: off
_NO_MASK = frozenset({
    "mm", "bmm", "addmm", "baddbmm", "addmv", "addbmm", "mv", "dot", "vdot", "linear", "convolution", "_convolution",
    "mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "native_layer_norm", "native_group_norm",
    "_fused_rms_norm", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "std", "var", "std_mean", "var_mean",
})
# fmt: on
_SUMMANDS = frozenset({"addmm", "baddbmm", "addmv", "addbmm"})
# fmt: off
_DROPS = frozenset({
    "where", "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select",
    "index", "index_put_", "index_select", "gather", "take", "nansum",
})
# fmt: on


class Kind(NamedTuple):
    """What a trace needs to know of an operator.

    Attributes:
        skip: nothing is to be looked at: a view, a factory, or no tensor comes out.
        first: only its first output counts.
        writes: positions of arguments that it writes to.
        writes_named: names of keyword arguments that it writes to.
        fresh: what it writes does not depend on what was there before.
        random: what it writes is finite whatever was there.
        pointwise: each output element depends on the input elements at its place only.
        statistics: positions of running statistics that it updates without saying so in its schema.
        unwritten: it gives memory that holds whatever was there before.
    """

    skip: bool = False
    first: bool = False
    writes: tuple[int, ...] = ()
    writes_named: tuple[str, ...] = ()
    fresh: bool = False
    random: bool = False
    pointwise: bool = False
    statistics: tuple[int, ...] = ()
    unwritten: bool = False

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
        """The tensors that this call writes to."""
        values = [args[i] for i in self.writes if i < len(args)]
        values += [kwargs[name] for name in self.writes_named if kwargs and name in kwargs]
        return list(tensors_in(values))

    def updated(self, args: Sequence[Any]) -> list[Tensor]:
        """The running statistics that this call updates: those of a batch norm in training."""
        if not self.statistics or len(args) <= _TRAINING or args[_TRAINING] is not True:
            return []
        return [args[i] for i in self.statistics if isinstance(args[i], Tensor)]


def kind_of(func: Any) -> Kind:
    """Look an operator up by its schema."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    writes = tuple(i for i, a in enumerate(schema.arguments) if _written(a) and not a.kwarg_only)
    named = tuple(a.name for a in schema.arguments if _written(a))
    if not (writes or named) and (name in _FACTORIES or not _makes_tensors(schema)):
        return Kind(skip=True, unwritten=name in _UNWRITTEN)
    return Kind(
        first=name in _FIRST_ONLY_NAMES or name.startswith(_FIRST_ONLY),
        writes=writes,
        writes_named=named,
        fresh=name in _OVERWRITES or (func._overloadname.endswith("out") and not writes),
        random=name in _RANDOM_FILLS,
        pointwise=torch.Tag.pointwise in func.tags,
        statistics=_STATISTICS.get(name, ()),
    )


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _makes_tensors(schema: Any) -> bool:
    """True if a tensor comes out that is no view of an input."""
    for item in schema.returns:
        if "Tensor" in str(item.type) and (item.alias_info is None or item.alias_info.is_write):
            return True
    return False


def aten_name(func: Any) -> str:
    """`"aten.log"` for `torch.ops.aten.log.default`."""
    return str(func._schema.name).replace("::", ".")


def fills_with_inf(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the caller wrote an Inf into the call: `x.masked_fill(mask, -inf)`, `torch.where(keep, x, -inf)`."""
    numbers = (value for value in (*args, *kwargs.values()) if isinstance(value, float))
    return any(math.isinf(value) for value in numbers)


def ends_in_inf(func: Any) -> bool:
    """True if an Inf that comes out is bad whatever went in: a loss that picked a class that was masked with -inf."""
    return func._schema.name.rpartition("::")[2] in _PICKS


def never_masks(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """The tensors in which an Inf is no mask: factors of a matrix product, what a layer normalises, targets."""
    name = func._schema.name.rpartition("::")[2]
    if name not in _NO_MASK:
        return []
    return list(tensors_in(args[1:] if name in _SUMMANDS else args))


def drops_values(func: Any) -> bool:
    """True if the operator chooses elements, so that a NaN in what is not chosen was not meant to be used."""
    return func._schema.name.rpartition("::")[2] in _DROPS


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among values, also in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)

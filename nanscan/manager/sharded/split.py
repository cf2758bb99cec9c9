"""A checkpoint's dict in two: the tensors, for torch.distributed.checkpoint, and the rest, for a file of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from nanscan.checkpoint.tensors import tensors_in
from nanscan.engine.shards import box_of, is_dtensor, local_of
from nanscan.errors import CheckpointError

__all__ = ["FORMAT", "Split", "own_values", "rank_file", "shared_pieces", "split"]

FORMAT = "nanscan-rank"


def rank_file(index: int) -> str:
    """The name of what one rank keeps for itself: plain data, random state, loader.

    >>> rank_file(3)
    'rank-00003.pt'
    """
    return f"rank-{index:05d}.pt"


class Split(NamedTuple):
    """The two parts.

    Attributes:
        tensors: `{"model": {name: tensor}, "optimizer": {"state": {parameter's name: {key: tensor}}}}`, whose names
            are those that torch's own `get_model_state_dict` and `get_optimizer_state_dict` give.
        rest: plain data, without a DTensor.
    """

    tensors: dict[str, Any]
    rest: dict[str, Any]


def split(contents: Mapping[str, Any], index: int, ranks: int) -> Split:
    """Split what `nanscan.manager.contents.contents` returned on this rank.

    Args:
        contents: the whole state; not changed.
        index: of this rank among those that save.
        ranks: how many save.

    Raises:
        NotImplementedError: a DTensor is where none can be restored from.
    """
    rest = {key: value for key, value in contents.items() if key not in ("model", "optimizer")}
    rest.update(format=FORMAT, rank=index, ranks=ranks)
    tensors: dict[str, Any] = {}
    if "model" in contents:
        model = contents["model"]
        tensors["model"] = {name: value for name, value in model.items() if isinstance(value, Tensor)}
        rest["model_rest"] = {name: value for name, value in model.items() if not isinstance(value, Tensor)}
        rest["model_names"] = list(model)
        rest["model_metadata"] = {k: dict(v) for k, v in getattr(model, "_metadata", {}).items()}
    if "optimizer" in contents:
        state, rest["optimizer"] = _split_optimizer(contents["optimizer"], contents["optimizer_names"])
        tensors["optimizer"] = {"state": state}
    sharded = [found.label for found in tensors_in(rest) if is_dtensor(found.tensor)]
    if sharded:
        raise NotImplementedError(
            f"{', '.join(sharded[:5])}: a sharded tensor (DTensor) is saved as one of the model's or the optimizer's, "
            "not there. Save a second model, such as an average of weights, by a CheckpointManager of its own"
        )
    return Split({key: value for key, value in tensors.items() if value}, rest)


def _split_optimizer(saved: Mapping[str, Any], names: list[list[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parameter's name -> its state's tensors, all else of an optimizer's state)."""
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    name_of = dict(zip(ids, [name for group in names for name in group], strict=True))
    tensors: dict[str, Any] = {}
    small: dict[Any, Any] = {}
    for key, entries in saved["state"].items():
        if key not in name_of or not isinstance(entries, Mapping):
            small[key] = entries
            continue
        large = {entry: value for entry, value in entries.items() if _is_large(value)}
        if large:
            tensors[name_of[key]] = large
        small[key] = {entry: value for entry, value in entries.items() if entry not in large}
    groups = [dict(group) for group in saved["param_groups"]]
    return tensors, {"state": small, "param_groups": groups, "large": {n: list(t) for n, t in tensors.items()}}


def _is_large(value: Any) -> bool:
    """True for what has shards; counters of one element, one for each parameter, are kept with the plain data."""
    return is_dtensor(value) or (isinstance(value, Tensor) and value.numel() > 1)


# ---- what several ranks hold -----------------------------------------------------------------------------------------


def shared_pieces(tensors: Mapping[str, Any], ranks: int) -> dict[tuple[Any, ...], str]:
    """(path, offsets, shape) -> digest, of each piece on this rank that another one may hold too.

    torch.distributed.checkpoint stores such a piece once, so all must hold the same.
    """
    found = {}
    for path, tensor in _paths(tensors):
        if is_dtensor(tensor) and not _may_be_elsewhere(tensor, ranks):
            continue
        local = local_of(tensor) if is_dtensor(tensor) else tensor
        offsets = box_of(tensor)[1] if is_dtensor(tensor) else (0,) * tensor.dim()
        found[path, offsets, tuple(local.shape), tuple(tensor.shape)] = _digest(local)
    return found


def _paths(tensors: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, tensor in tensors.get("model", {}).items():
        yield ("model", name), tensor
    for name, entries in tensors.get("optimizer", {}).get("state", {}).items():
        for key, tensor in entries.items():
            yield ("optimizer", "state", name, key), tensor


def _may_be_elsewhere(tensor: Any, ranks: int) -> bool:
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise NotImplementedError(
            f"a tensor of shape {tuple(tensor.shape)} is a partial sum ({placements}): reduce it before it is saved"
        )
    return tensor.device_mesh.size() < ranks or any(placement.is_replicate() for placement in placements)


def _digest(tensor: Tensor) -> str:
    dense = tensor.detach().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8) if dense.numel() else dense
    return f"{dense.dtype} {xxhash.xxh3_128_hexdigest(data.numpy().data if dense.numel() else b'')}"


def own_values(
    found: list[dict[tuple[Any, ...], str]], mine: Mapping[str, Any], buffers: frozenset[str]
) -> dict[str, Tensor]:
    """The buffers that are not the same on every rank, such as running means: each rank keeps its own.

    Args:
        found: `shared_pieces` of each rank.
        mine: this rank's tensors.
        buffers: names of the model's tensors that may differ.

    Raises:
        CheckpointError: others differ.
    """
    first: dict[tuple[Any, ...], tuple[int, str]] = {}
    shapes: dict[Any, tuple[int, Any]] = {}
    own: dict[str, Tensor] = {}
    for index, pieces in enumerate(found):
        for piece, digest in pieces.items():
            path, whole = piece[0], piece[3]
            before, same = first.setdefault(piece, (index, digest))
            shaped, shape = shapes.setdefault(path, (index, whole))
            if same == digest and shape == whole:
                continue
            if path[0] != "model" or path[1] not in buffers or shape != whole:
                raise CheckpointError(
                    f"{_named(path)} is not the same on ranks {min(before, shaped)} and {index} of those that save "
                    "together, and only one of the two would be stored. Weights outside of DTensors must be kept "
                    "equal; parts of a model that only some ranks hold need names of their own, or a manager of their "
                    "own (process_group=, another folder)"
                )
            if path[1] in mine["model"]:
                own[path[1]] = mine["model"][path[1]]
    return own


def _named(path: tuple[str, ...]) -> str:
    return f"'{path[1]}'" if path[0] == "model" else f"the optimizer's {path[3]!r} of '{path[2]}'"

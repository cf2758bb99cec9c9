"""A sharded checkpoint as the dict that a restore applies: tensors laid out as the run that is resumed has them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanscan.checkpoint.load import load
from nanscan.engine.shards import box_of, is_dtensor, local_of
from nanscan.errors import CheckpointError, CorruptCheckpoint
from nanscan.manager.sharded.marker import Marker
from nanscan.manager.sharded.ranks import Ranks
from nanscan.manager.sharded.split import FORMAT, rank_file
from nanscan.matching.compare import plain_names
from nanscan.matching.keys import pair
from nanscan.matching.own_names import OwnNames

__all__ = ["laid_out", "own_part", "read_folder"]

_TAKEN = ("step", "epoch", "extra", "scheduler", "scaler", "guard", "nanscan")


def read_folder(folder: Path, marker: Marker, parts: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What the manager's files hold, from a folder; all ranks together.

    Args:
        folder: a complete checkpoint, verified.
        marker: of it.
        parts: the objects to restore, by name: they say how the tensors are to lie.
        ranks: who restores.

    Raises:
        CheckpointError: it can't be read; raised on all ranks.
    """
    from nanscan.manager.sharded.files import read_tensors  # torch.distributed.checkpoint takes a second to import

    found: list[_Plan] = []
    ranks.together(lambda: found.append(_plan(folder, marker, parts, ranks)), "what is to be read")
    plan = found[0]
    if any(ranks.gather(bool(plan.places), "what is to be read")):
        read_tensors(plan.places, folder, ranks)
    saved = plan.saved
    if "model_names" in plan.rest and parts.get("model") is not None:
        saved["model"] = _model_state(plan.places.get("model", {}), plan.rest, plan.own)
    if "optimizer" in plan.rest and parts.get("optimizer") is not None:
        saved["optimizer"] = _optimizer_state(plan.places.get("optimizer", {}).get("state", {}), plan.rest)
        saved["optimizer_names"] = plan.rest["optimizer_names"]
    return saved


class _Plan(NamedTuple):
    """What is known before the tensors are read: the dict without them, plain data, own buffers, memory to fill."""

    saved: dict[str, Any]
    rest: dict[str, Any]
    own: dict[str, Any]
    places: dict[str, Any]


def _plan(folder: Path, marker: Marker, parts: Mapping[str, Any], ranks: Ranks) -> _Plan:
    mine = ranks.index if ranks.index < marker.ranks else 0
    own = _rank_part(folder, mine)
    rest = _with_others(own, folder, marker, parts, mine)
    same = ranks.size == marker.ranks
    saved: dict[str, Any] = {name: rest[name] for name in _TAKEN if name in rest}
    saved.update({"model": {}} if "model_names" in rest else {}, **({"optimizer": {}} if "optimizer" in rest else {}))
    if ranks.index < marker.ranks:
        saved["rng"] = own["rng"]  # a rank more than there were has none
    if same and "loader" in own:
        saved["loader"] = own["loader"]  # where a rank of another number of ranks stands is another place
    sizes = _sizes(folder)
    places: dict[str, Any] = {}
    if parts.get("model") is not None and "model_names" in rest:
        places["model"] = _model_places(parts["model"], rest["model_names"], sizes)
    if parts.get("optimizer") is not None and "optimizer" in rest:
        places["optimizer"] = {"state": _optimizer_places(parts, rest, sizes)}
    places = {key: value for key, value in places.items() if value not in ({}, {"state": {}})}
    return _Plan(saved, rest, own.get("own", {}) if same else {}, places)


def _rank_part(folder: Path, index: int) -> dict[str, Any]:
    found = load(folder / rank_file(index), map_location="cpu")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CorruptCheckpoint(f"'{folder / rank_file(index)}' is not what a rank writes")
    return found


def _sizes(folder: Path) -> dict[tuple[str, ...], tuple[torch.Size, torch.dtype]]:
    """Path of a tensor -> shape and dtype."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from nanscan.manager.sharded.files import read_metadata

    metadata = read_metadata(folder)
    paths = metadata.planner_data or {}
    found = {}
    for name, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            raise CorruptCheckpoint(f"'{folder}' holds {name!r}, which is no tensor")
        found[tuple(paths.get(name, (name,)))] = item.size, item.properties.dtype
    return found


# ---- parts of a model that only some ranks hold ----------------------------------------------------------------------


def _with_others(
    own: dict[str, Any], folder: Path, marker: Marker, parts: Mapping[str, Any], mine: int
) -> dict[str, Any]:
    """A rank's plain data; where it does not know all that is asked for, with what the others know."""
    if _knows_all(own, parts):
        return own
    others = [_rank_part(folder, index) for index in range(marker.ranks) if index != mine]
    names = dict.fromkeys(name for part in (own, *others) for name in part.get("model_names", ()))
    merged = dict(own)
    if "model_names" in own:
        merged["model_names"] = list(names)
        for key in ("model_rest", "model_metadata"):
            merged[key] = {name: value for part in (*others, own) for name, value in part[key].items()}
    for other in others:
        if "optimizer" in merged and "optimizer" in other:
            _add_optimizer(merged, other)
    return merged


def _knows_all(rest: Mapping[str, Any], parts: Mapping[str, Any]) -> bool:
    model, optimizer = parts.get("model"), parts.get("optimizer")
    if model is not None and "model_names" in rest:
        own = list(model.state_dict(keep_vars=True))
        if len(pair(rest["model_names"], own, plain_names(model, own))) < len(own):
            return False
    if optimizer is not None and "optimizer_names" in rest:
        saved = {name for group in rest["optimizer_names"] for name in group}
        if not all(saved.intersection(names) for names in OwnNames(optimizer, model).all):
            return False
    return True


def _add_optimizer(merged: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add the parameters that are not there yet, as groups of their own."""
    known = {name for group in merged["optimizer_names"] for name in group}
    optimizer = dict(merged["optimizer"])
    state, groups, names = dict(optimizer["state"]), list(optimizer["param_groups"]), list(merged["optimizer_names"])
    after = 1 + max((key for group in groups for key in group["params"]), default=-1)
    for group, named in zip(other["optimizer"]["param_groups"], other["optimizer_names"], strict=True):
        new = [(key, name) for key, name in zip(group["params"], named, strict=True) if name not in known]
        if not new:
            continue
        groups.append({**group, "params": list(range(after, after + len(new)))})
        names.append([name for _, name in new])
        for key, _ in new:
            if key in other["optimizer"]["state"]:
                state[after] = other["optimizer"]["state"][key]
            after += 1
    large = {**other["optimizer"]["large"], **optimizer["large"]}
    merged["optimizer"] = {"state": state, "param_groups": groups, "large": large}
    merged["optimizer_names"] = names


# ---- where the tensors go --------------------------------------------------------------------------------------------


def _model_places(model: nn.Module, names: Sequence[str], sizes: Mapping[Any, Any]) -> dict[str, Tensor]:
    own = model.state_dict(keep_vars=True)
    of = {saved: own[name] for name, saved in pair(list(names), list(own), plain_names(model, list(own))).items()}
    return {name: _place(of.get(name), *sizes["model", name]) for name in names if ("model", name) in sizes}


def _optimizer_places(parts: Mapping[str, Any], rest: Mapping[str, Any], sizes: Mapping[Any, Any]) -> dict[str, Any]:
    own = OwnNames(parts["optimizer"], parts.get("model"))
    saved = [name for group in rest["optimizer_names"] for name in group]
    place_of = {name: place for place, several in enumerate(own.all) for name in several}
    pairs = pair(saved, list(place_of))
    param_of = {key: own.params[place_of[name]] for name, key in pairs.items()}
    return {
        name: {key: _place(param_of.get(name), *sizes["optimizer", "state", name, key]) for key in keys}
        for name, keys in rest["optimizer"]["large"].items()
        if name in saved
    }


def _place(like: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for a saved tensor: sharded as `like` if it has the same shape, else the whole of it."""
    if is_dtensor(like) and like.shape == shape:
        if local_of(like).is_meta:
            raise CheckpointError(
                "the model's parameters are on the meta device: give them memory first (model.to_empty(device=...))"
            )
        with torch.no_grad():
            place: Tensor = torch.empty_like(like.detach(), dtype=dtype)
        return place
    return torch.empty(shape, dtype=dtype, device="cpu")


def _model_state(tensors: Mapping[str, Any], rest: Mapping[str, Any], own: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The model's state in the order in which it was saved, with the buffers that each rank keeps for itself."""
    every = {**rest["model_rest"], **tensors, **own}
    state: OrderedDict[str, Any] = OrderedDict((name, every[name]) for name in rest["model_names"] if name in every)
    state._metadata = rest["model_metadata"]  # type: ignore[attr-defined]
    return state


def _optimizer_state(tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    saved = rest["optimizer"]
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    names = [name for group in rest["optimizer_names"] for name in group]
    state = dict(saved["state"])
    for key, name in zip(ids, names, strict=True):
        if name in tensors:
            state[key] = {**state.get(key, {}), **tensors[name]}
    return {"state": state, "param_groups": saved["param_groups"]}


# ---- whole tensors for a sharded run ---------------------------------------------------------------------------------


def own_part(saved: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A file's dict with this rank's random state and loader, where as many ranks saved as restore."""
    others = saved.pop("ranks", None)
    if others is None or ranks.index == 0:
        return saved
    if ranks.index < len(others):
        saved["rng"] = others[ranks.index]["rng"]
    else:
        saved.pop("rng", None)
    saved.pop("loader", None)
    if ranks.size == len(others) and "loader" in others[ranks.index]:
        saved["loader"] = others[ranks.index]["loader"]
    return saved


def laid_out(saved: dict[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """What a plain file holds, with this rank's shards in place of whole tensors where the parts have DTensors."""
    model, optimizer = parts.get("model"), parts.get("optimizer")
    groups = [] if optimizer is None else optimizer.param_groups
    params = [*(model.parameters() if model is not None else ()), *(p for group in groups for p in group["params"])]
    if not any(map(is_dtensor, params)):
        return saved
    found = dict(saved)
    if model is not None and isinstance(saved.get("model"), Mapping):
        own = model.state_dict(keep_vars=True)
        pairs = pair(list(saved["model"]), list(own), plain_names(model, list(own)))
        shards = {key: _shard(saved["model"][key], own[name]) for name, key in pairs.items()}
        found["model"] = _replaced(saved["model"], shards)
    if optimizer is not None and isinstance(saved.get("optimizer"), Mapping) and "optimizer_names" in saved:
        own_names = OwnNames(optimizer, model)
        place_of = {name: place for place, several in enumerate(own_names.all) for name in several}
        names = [name for group in saved["optimizer_names"] for name in group]
        ids = [key for group in saved["optimizer"]["param_groups"] for key in group["params"]]
        id_of = dict(zip(names, ids, strict=True))
        like = {id_of[key]: own_names.params[place_of[name]] for name, key in pair(names, list(place_of)).items()}
        state = dict(saved["optimizer"]["state"])
        for key in like.keys() & state.keys():
            state[key] = {name: _shard(value, like[key]) for name, value in state[key].items()}
        found["optimizer"] = {**saved["optimizer"], "state": state}
    return found


def _replaced(state: Mapping[str, Any], values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    new: OrderedDict[str, Any] = OrderedDict((name, values.get(name, value)) for name, value in state.items())
    if hasattr(state, "_metadata"):
        new._metadata = state._metadata  # type: ignore[attr-defined]
    return new


@torch.no_grad()
def _shard(value: Any, like: Any) -> Any:
    if not is_dtensor(like) or is_dtensor(value) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    shape, offsets = box_of(like)
    place = torch.empty_like(like.detach(), dtype=value.dtype)
    part = value[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))]
    local_of(place).copy_(part.reshape(local_of(place).shape))
    return place

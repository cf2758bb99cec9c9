"""What a model says of its batches: rows of its token table, of its position table, number of its classes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Size", "sizes_of", "takes_time_first", "token_types_of"]

_TOKEN = re.compile(r"tok(en)?s?(_?emb(ed(ding)?s?)?)?|word(_?emb(ed(ding)?s?)?)?|wte|embed_tokens|shared|vocab\w*")
_POSITION = re.compile(r"pos(ition)?(al)?s?(_?(emb(ed(ding)?s?)?|enc(od(er|ing))?|table|ids))?|wpe|pe|embed_positions")
_TYPE = re.compile(r"(token_?)?(type|segment|seg)s?(_?emb(ed(ding)?s?)?)?")
_OTHER = re.compile(r".*(type|segment|lang|task|time|class|label|user|item).*")
_HEAD = re.compile(
    r"(lm_)?head|heads|classifier|fc|fc_out|cls|cls_head|logits|out|output|out_?conv|outc|score|final|qa_outputs"
)
_INNER = re.compile(
    r"attn|attention|self_attn|multihead_attn|mlp|ffn|feed_forward|blocks?|layers?|encoder|decoder|h|stages?"
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Size(NamedTuple):
    """A number read off a model and where: `module tok`, `config`."""

    value: int
    source: str


def sizes_of(model: nn.Module) -> dict[str, Size]:
    """The arguments of `BatchSpec` that can be told for sure."""
    model = _unwrapped(model)
    config = getattr(model, "config", None)
    found = {
        "vocab_size": _vocabulary(model) or _configured(config, "vocab_size"),
        "max_positions": _positions(model, config),
        "num_classes": _classes(model, config),
    }
    return {name: size for name, size in found.items() if size is not None}


def takes_time_first(model: nn.Module) -> bool:
    """True if its batches may be (time, batch): it has a recurrent or attention layer that takes them so."""
    return any(getattr(module, "batch_first", True) is False for module in model.modules())


def _unwrapped(model: nn.Module) -> nn.Module:
    """Without torch.compile's and data-parallel wrappers, in any order."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _configured(config: Any, name: str) -> Size | None:
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    usable = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return Size(int(value), "config") if usable else None  # type: ignore[arg-type]


def _module(path: str) -> str:
    return f"module {path}" if path else "the model itself"


def _last(path: str) -> str:
    """The last part of a dotted path that is a name."""
    return next((part for part in reversed(path.lower().split(".")) if not part.isdigit()), "")


def _embeddings(model: nn.Module) -> list[tuple[str, int]]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [(path, module.num_embeddings) for path, module in model.named_modules() if isinstance(module, kinds)]


def _is_position(path: str) -> bool:
    return _POSITION.fullmatch(_last(path)) is not None


def _vocabulary(model: nn.Module) -> Size | None:
    """By name; else the only table that is none of positions, types or classes. Of several the largest."""
    tables = [(path, rows) for path, rows in _embeddings(model) if not _is_position(path)]
    named = [(path, rows) for path, rows in tables if _TOKEN.fullmatch(_last(path))]
    plain = [(path, rows) for path, rows in tables if not _OTHER.fullmatch(_last(path))]
    chosen = named or (plain if len({rows for _, rows in plain}) == 1 else [])
    if not chosen:
        return None
    path, rows = max(chosen, key=lambda table: table[1])
    return Size(rows, _module(path))


def token_types_of(model: nn.Module) -> Size | None:
    """The rows of the table of token types (sentence A and B), None where there is none."""
    model = _unwrapped(model)
    found = [Size(rows, _module(path)) for path, rows in _embeddings(model) if _TYPE.fullmatch(_last(path))]
    return found[0] if found else _configured(getattr(model, "config", None), "type_vocab_size")


def _positions(model: nn.Module, config: Any) -> Size | None:
    tables = [*_position_tables(model)]
    if tables:
        return min(tables, key=lambda size: size.value)
    rotary = any(getattr(config, name, None) is not None for name in ("rope_theta", "rope_parameters", "rope_scaling"))
    return None if rotary else _configured(config, "max_position_embeddings")


def _position_tables(model: nn.Module) -> Iterator[Size]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _is_position(path):
            # RoBERTa counts positions from padding_idx + 1; OPT keeps its offset as an attribute
            lost = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            yield Size(module.num_embeddings - int(lost), _module(path))
    weights: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for path, weight in weights:
        if _is_position(path) and weight.is_floating_point() and weight.dim() in (2, 3):
            yield Size(max(weight.shape[:-1]), _module(path))


def _classes(model: nn.Module, config: Any) -> Size | None:
    """The outputs of the head; one output tells nothing (a regression has one too)."""
    adaptive = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.AdaptiveLogSoftmaxWithLoss)]
    if adaptive:
        return Size(adaptive[-1][1].n_classes, _module(adaptive[-1][0]))
    if getattr(config, "problem_type", None) == "regression":
        return None
    head = _head(model)
    if head is None:
        named = re.search(r"For(Sequence|Token|Image|Audio|Video)Classification$", type(model).__name__)
        return _configured(config, "num_labels") if named else None
    path, outputs = head
    return Size(outputs, _module(path)) if outputs > 1 else None


def _head(model: nn.Module) -> tuple[str, int] | None:
    """The layer that gives the outputs: by its name or an outer module's, else the last one, if not within a block."""
    layers = [(path, outputs) for path, outputs in _layers(model)]
    named = [(path, outputs, depth) for path, outputs in layers if (depth := _head_depth(path)) is not None]
    if named:
        least = min(depth for *_, depth in named)
        outer = [(path, outputs) for path, outputs, depth in named if depth == least]
        prefixes = {tuple(path.split(".")[: least + 1]): outputs for path, outputs in outer}  # the last of each
        return outer[-1] if len(set(prefixes.values())) == 1 else None
    if not layers:
        return None
    parts = layers[-1][0].lower().split(".")
    listed = len(parts) == 2 and parts[1].isdigit()  # self.layers = nn.Sequential(…, nn.Linear(…))
    return layers[-1] if listed or not any(_INNER.fullmatch(part) for part in parts) else None


def _layers(model: nn.Module) -> Iterator[tuple[str, int]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path, module.out_features
        elif isinstance(module, _CONVOLUTIONS):
            yield path, module.out_channels


def _head_depth(path: str) -> int | None:
    parts = path.lower().split(".")
    for depth, part in enumerate(parts):
        if _INNER.fullmatch(part):
            return None
        if _HEAD.fullmatch(part):
            return depth
    return None

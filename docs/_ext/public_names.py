"""Links to the API reference: from annotations, which spell names by their module, and from code in sentences."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

import nanscan

THEIRS_TOO = {"GradScaler"}  # without `nanscan.` it is PyTorch's
NAME = re.compile(r"(?:nanscan\.)?[A-Za-z_][\w.]*")


def public_name(target: str) -> str | None:
    """`nanscan.guard.GuardedOptimizer` → `nanscan.GuardedOptimizer`; None for what isn't public."""
    parts = target.removeprefix("nanscan.").split(".")
    public = [i for i, part in enumerate(parts) if part in nanscan.__all__]
    return ".".join(["nanscan", *parts[public[0] :]]) if public else None


def link_annotation(app: Any, env: Any, node: Any, content: Any) -> Any:
    name = public_name(str(node.get("reftarget", "")))
    if node.get("refdomain") != "py" or name is None:
        return None
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)


def names_in(code: str) -> list[str]:
    """What the code of a sentence may mean, the likeliest first: `Report` is ours, `save` alone may be anybody's."""
    match = NAME.match(code)
    if match is None or (end := code[match.end() :]) and not (end.startswith("(") and end.endswith(")")):
        return []
    name = match[0].rstrip(".")
    if name.startswith("nanscan."):
        return [name, public_name(name) or name]
    return [f"nanscan.{name}"] if name[0].isupper() and name not in THEIRS_TOO else []


class LinkCode(SphinxPostTransform):
    """`nanscan.wrap(…)` and `StepReport` in a sentence lead to their place in the reference."""

    default_priority = 200

    def run(self, **kwargs: Any) -> None:
        objects = self.env.get_domain("py").objects
        linked: set[tuple[nodes.Node | None, str]] = set()
        for literal in list(self.document.findall(nodes.literal)):
            name = next((name for name in names_in(literal.astext()) if name in objects), None)
            if name is None or self.inside_link(literal) or (literal.parent, name) in linked:
                continue
            linked.add((literal.parent, name))
            entry = objects[name]
            link = make_refnode(self.app.builder, self.env.docname, entry.docname, entry.node_id, literal.deepcopy())
            literal.replace_self(link)

    def inside_link(self, node: nodes.Node | None) -> bool:
        while node is not None:
            if isinstance(node, (nodes.reference, nodes.title)):
                return True
            node = node.parent
        return False


def setup(app: Any) -> dict[str, Any]:
    app.connect("missing-reference", link_annotation)
    app.add_post_transform(LinkCode)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

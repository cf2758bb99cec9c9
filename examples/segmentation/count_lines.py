"""How many lines of code a recipe adds to the plain one, counted in the files."""

import ast
import difflib
import io
import tokenize
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> list[str]:
    """The lines of a file without blank ones, comments, docstrings and indentation."""
    source = path.read_text()
    kept: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) and body:
            kept.difference_update(range(body[0].lineno, body[0].end_lineno + 1))
    lines = source.splitlines()
    return [lines[number - 1].strip() for number in sorted(kept)]


def added_lines(recipe: str, base: str = "plain") -> tuple[int, int]:
    """How many lines `train_<recipe>.py` has that the base has not, and how many of the base it has dropped."""
    before, after = (code_lines(HERE / f"train_{name}.py") for name in (base, recipe))
    changes = [line[0] for line in difflib.ndiff(before, after)]
    return changes.count("+"), changes.count("-")


if __name__ == "__main__":
    for path in sorted(HERE.glob("train_*.py")):
        added, dropped = added_lines(path.stem.removeprefix("train_"))
        print(f"{path.name}: {added} lines added, {dropped} dropped")

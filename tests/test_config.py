"""The variables nanscan reads: what each value means, and that a wrong one is answered with the valid ones."""

from __future__ import annotations

import pwd
import re
from pathlib import Path

import pytest

from nanscan.config import Config, load_config

ROOT = Path(__file__).resolve().parent.parent


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    config = load_config({"HOME": "/home/ada"})
    assert config == Config("auto", "auto", (), Path("/home/ada/.cache/nanscan"), 300.0, False)


def test_an_empty_value_means_unset() -> None:
    names = ("ENGINE", "CUDA", "CUDA_ARCHS", "CACHE_DIR", "BUILD_TIMEOUT", "VERBOSE")
    empty = {f"NANSCAN_{name}": "" for name in names} | {"HOME": "/h"}
    assert load_config(empty) == load_config({"HOME": "/h"})


@pytest.mark.parametrize("engine", ["auto", "native", "eager", "reference"])
def test_every_engine_can_be_asked_for_in_any_case(engine: str) -> None:
    assert load_config({"NANSCAN_ENGINE": engine.upper()}).engine == engine


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"NANSCAN_ENGINE": "fast"},
            "NANSCAN_ENGINE='fast' is not known: use one of auto, native, eager, reference, or unset it.",
        ),
        ({"NANSCAN_CUDA": "yes"}, "NANSCAN_CUDA='yes' is not known: use one of auto, 1, 0, or unset it."),
        ({"NANSCAN_VERBOSE": "2"}, "NANSCAN_VERBOSE='2' is not known: use one of 0, 1, or unset it."),
        (
            {"NANSCAN_CUDA_ARCHS": "hopper"},
            "NANSCAN_CUDA_ARCHS='hopper' is not known: use all, or compute capabilities such as 80,90, or unset it.",
        ),
        *(
            (
                {"NANSCAN_BUILD_TIMEOUT": text},
                f"NANSCAN_BUILD_TIMEOUT={text!r} is not a time: "
                "use a number of seconds above 0, such as 300, or unset it.",
            )
            for text in ("soon", "0", "-3", "inf", "nan")
        ),
    ],
)
def test_a_wrong_value_raises_and_names_the_valid_ones(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_config(variables)


@pytest.mark.parametrize(
    ("text", "archs"), [("all", ()), ("90", ("90",)), ("8.6, 9.0", ("86", "90")), ("100a,120", ("100a", "120"))]
)
def test_gpus_to_compile_for(text: str, archs: tuple[str, ...]) -> None:
    assert load_config({"NANSCAN_CUDA_ARCHS": text}).cuda_archs == archs


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"NANSCAN_CACHE_DIR": "/data/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/data/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/nanscan"),
        ({"HOME": "/h/"}, "/h/.cache/nanscan"),
    ],
)
def test_the_cache_folder_is_the_nearest_that_is_named(variables: dict[str, str], folder: str) -> None:
    assert load_config(variables).cache_dir == Path(folder)


def test_a_relative_cache_folder_is_made_absolute() -> None:
    assert load_config({"NANSCAN_CACHE_DIR": "somewhere"}).cache_dir == Path.cwd() / "somewhere"


def test_the_process_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANSCAN_ENGINE", "reference")
    assert load_config().engine == "reference"
    monkeypatch.setenv("NANSCAN_ENGINE", "eager")
    assert load_config().engine == "eager"


@pytest.mark.parametrize("asked", [{}, {"NANSCAN_CACHE_DIR": "~/.cache/nanscan"}], ids=["default", "asked for"])
def test_a_user_whom_the_system_does_not_know_and_who_has_no_home_is_no_error(
    asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert load_config(asked).cache_dir == Path("/.cache/nanscan")


def _readers_of_own_variables(folder: Path) -> list[str]:
    """The Python files that take a NANSCAN_ variable from the environment themselves."""
    pattern = re.compile(r"""(environ|getenv)\W+(get\W+)?["']NANSCAN_""")
    return [path.name for path in sorted(folder.rglob("*.py")) if pattern.search(path.read_text(encoding="utf-8"))]


def test_nothing_else_in_the_package_reads_the_variables() -> None:
    assert _readers_of_own_variables(ROOT / "nanscan") == []


@pytest.mark.parametrize("line", ['os.environ["NANSCAN_X"]', "os.environ.get('NANSCAN_X')", 'os.getenv("NANSCAN_X")'])
def test_a_second_reader_of_the_variables_would_be_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "second.py").write_text(line)
    assert _readers_of_own_variables(tmp_path) == ["second.py"]

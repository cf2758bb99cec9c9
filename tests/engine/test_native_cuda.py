"""What the compiled engine asks of Python for a CUDA scan, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanscan.engine import native_cuda
from nanscan.engine.build import _cuda
from nanscan.errors import EngineError


class Refusing:
    """A module whose CUDA library loads but does not run on any device."""

    tries = 0

    def load_cuda(self, path: str) -> None:
        assert path == "/some/_cuda.so"

    def prepare_cuda(self, device: int) -> None:
        self.tries += 1
        raise RuntimeError(f"loading the kernels on CUDA device {device} failed: no kernel image")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> native_cuda.CudaHooks:
    monkeypatch.setattr(native_cuda, "load_cuda_library", lambda: Path("/some/_cuda.so"))
    monkeypatch.setattr(_cuda, "warned", False)
    monkeypatch.setenv("NANSCAN_ENGINE", "auto")
    monkeypatch.setenv("NANSCAN_CUDA", "auto")
    return native_cuda.CudaHooks(Refusing())  # type: ignore[arg-type]


def test_card_that_the_kernels_do_not_run_on_is_left_to_pytorch_with_one_warning(hooks: native_cuda.CudaHooks) -> None:
    with pytest.warns(RuntimeWarning, match=r"/some/_cuda.so: loading the kernels on CUDA device 0 failed") as caught:
        assert [hooks.serves(0), hooks.serves(0), hooks.serves(1)] == [False] * 3
    assert len(caught) == 1
    assert hooks._c.tries == 2, "each device is tried once"


def test_card_that_the_kernels_do_not_run_on_is_an_error_where_they_are_required(
    hooks: native_cuda.CudaHooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANSCAN_CUDA", "1")
    with pytest.raises(EngineError, match=r"NANSCAN_CUDA=1 can not be met: .*\n/some/_cuda.so: loading the kernels"):
        hooks.serves(0)

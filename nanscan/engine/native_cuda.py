"""What the compiled engine asks of PyTorch for a CUDA scan: memory from its allocator, and the way back to the host."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanscan.engine.build import load_cuda_library, refuse_cuda


class CudaHooks:
    """Allocations for ``nanscan._C``. A workspace is kept for each (device, stream) and zeroed once, when made."""

    def __init__(self, module: ModuleType) -> None:
        self._c: Any = module
        self._served: dict[int, bool] = {}
        self._workspaces: dict[tuple[int, int], Tensor] = {}

    def serves(self, device: int) -> bool:
        """True if the CUDA library is there and its kernels run on the device; tried once for each."""
        served = self._served.get(device)
        if served is None:
            served = self._served[device] = self._try(device)
        return served

    def _try(self, device: int) -> bool:
        path = load_cuda_library()
        if path is None:
            return False
        try:
            self._c.load_cuda(str(path))
            self._c.prepare_cuda(device)
        except RuntimeError as error:  # a driver older than the toolkit, a card that it has no code for
            refuse_cuda(f"{path}: {error}")
            return False
        return True

    def allocate(self, device: int, size: int) -> Tensor:
        """Uninitialised memory for one scan's output, uint8 of ``(size,)``."""
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")

    def workspace(self, device: int, stream: int, size: int) -> Tensor:
        """Zeroed scratch memory of at least ``size`` bytes; under graph capture one that belongs to the graph."""
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}")
        kept = self._workspaces.get((device, stream))
        if kept is None or kept.numel() < size:
            kept = torch.zeros(max(size, 1 << 16), dtype=torch.uint8, device=f"cuda:{device}")
            self._workspaces[device, stream] = kept
        return kept

    def flag(self, device: int, tensor: Tensor) -> Tensor:
        """A flag or scale as the kernel reads it: float32, on the device, whatever the scaler's own is."""
        return tensor.detach().to(device=f"cuda:{device}", dtype=torch.float32, non_blocking=True)

    def dense(self, tensor: Tensor) -> Tensor:
        """A row-major copy of a tensor with gaps or overlaps."""
        return tensor.detach().contiguous()

    def wait(self, answer: Any) -> Any:
        """The answer with the rows of CUDA devices filled in; waits for those devices."""
        if answer.outputs:
            answer.fill([output.cpu() for output in answer.outputs])
        return answer


class NativeDeferredScan:
    """A scan queued on one CUDA device; see `nanscan.engine.launch_grads`."""

    def __init__(self, module: Any, answer: Any) -> None:
        self._answer = answer
        self._output: Tensor = answer.outputs[0]
        self.separate: bool = answer.separate
        self.found_inf = self._flag(module.FOUND_INF_OFFSET)
        self.grad_scale = self._flag(module.GRAD_SCALE_OFFSET)
        self._host: Tensor | None = None
        self._event: Any = None
        self._filled = False
        if not torch.cuda.is_current_stream_capturing():  # a captured copy would write there at each replay
            self._host = torch.empty(self._output.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._host.copy_(self._output, non_blocking=True)
            self._event = torch.Event("cuda")
            self._event.record(torch.cuda.current_stream(self._output.device))

    def _flag(self, offset: int) -> Tensor:
        return self._output[offset : offset + 4].view(torch.float32).reshape(())

    @property
    def overflow(self) -> Tensor:
        """The header begins with the norm of the gradients, a float64 that shows each NaN and Inf."""
        return (~torch.isfinite(self._output[:8].view(torch.float64))).to(torch.float32).reshape(())

    def ready(self) -> bool:
        """True once `result` would not wait."""
        return self._filled or (self._event is not None and bool(self._event.query()))

    def result(self) -> Any:
        """The rows and totals; waits for the device. After a graph replay: those of the newest replay."""
        if self._filled:
            return self._answer
        if self._host is None:
            self._answer.fill([self._output.cpu()])
            return self._answer
        self._event.synchronize()
        self._answer.fill([self._host])
        self._filled = True
        return self._answer

"""`nanscan.CheckedLoader`: a data loader whose batches are looked at before they are handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from nanscan.batches.check import check_batch
from nanscan.batches.learn import Learner
from nanscan.batches.problem import BadBatch, BatchProblem, listed
from nanscan.batches.spec import BatchSpec
from nanscan.errors import NonFiniteWarning
from nanscan.messages import warn

__all__ = ["BadBatchRecord", "CheckedLoader"]

T_co = TypeVar("T_co", covariant=True)
OnBad = Literal["raise", "skip", "warn"]
_POLICIES = ("raise", "skip", "warn")
_KEPT_RECORDS = 1000
_OWN = frozenset(
    ["loader", "spec", "on_bad", "max_consecutive_skips", "bad_batch_count", "skipped_batches"]
    + ["_records", "_learner", "_learn", "_warned", "_passes"]
)


@dataclass(frozen=True)
class BadBatchRecord:
    """A bad batch: which pass over the loader, which batch of it (both from 0), and what is wrong with it."""

    epoch: int
    index: int
    problems: tuple[BatchProblem, ...]


class CheckedLoader(Generic[T_co]):
    """Hands out the batches of a loader and looks at each one first, with `check_batch`.

    It stands where the loader stood: `len`, every attribute (`dataset`, `batch_size`, `sampler`, `set_epoch`,
    `state_dict`, …) and assignments to them are the loader's; it can be iterated again and again, copied and pickled.
    It takes one batch from the loader for each one that it looks at, never more: the loader's `state_dict` is right in
    the middle of an epoch.

    A problem of severity `"error"` makes a batch bad. Warnings are warned about, once for each field and kind, and the
    batch is handed out.

    Args:
        loader: a `DataLoader`, torchdata's `StatefulDataLoader`, a list, or any iterable of batches.
        spec: what the batches must look like; default: nothing is known.
        on_bad: what to do about a bad batch: `"raise"` a `BadBatch`; `"skip"` it, with one warning for a run of skips;
            `"warn"` and hand it out.
        learn: so many good batches first teach what all later ones are held against (`BatchSpec.learn`); 0: none.
        max_consecutive_skips: so many bad batches in a row raise, as does an epoch without a good one.

    Attributes:
        bad_batches: a `BadBatchRecord` (epoch, index, problems) for each bad batch so far, the last 1,000.
        bad_batch_count: how many there were.
        skipped_batches: how many of them were left out.
        loader: as given.
        spec: as given; then the learnt one.
        on_bad: as given.

    Raises:
        ValueError: an unknown `on_bad`, or a count below its least.
        TypeError: `loader` can't be iterated over, or `spec` is no `BatchSpec`.

    >>> import nanscan, torch, warnings
    >>> batches = [torch.ones(2, 3), torch.full((2, 3), float("nan")), torch.zeros(2, 3)]
    >>> checked = nanscan.CheckedLoader(batches, on_bad="skip")
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     len(list(checked)), [(bad.index, str(bad.problems[0])) for bad in checked.bad_batches]
    (2, [(1, 'batch[0] has 3 NaN of 3 (first at [0])')])
    """

    def __init__(
        self,
        loader: Iterable[T_co],
        spec: BatchSpec | None = None,
        *,
        on_bad: OnBad = "raise",
        learn: int = 0,
        max_consecutive_skips: int = 100,
    ) -> None:
        _check_arguments(loader, spec, on_bad, learn, max_consecutive_skips)
        self.loader = loader
        self.spec = spec
        self.on_bad = on_bad
        self.max_consecutive_skips = max_consecutive_skips
        self.bad_batch_count = 0
        self.skipped_batches = 0
        self._passes = 0
        self._records: deque[BadBatchRecord] = deque(maxlen=_KEPT_RECORDS)
        self._learn = learn
        self._learner = Learner(spec if spec is not None else BatchSpec()) if learn else None
        self._warned: set[tuple[str, str]] = set()

    @property
    def bad_batches(self) -> tuple[BadBatchRecord, ...]:
        """The bad batches so far, the last 1,000 of them."""
        return tuple(self._records)

    def __iter__(self) -> Iterator[T_co]:
        self._passes += 1
        return _Pass(self, iter(self.loader))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or (name.startswith("__") and name.endswith("__")):  # not there yet: while unpickling
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN and hasattr(self.__dict__.get("loader"), name):
            setattr(self.loader, name, value)
        else:
            object.__setattr__(self, name, value)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *dir(self.loader)})

    def __repr__(self) -> str:
        return f"CheckedLoader({self.loader!r}, on_bad={self.on_bad!r})"

    def _problems(self, batch: Any) -> list[BatchProblem]:
        """The errors in a batch; warnings are said here, and a good batch is learnt from."""
        found = check_batch(batch, self.spec)
        if not found and self._learner is None:
            return found
        errors = [problem for problem in found if problem.severity == "error"]
        for problem in found:
            if problem.severity == "warning" and (problem.field, problem.kind) not in self._warned:
                self._warned.add((problem.field, problem.kind))
                warn(f"nanscan: epoch {self._passes - 1}: {problem}. (This is said once for this field.)")
        if self._learner is not None and not errors:
            self._learner.add(batch)
            if self._learner.count >= self._learn:
                self.spec, self._learner = self._learner.spec(), None
        return errors

    def _note(self, record: BadBatchRecord, skipped: bool) -> None:
        self._records.append(record)
        self.bad_batch_count += 1
        self.skipped_batches += skipped


class _Pass(Generic[T_co]):
    """One pass over the loader."""

    def __init__(self, owner: CheckedLoader[T_co], inner: Iterator[T_co]) -> None:
        self._owner = owner
        self._inner = inner
        self._epoch = owner._passes - 1
        self._taken = 0
        self._good = 0
        self._skips = 0  # in a row

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __next__(self) -> T_co:
        while True:
            try:
                batch = next(self._inner)
            except StopIteration:
                self._refuse_nothing()
                raise
            self._taken += 1
            problems = self._owner._problems(batch)
            if not problems or self._goes_on(problems):
                self._good += 1
                self._skips = 0
                return batch

    def _goes_on(self, problems: list[BatchProblem]) -> bool:
        """Deal with a bad batch; True: hand it out all the same."""
        owner, index = self._owner, self._index()
        owner._note(BadBatchRecord(self._epoch, index, tuple(problems)), owner.on_bad == "skip")
        text = f"batch {index} of epoch {self._epoch} is bad: {listed(problems)}"
        if owner.on_bad == "raise":
            advice = "Mend the data, or leave such batches out: CheckedLoader(..., on_bad='skip')."
            raise BadBatch(f"{text}. {advice}", problems, index, self._epoch)
        if owner.on_bad == "warn":
            warn(f"nanscan: {text}. It is handed out (on_bad='warn').", NonFiniteWarning)
            return True
        self._skips += 1
        if self._skips >= owner.max_consecutive_skips:
            raise BadBatch(
                f"{self._skips} batches in a row were bad and skipped, as many as max_consecutive_skips allows; "
                f"the last: {text}",
                problems,
                index,
                self._epoch,
            )
        if self._skips == 1:
            said = text.replace(" is bad: ", ": ", 1)
            warn(f"nanscan: skipped {said}. (Said once for a run of skips; all are in bad_batches.)", NonFiniteWarning)
        return False

    def _index(self) -> int:
        """Which batch of the epoch it is; a resumed loader says how many it had given before."""
        given = getattr(self._inner, "_num_yielded", None)
        return (given if isinstance(given, int) and given > 0 else self._taken) - 1

    def _refuse_nothing(self) -> None:
        """An epoch in which every batch was skipped would train nothing, in silence."""
        resumed = self._index() >= self._taken
        if self._good or not self._skips or resumed:
            return
        last = self._owner.bad_batches[-1]
        raise BadBatch(
            f"every one of the {self._skips} batches of epoch {self._epoch} was bad and skipped; the last: "
            f"{listed(last.problems)}",
            last.problems,
            last.index,
            self._epoch,
        )


def _check_arguments(loader: Any, spec: Any, on_bad: str, learn: int, max_consecutive_skips: int) -> None:
    if on_bad not in _POLICIES:
        raise ValueError(f"on_bad must be one of {', '.join(map(repr, _POLICIES))}, not {on_bad!r}")
    if spec is not None and not isinstance(spec, BatchSpec):
        raise TypeError(f"spec must be a nanscan.BatchSpec, not a {type(spec).__name__}")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"CheckedLoader needs an iterable of batches, not a {type(loader).__name__}")
    if learn < 0 or max_consecutive_skips < 1:
        raise ValueError("learn must be 0 or more and max_consecutive_skips 1 or more")

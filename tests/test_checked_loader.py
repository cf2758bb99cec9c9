"""A `CheckedLoader` stands where the loader stood, and no bad batch gets past it unsaid."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import nanscan
from nanscan import BadBatch, BatchSpec, CheckedLoader

NAN = float("nan")


class Rows(Dataset[Tensor]):
    """So many rows of three numbers; those in `bad` hold a NaN. Row i starts with i."""

    def __init__(self, count: int = 12, bad: tuple[int, ...] = ()) -> None:
        self.count = count
        self.bad = bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([float(i), NAN if i in self.bad else 1.0, 0.0])


class Stream(IterableDataset[Tensor]):
    """Rows without an end, or with one; no length."""

    def __init__(self, count: int | None, bad: bool = False) -> None:
        self.count = count
        self.bad = bad

    def __iter__(self) -> Iterator[Tensor]:
        i = 0
        while self.count is None or i < self.count:
            yield torch.full((3,), NAN if self.bad else float(i))
            i += 1


def firsts(batches: Any) -> list[list[float]]:
    return [batch[:, 0].tolist() for batch in batches]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- what happens to a bad batch


def test_raise_names_the_batch_the_sample_and_what_to_do() -> None:
    loader = CheckedLoader(DataLoader(Rows(bad=(5,)), batch_size=4))
    passes = iter(loader)
    assert next(passes)[0, 0] == 0
    with pytest.raises(
        BadBatch, match=r"batch 1 of epoch 0 is bad: batch\[1\] has 1 NaN of 3.*on_bad='skip'"
    ) as caught:
        next(passes)
    assert isinstance(caught.value, ValueError) and (caught.value.index, caught.value.epoch) == (1, 0)
    assert [problem.path for problem in caught.value.problems] == ["batch[1]"]
    assert next(passes)[0, 0] == 8  # whoever catches it can go on
    twin = pickle.loads(pickle.dumps(caught.value))
    assert str(twin) == str(caught.value) and twin.problems == caught.value.problems and twin.index == 1


def test_skip_leaves_out_counts_and_warns_once_for_a_run_of_skips() -> None:
    loader = CheckedLoader(DataLoader(Rows(bad=(2, 4, 9)), batch_size=2), on_bad="skip")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert firsts(loader) == [[0, 1], [6, 7], [10, 11]]
    assert ["skipped batch 1 of epoch 0" in str(w.message) for w in said] == [True, False]  # 1 and 2 are one run
    assert "skipped batch 4 of epoch 0" in str(said[1].message)
    assert all(w.category is nanscan.NonFiniteWarning and w.filename == __file__ for w in said)
    assert loader.skipped_batches == loader.bad_batch_count == 3
    assert [(bad.epoch, bad.index) for bad in loader.bad_batches] == [(0, 1), (0, 2), (0, 4)]
    assert loader.bad_batches[0].problems[0].path == "batch[0]"
    list(loader)
    assert [bad.epoch for bad in loader.bad_batches] == [0, 0, 0, 1, 1, 1]


def test_warn_hands_the_batch_out_and_says_so_each_time() -> None:
    loader = CheckedLoader(DataLoader(Rows(6, bad=(0, 3)), batch_size=2), on_bad="warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert firsts(loader) == [[0, 1], [2, 3], [4, 5]]
    assert ["handed out" in str(w.message) for w in said] == [True, True]
    assert loader.bad_batch_count == 2 and loader.skipped_batches == 0


def test_an_epoch_without_a_good_batch_is_an_error() -> None:
    loader = CheckedLoader(DataLoader(Rows(4, bad=(0, 1, 2, 3)), batch_size=1), on_bad="skip")
    with pytest.raises(BadBatch, match="every one of the 4 batches of epoch 0 was bad and skipped"):
        list(loader)


def test_an_endless_stream_of_bad_batches_is_an_error() -> None:
    loader = CheckedLoader(DataLoader(Stream(None, bad=True), batch_size=2), on_bad="skip", max_consecutive_skips=7)
    with pytest.raises(BadBatch, match="7 batches in a row were bad and skipped, as many as max_consecutive_skips"):
        list(loader)


def test_an_empty_loader_is_an_empty_epoch() -> None:
    assert list(CheckedLoader([], on_bad="skip")) == []


def test_a_warning_is_said_once_for_a_field_and_keeps_no_batch() -> None:
    image = torch.rand(3, 1, 4, 4)
    image[1] = 7.0
    loader = CheckedLoader([{"image": image}] * 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(list(loader)) == 3
    assert len(said) == 1 and 'batch["image"][1] is constant' in str(said[0].message)
    assert loader.bad_batch_count == 0


def test_the_spec_is_held_against_every_batch() -> None:
    data = TensorDataset(torch.rand(6, 2), torch.tensor([0, 1, 2, 0, 5, 1]))
    loader = CheckedLoader(DataLoader(data, batch_size=2), BatchSpec(num_classes=3), on_bad="skip")
    assert len(list(loader)) == 2
    assert "labels: sample 0 has 5" in loader.bad_batches[0].problems[0].reason


def test_only_a_loader_asked_to_learn_learns_and_from_good_batches_only() -> None:
    batches = [torch.full((2, 5), NAN), torch.rand(2, 3), torch.rand(2, 3), torch.rand(2, 4)]
    assert len(list(CheckedLoader(batches, on_bad="skip"))) == 3
    loader = CheckedLoader(batches, on_bad="skip", learn=2)
    assert len(list(loader)) == 2
    assert loader.spec is not None and loader.spec.fields is not None and loader.spec.fields[""].shape == (None, 3)
    assert [bad.index for bad in loader.bad_batches] == [0, 3]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"on_bad": "ignore"}, ValueError, "on_bad must be one of 'raise', 'skip', 'warn', not 'ignore'"),
        ({"learn": -1}, ValueError, "learn"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips"),
        ({"spec": {"num_classes": 3}}, TypeError, "BatchSpec, not a dict"),
        ({"loader": 3}, TypeError, "an iterable of batches, not a int"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        CheckedLoader(**({"loader": []} | arguments))


# --- it stands where the loader stood


def test_length_and_attributes_are_the_loaders() -> None:
    inner = DataLoader(Rows(10), batch_size=4)
    loader = CheckedLoader(inner)
    assert len(loader) == len(inner) == 3 and bool(loader)
    assert (loader.dataset, loader.batch_size, loader.sampler) == (inner.dataset, 4, inner.sampler)
    assert not hasattr(loader, "state_dict") and not hasattr(loader, "set_epoch") and "batch_sampler" in dir(loader)
    with pytest.raises(AttributeError, match="no_such_thing"):
        loader.no_such_thing  # noqa: B018
    assert firsts(loader) == firsts(loader) == firsts(inner)
    loader.pin_memory_device = "somewhere"  # an assignment reaches the loader
    assert inner.pin_memory_device == "somewhere"


def test_a_stream_has_no_length() -> None:
    loader = CheckedLoader(DataLoader(Stream(5), batch_size=2))
    with pytest.raises(TypeError):
        len(loader)
    assert firsts(loader) == [[0, 1], [2, 3], [4]]
    assert firsts(CheckedLoader(row[None] for row in Stream(2))) == [[0], [1]]


def test_set_epoch_reaches_the_sampler() -> None:
    sampler = DistributedSampler(Rows(8), num_replicas=2, rank=0, seed=1)
    loader = CheckedLoader(DataLoader(Rows(8), batch_size=2, sampler=sampler))
    orders = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        orders.append(firsts(loader))
    assert orders[0] != orders[1]


def test_the_order_of_a_shuffled_loader_is_unchanged() -> None:
    plain = DataLoader(Rows(12), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))
    checked = DataLoader(Rows(12), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert firsts(plain) == firsts(CheckedLoader(checked))


def test_batches_are_handed_out_as_they_are() -> None:
    batches = [{"x": torch.rand(2)}, {"x": torch.rand(2)}]
    assert all(given is batch for given, batch in zip(CheckedLoader(batches), batches, strict=True))


def test_pickling_and_copying_keep_everything() -> None:
    loader = CheckedLoader(DataLoader(Rows(6, bad=(1,)), batch_size=2), BatchSpec(num_classes=3), on_bad="skip")
    list(loader)
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert (twin.spec, twin.on_bad, twin.bad_batches) == (loader.spec, "skip", loader.bad_batches)
        assert firsts(twin) == [[2, 3], [4, 5]] and len(twin) == 3
    assert nanscan.find_unpicklable(loader) == []


def test_a_blank_object_has_no_attributes_and_does_not_look_for_its_loader_forever() -> None:
    assert not hasattr(object.__new__(CheckedLoader), "spec")
    assert not hasattr(object.__new__(CheckedLoader), "anything")


def test_two_passes_at_once_do_not_disturb_each_other() -> None:
    loader = CheckedLoader(DataLoader(Rows(6, bad=(5,)), batch_size=2), on_bad="skip")
    assert [(a[0, 0].item(), b[0, 0].item()) for a in loader for b in loader] == [(0, 0), (0, 2), (2, 0), (2, 2)]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_either_kind(context: str) -> None:
    inner: DataLoader[Tensor] = DataLoader(
        Rows(8, bad=(5,)), batch_size=2, num_workers=1, multiprocessing_context=context
    )
    loader = CheckedLoader(inner, on_bad="skip")
    assert firsts(loader) == [[0, 1], [2, 3], [6, 7]]
    assert loader.bad_batches[0].index == 2


# --- the middle of an epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_resumes_in_the_middle_of_an_epoch(workers: int) -> None:
    def made() -> CheckedLoader[Tensor]:
        inner: StatefulDataLoader[Tensor] = StatefulDataLoader(Rows(12, bad=(3, 8)), batch_size=2, num_workers=workers)
        return CheckedLoader(inner, on_bad="skip")

    whole = firsts(made())
    assert whole == [[0, 1], [4, 5], [6, 7], [10, 11]]
    loader, seen = made(), []
    for batch in loader:
        seen.append(batch[:, 0].tolist())
        if len(seen) == 2:
            state = copy.deepcopy(loader.state_dict())
            break
    resumed = made()
    resumed.load_state_dict(state)
    assert seen + firsts(resumed) == whole
    assert [bad.index for bad in resumed.bad_batches] == [4]  # counted from the start of the epoch
    assert firsts(resumed) == whole  # and the next epoch is a whole one


def test_a_resumed_rest_of_bad_batches_only_is_no_epoch_without_a_good_one() -> None:
    loader = CheckedLoader(StatefulDataLoader(Rows(4, bad=(3,)), batch_size=2), on_bad="skip")
    next(iter(loader))
    state = loader.state_dict()
    resumed = CheckedLoader(StatefulDataLoader(Rows(4, bad=(3,)), batch_size=2), on_bad="skip")
    resumed.load_state_dict(state)
    assert firsts(resumed) == []
    assert resumed.skipped_batches == 1

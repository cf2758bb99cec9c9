"""Fields of one batch that contradict each other: CTC lengths, edges without nodes, masks unlike their tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import ctc_loss, pad

from nanscan import BatchSpec, FieldSpec, check_batch
from tests.batch_problems import ints, only

# --- CTC


def speech(inputs: list[int], targets: list[list[int]], flat: bool = False, steps: int = 12) -> dict[str, Any]:
    """What `ctc_loss` takes, six classes."""
    lengths = [len(target) for target in targets]
    rows = [pad(torch.tensor(target), (0, max(lengths) - len(target)), value=-1) for target in targets]
    return {
        "log_probs": torch.randn(steps, len(inputs), 6).log_softmax(-1),
        "targets": torch.cat([torch.tensor(target) for target in targets]) if flat else torch.stack(rows),
        "input_lengths": torch.tensor(inputs),
        "target_lengths": torch.tensor(lengths),
    }


@pytest.mark.parametrize("flat", [False, True])
def test_a_target_is_too_long_for_ctc_exactly_where_its_loss_is_inf(flat: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    whole = lambda low, high: int(torch.randint(low, high, (), generator=draw))  # noqa: E731
    seen = set()
    for _ in range(60):
        targets = [[whole(1, 4) for _ in range(whole(1, 6))] for _ in range(3)]
        batch = speech([whole(1, 9) for _ in targets], targets, flat)
        bad = ctc_loss(**{**batch, "targets": batch["targets"].clamp(min=1)}, reduction="none").isinf()
        problems = check_batch(batch)
        assert [problem.count for problem in problems] == [int(bad.sum())] * bool(bad.any())
        sample = int(bad.int().argmax())
        assert all(f"sample {sample} has {len(targets[sample])} labels" in problem.reason for problem in problems)
        seen.add(bool(bad.any()))
    assert seen == {True, False}


def test_a_repeated_label_needs_a_step_more_and_that_is_said() -> None:
    problem = only(speech([4, 3], [[1, 2, 3], [2, 2, 2]]))
    assert (problem.path, problem.severity, problem.kind) == ('batch["targets"][1]', "error", "length")
    assert "3 labels and 2 blanks between equal neighbours" in problem.reason
    assert 'batch["input_lengths"][1] is 3 steps' in problem.reason and "zero_infinity=True" in problem.reason
    assert check_batch(speech([4, 5], [[1, 2, 3], [2, 2, 2]])) == []


def test_ctc_is_likely_where_sound_lies_beside_the_lengths_and_not_known_elsewhere() -> None:
    batch = speech([4, 2], [[1, 2], [1, 2, 3]])
    del batch["log_probs"]
    assert check_batch({**batch, "inputs": torch.rand(2, 12, 5)}) == []  # may be a decoder with attention
    assert check_batch({**batch, "inputs": torch.ones(2, 12, dtype=torch.int64)}) == []  # a translation
    problem = only({**batch, "spectrograms": torch.rand(2, 1, 5, 12)})
    assert problem.severity == "warning" and problem.reason.startswith("targets: sample 1 has 3 labels, ")


def test_a_class_that_the_log_probabilities_do_not_have_is_named_and_padding_is_let_be() -> None:
    batch = speech([9, 9], [[1, 2, 3], [6, 2]])
    problem = only(batch)
    assert problem.reason.startswith("targets[1, 0] is 6, the log-probabilities are of 6 classes (0..5); 1 of 6 bad")
    assert (problem.path, problem.kind) == ('batch["targets"][1]', "label")
    assert check_batch(speech([9, 9], [[1, 2, 3], [5, 2]])) == []


def test_the_blank_among_the_targets_is_named_where_the_batch_says_which_it_is() -> None:
    batch = speech([9, 9], [[1, 2, 3], [5, 2]])
    assert check_batch({**batch, "blank": 0}) == []
    assert only({**batch, "blank": 5}).reason.startswith("targets[1, 0] is 5, the blank; 1 of 6 bad")
    assert only({**batch, "blank": 3, "targets": batch["targets"].masked_fill(batch["targets"] < 0, 3)}).count == 1


@pytest.mark.parametrize("as_given", [lambda value: value, Tensor.tolist, lambda value: tuple(value.tolist())])
def test_lengths_beyond_what_is_there_are_named(as_given: Any) -> None:
    batch = speech([12, 13], [[1, 2, 3], [5, 2]])
    batch["input_lengths"] = as_given(batch["input_lengths"])
    problem = only(batch)
    assert problem.path == 'batch["input_lengths"][1]' and problem.kind == "length"
    assert 'sample 1 has length 13, batch["log_probs"] has 12 steps (shape (12, 2, 6)); 1 of 2 bad' in problem.reason
    batch = {**speech([9, 9], [[1, 2, 3], [5, 2]]), "target_lengths": as_given(ints(4, 2))}
    assert 'batch["targets"] has 3 steps' in check_batch(batch)[0].reason


def test_lengths_that_do_not_add_up_to_the_flat_targets_are_named() -> None:
    batch = speech([9, 9], [[1, 2, 3], [5, 2]], flat=True)
    assert check_batch(batch) == []
    problem = only({**batch, "target_lengths": ints(3, 3)})
    assert problem.path == 'batch["target_lengths"]'
    assert problem.reason.startswith(
        'add up to 6, batch["targets"], which holds all sequences one after another, has 5'
    )


class Heard(NamedTuple):
    features: Tensor
    feature_lengths: Tensor
    targets: Tensor
    target_lengths: Tensor


@pytest.mark.parametrize(
    "batch",
    [
        Heard(torch.rand(2, 6, 80), ints(6, 2), ints([1, 2, 3], [1, 2, 3]).int(), ints(3, 3).int()),  # a transducer
        {"input_ids": torch.ones(2, 3).long(), "input_lengths": ints(3, 2), "labels": torch.ones(2, 5).long()},
        {"src": torch.ones(3, 2).long(), "src_lengths": ints(3, 2)},  # time first
        {"target": ints(1, 0, 2), "target_length": ints(17, 40, 3)},  # of the class an object is of
        {"waveform": torch.rand(2, 1, 90), "input_lengths": ints(9000, 8000)},  # counted before resampling
        {  # a decoder with attention: one step for each label
            **speech([2, 9], [[1, 2, 3], [5, 2, 4]]),
            "log_probs": torch.rand(2, 3, 6).log_softmax(-1),
        },
        {"tokens": ints(1, 2, 3, 4, 0, 0), "token_lengths": ints(3, 1)},  # filled up
        {"text": ints([1, 2], [3, 0]), "text_lengths": ints(9, 5)},  # of the text itself
    ],
)
def test_lengths_of_other_kinds_pass(batch: Any) -> None:
    assert check_batch(batch) == []


# --- graphs


class Graph:
    """A graph as torch_geometric has it: a mapping in all but name."""

    def __init__(self, **stored: Any) -> None:
        self.stored = stored

    def keys(self) -> list[str]:
        return [*self.stored]

    def __getitem__(self, key: str) -> Any:
        return self.stored[key]


EDGES = ints([0, 1, 2], [1, 4, 0])


@pytest.mark.parametrize("make", [dict, Graph, SimpleNamespace])
@pytest.mark.parametrize(
    "nodes",
    [
        {"x": torch.rand(4, 3)},
        {"num_nodes": 4},
        {"num_nodes": ints(1, 3)},
        {"batch": ints(0, 0, 1, 1)},
        {"node_feat": np.zeros((4, 2), np.float32)},
        {"x": torch.rand(5, 3), "num_nodes": 4},
    ],
)
def test_an_edge_to_a_node_that_is_not_there_is_named(make: Any, nodes: dict[str, Any]) -> None:
    problem = only(make(edge_index=EDGES, **nodes))
    name = [*nodes][-1]
    where = f".{name}" if make is SimpleNamespace else f'["{name}"]'
    assert problem.reason.startswith(
        f"edge_index[1, 1] is 4, edges end at one of 4 nodes (says batch{where}); 1 of 6 bad"
    )
    assert (problem.kind, problem.severity, problem.first) == ("node", "error", (1, 1))
    assert check_batch(make(**{**nodes, "edge_index": EDGES.clamp(max=3)})) == []
    assert (
        "edge_index[0, 0] is -1, edges begin at" in only(make(**{**nodes, "edge_index": EDGES.clamp(max=3) - 1})).reason
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_edges_of_a_narrow_dtype_are_held_against_more_nodes_than_it_counts(dtype: torch.dtype) -> None:
    for nodes in ({"x": torch.rand(1000, 1)}, {"num_nodes": 1000}):
        assert check_batch(Graph(edge_index=EDGES.to(dtype), **nodes)) == []


def test_nodes_that_are_counted_from_1_are_said_to_be_that() -> None:
    assert "nodes count from 0: subtract 1" in only({"x": torch.rand(4, 3), "edge_index": ints([1, 4], [2, 3])}).reason


def test_weights_and_graph_numbers_have_one_entry_for_each_edge_and_node() -> None:
    graph = {"x": torch.rand(5, 3), "edge_index": EDGES, "edge_attr": torch.rand(3, 2), "batch": ints(0, 0, 1, 1, 1)}
    assert check_batch(graph) == []
    problem = only({**graph, "edge_attr": torch.rand(4, 2)})
    assert problem.reason == 'has 4 entries, batch["edge_index"] has 3 edges: one for each is needed'
    assert only({**graph, "batch": ints(0, 1, 1)}).path == 'batch["batch"]'


@pytest.mark.parametrize(
    "batch",
    [
        Graph(x=torch.rand(2, 3), edge_index=torch.zeros(2, 0).long(), edge_attr=torch.zeros(0, 4), y=ints(1)),  # atoms
        {"x_s": torch.rand(2, 3), "x_t": torch.rand(9, 3), "edge_index": EDGES},  # two kinds of nodes
        {"x": torch.rand(2, 9, 3), "edge_index": EDGES},  # the same graph for each sample
        {"x": torch.rand(2, 3), "edge_index": ints([0, -1], [1, -1]), "edge_mask": ints(1, 0)},
        {"x": torch.rand(5, 3), "edge_index": EDGES.expand(2, 2, 3)},
        {"edge_index": EDGES},
        {"x": torch.rand(5, 3), "edge_index": EDGES, "lg_edge_index": EDGES + 9},  # between edges
        {"x": torch.rand(5, 3), "edge_index": EDGES.repeat(1, 2), "edge_weight": torch.rand(3)},  # there and back
    ],
)
def test_graphs_of_every_usual_form_pass(batch: Any) -> None:
    assert check_batch(batch) == []


class TypedGraph(Graph):
    """A graph of several types as torch_geometric has it: a key that it has not is made when it is read."""

    node_types = property(lambda self: [key for key in self.stored if isinstance(key, str)])
    edge_types = property(lambda self: [key for key in self.stored if isinstance(key, tuple)])

    def keys(self) -> list[str]:
        return ["x", "edge_index"]

    def __getitem__(self, key: Any) -> Any:
        return self.stored.setdefault(key, {})

    def to_dict(self) -> dict[Any, Any]:
        return {"_global_store": {"y": torch.tensor([float("nan")])}}


def test_a_graph_of_several_types_is_gone_through_and_left_as_it_was() -> None:
    graph = TypedGraph()
    graph.stored = {"a": {"x": torch.rand(3, 2)}, "b": {"x": torch.rand(4, 2)}, ("a", "to", "b"): {"edge_index": EDGES}}
    before = [*graph.stored]
    edge, label = check_batch(graph)
    assert (
        edge.path == "batch[('a', 'to', 'b')][\"edge_index\"]"
        and 'one of 4 nodes (says batch["b"]["x"])' in edge.reason
    )
    assert str(label).startswith("batch.y[0] has 1 NaN") and [*graph.stored] == before
    graph.stored["b"]["x"] = torch.rand(5, 2)
    assert [problem.kind for problem in check_batch(graph)] == ["nonfinite"]


# --- text

TOKENS = ints([5, 6, 7, 0], [8, 9, 1, 2])


def test_a_mask_and_token_types_have_an_entry_for_each_token() -> None:
    batch = {
        "input_ids": TOKENS,
        "attention_mask": torch.ones(2, 3).long(),
        "decoder_input_ids": torch.ones(2, 9).long(),
    }
    problem = only(batch)
    assert problem.path == 'batch["attention_mask"]' and problem.severity == "error"
    assert problem.reason.startswith(
        'has shape (2, 3), batch["input_ids"] has (2, 4): one entry for each token is needed'
    )
    assert only({"input_ids": TOKENS, "token_type_ids": torch.zeros(2, 5).long()}).kind == "size"
    longer = {"input_ids": TOKENS, "attention_mask": torch.ones(2, 6).long()}
    assert only(longer).severity == "warning"
    assert check_batch({**longer, "past_key_values": [(torch.rand(2, 1, 2, 4),) * 2]}) == []


def test_a_text_may_refer_to_any_number_of_images_and_its_positions_have_three_axes() -> None:
    text = {"input_ids": TOKENS, "position_ids": torch.zeros(3, 2, 4).long(), "labels": TOKENS}
    for images in (torch.rand(40, 12), torch.rand(3, 3, 8, 8)):
        assert check_batch({**text, "pixel_values": images}) == []
    assert (
        only({**text, "labels": ints(1, 2, 3)}).reason == 'has 3 samples, batch["input_ids"] has 2: batch sizes differ'
    )


@pytest.mark.parametrize("shifted", [False, True])
def test_labels_that_are_tokens_stay_within_the_vocabulary(shifted: bool) -> None:
    spec = BatchSpec(vocab_size=10)
    labels = torch.cat([TOKENS[:, 1:], ints([-100], [3])], 1) if shifted else TOKENS.masked_fill(TOKENS == 0, -100)
    for batch in ((TOKENS, labels), {"input_ids": TOKENS, "labels": labels.int()}):
        for _ in range(2):
            assert check_batch(batch, spec) == []
        assert spec._quick  # healthy batches are asked the compiled question
    labels = labels.clone()
    labels[0, 3] = -1
    problem = only({"input_ids": TOKENS, "labels": labels}, spec)
    assert "sample 0 at [3] has -1, the tokens are of a vocabulary of 10 (0..9); 1 of 8 bad" in problem.reason
    assert problem.path == 'batch["labels"][0]' and "fill labels with -100 instead" in problem.reason
    assert check_batch({"input_ids": TOKENS, "labels": labels}) == []  # nothing is known


@pytest.mark.parametrize(
    "labels",
    [
        ints([50, 61, 72, 43], [80, 19, 61, 42]),  # of another language
        ints([99], [12]).expand(2, 4),
        ints([50, 61, 72], [80, 19, 61]),
        ints(17, 40),
    ],
)
def test_labels_that_are_no_tokens_of_the_input_are_not_held_against_the_vocabulary(labels: Tensor) -> None:
    assert check_batch({"input_ids": TOKENS, "labels": labels}, BatchSpec(vocab_size=10)) == []


def test_a_sample_without_a_target_among_the_labels_of_a_language_model_is_a_warning() -> None:
    ids = torch.arange(1, 41).reshape(4, 10)
    prompt = ids.masked_fill(torch.arange(10) < 6, -100)
    for spec in (BatchSpec(), BatchSpec(vocab_size=50), BatchSpec(num_classes=50)):
        for _ in range(2):
            assert check_batch({"input_ids": ids, "labels": prompt}, spec) == []
        assert spec._quick  # healthy batches are asked the compiled question, and this one after it
        cut = prompt.clone()
        cut[2] = -100
        problem = only({"input_ids": ids, "labels": cut}, spec)
        assert (problem.path, problem.kind, problem.severity) == ('batch["labels"][2]', "no_target", "warning")
        assert problem.reason.startswith("labels: sample 2 has no target, all 10 are -100 (1 of 4 samples are so)")
    at_random = torch.full_like(ids, -100)
    at_random[:3, 4] = 9  # the masked token was another
    assert check_batch({"input_ids": ids, "labels": at_random}) == []
    assert only({"input_ids": ids, "labels": torch.full_like(ids, -100)}).severity == "error"


def test_a_field_of_which_nothing_is_to_be_known_is_not_held_against_others() -> None:
    spec = BatchSpec(fields={"edge_index": FieldSpec(), "target_lengths": FieldSpec()})
    batch = {"x": torch.rand(2, 3), "edge_index": EDGES, "targets": ints([1, 2], [2, 1]), "target_lengths": ints(9, 9)}
    assert len(check_batch(batch)) == 2 and check_batch(batch, spec) == []

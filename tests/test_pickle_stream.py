"""Pickles and torch files are looked into without running any of them: a canary file never appears."""

from __future__ import annotations

import argparse
import collections
import copyreg
import io
import os
import pickle
import pickletools
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanscan.pickling.opcodes import follow
from nanscan.pickling.safe_globals import runs_code
from nanscan.pickling.stream import NotAPickle, PickleContents, inspect_pickle


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.fixture
def canary(tmp_path: Path) -> Any:
    """A command that would make a file; at the end the file must not be there."""
    file = tmp_path / "canary"
    yield f"touch {file}"
    assert not file.exists()


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def paths(contents: PickleContents) -> list[str]:
    return [use.path for use in contents.globals]


STATE = {"w": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.float16), "same": torch.ones(5)[:2]}


@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_is_clean_and_its_tensors_are_counted(legacy: bool) -> None:
    contents = inspect_pickle(saved(STATE, _use_new_zipfile_serialization=not legacy))
    assert contents.kind == ("torch legacy file" if legacy else "torch zip archive")
    assert (contents.tensors, contents.tensor_bytes) == (3, 12 * 4 + 2 * 2 + 5 * 4)
    assert contents.clean and contents.protocols == [2] and contents.persistent_ids == 3
    assert contents.pickles == (5 if legacy else 1)
    assert "torch._utils._rebuild_tensor_v2" in paths(contents)


def test_shared_storages_count_once() -> None:
    weight = torch.ones(10)
    contents = inspect_pickle(saved([weight, weight[:5]]))
    assert (contents.tensors, contents.tensor_bytes) == (2, 40)


@pytest.mark.parametrize("legacy", [False, True])
def test_what_weights_only_refuses_is_listed_first_with_count_and_place(legacy: bool, tmp_path: Path) -> None:
    value = {"args": argparse.Namespace(a=1), "more": argparse.Namespace(), "w": torch.ones(1)}
    file = tmp_path / "any.pt"
    file.write_bytes(saved(value, _use_new_zipfile_serialization=not legacy))
    contents = inspect_pickle(file)
    (use,) = contents.refused
    assert (use.path, use.danger, contents.clean) == ("argparse.Namespace", None, False)
    assert contents.globals[0] is use and "offset" in use.place
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert inspect_pickle(file).clean


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("reduced", "path"),
    [
        ((os.system, ("touch canary",)), "posix.system"),
        ((eval, ("1",)), "builtins.eval"),
        ((__import__, ("os",)), "builtins.__import__"),
        ((getattr, (os, "system")), "builtins.getattr"),
    ],
)
def test_what_would_run_code_is_named_in_every_protocol(reduced: Any, path: str, protocol: int) -> None:
    if reduced[0] is getattr:
        reduced = (getattr, ("os", "system"))
    contents = inspect_pickle(pickle.dumps([1, Runs(*reduced)], protocol))
    assert contents.dangerous[0].path == path and not contents.clean
    assert contents.protocols == [protocol if protocol > 1 else 0]


def _command(canary: str) -> list[bytes]:
    """Ways to spell the same attack."""
    text = canary.encode()
    short = b"\x8c" + bytes([len(text)]) + text
    return [
        b"cos\nsystem\n(S'" + text + b"'\ntR.",
        b"(S'" + text + b"'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'" + text + b"'\no.",  # OBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93" + short + b"\x85R.",  # STACK_GLOBAL
        b"\x80\x04\x8c\x06system\x94\x8c\x02os\x94h\x01h\x00\x93" + short + b"\x85R.",  # … through the memo
        b"\x80\x04\x8c\x02os2\x8c\x06system\x93" + b"0" + short + b"0" + b"N.",  # computed from a duplicate: os, os
        b"\x80\x04\x8c\x02os\x8c\x04junk0\x8c\x06system\x93" + short + b"\x85R.",  # … with a POP between
        b"\x80\x04(\x8c\x04junk1\x8c\x02os\x8c\x06system\x93" + short + b"\x85R.",  # … with a POP_MARK before
        b"\x80\x02c__builtin__\neval\n\x80\x04\x8c\x011\x85R.",  # Python 2's name, then another protocol
        b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93" + short + b"\x85R.",  # through a module's imports
        b"\x80\x04\x8c\x09posixpath\x8c\x09os.system\x93" + short + b"\x85R.",
        b"\x80\x04\x8c\x0bcollections\x8c\x04_sys\x93.",  # a module that another one has imported
        b"\x80\x02ccommands\ngetoutput\nU" + bytes([len(text)]) + text + b"\x85R.",
        b"\x80\x04cos\nsystem\n" + short + b"\x85R" + b"garbage that no pickle holds",  # runs before the error
    ]


@pytest.mark.parametrize("way", range(14))
def test_no_spelling_hides_an_attack_and_none_is_run(way: int, canary: str) -> None:
    data = _command(canary)[way]
    contents = inspect_pickle(data)
    assert contents.dangerous, paths(contents)
    assert not contents.clean


def test_a_name_that_is_computed_counts_as_dangerous() -> None:
    contents = inspect_pickle(b"\x80\x04\x8c\x02os\x8c\x03sys\x8c\x03tem\x86N\x93.")
    assert "computed while loading" in contents.globals[0].name and contents.dangerous


def test_extension_codes_are_looked_up_and_unknown_ones_are_dangerous() -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        assert inspect_pickle(b"\x80\x02\x82\xf0.").dangerous[0].path == "os.system"
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert "extension 240" in inspect_pickle(b"\x80\x02\x82\xf0.").dangerous[0].path


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_in_a_byte_string_is_looked_into(protocol: int, canary: str) -> None:
    inner = pickle.dumps(Runs(os.system, (canary,)))
    contents = inspect_pickle(pickle.dumps({"data": inner, "deeper": pickle.dumps([inner])}, protocol))
    assert contents.nested == 3 and contents.dangerous[0].count == 2
    assert "byte string" in contents.dangerous[0].place and "byte strings" in contents.notes[0]


def test_a_pickled_model_is_no_attack_and_an_attack_in_its_tensors_is_found(canary: str) -> None:
    model = pickle.dumps(torch.nn.Linear(2, 2))
    assert inspect_pickle(model).nested > 0 and not inspect_pickle(model).dangerous
    inner = pickle.dumps(Runs(os.system, (canary,)), 2)
    load = torch.storage._load_from_bytes
    assert paths(inspect_pickle(pickle.dumps(Runs(load, (inner,)))))[0] == "posix.system"
    for computed in (Runs(bytes, ([1, 2],)), Runs(bytes.fromhex, ("80",))):
        contents = inspect_pickle(pickle.dumps([Runs(load, (b"....",)), Runs(load, (computed,))]))
        assert "torch.storage._load_from_bytes" in [use.path for use in contents.dangerous]
    assert inspect_pickle(pickle.dumps([load, Runs(load, (b"....",))])).dangerous


def test_harmless_byte_strings_are_no_pickles() -> None:
    contents = inspect_pickle(pickle.dumps({"a": b"cats\nand\n.", "b": bytes(range(256)), "c": b"....", "d": b"cab"}))
    assert contents.clean or contents.nested <= 1
    assert not contents.dangerous


def test_several_pickles_in_a_row_are_all_looked_into(canary: str) -> None:
    data = pickle.dumps(1) + pickle.dumps([np.float64(1)]) + pickle.dumps(Runs(os.system, (canary,)))
    contents = inspect_pickle(io.BytesIO(data))
    assert contents.pickles == 3 and contents.dangerous[0].place.startswith("pickle[2], offset")


def test_bytes_after_a_whole_pickle_are_a_note_not_damage() -> None:
    contents = inspect_pickle(pickle.dumps([1]) + b"\x00\x01\x02 raw data")
    assert contents.clean and "no pickle" in contents.notes[0] and contents.pickles == 1


@pytest.mark.parametrize("place", ["archive/data.pkl", "other/name/data.pkl", "data.pkl", "archive/constants.pkl"])
def test_every_pickle_of_an_archive_is_looked_into_whatever_its_folder(place: str, canary: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/version", "3")
        archive.writestr(place, pickle.dumps(Runs(os.system, (canary,)), 2))
    contents = inspect_pickle(buffer.getvalue())
    assert contents.dangerous[0].path == "posix.system" and contents.dangerous[0].place.startswith(place)


def test_an_attack_in_any_pickle_of_a_legacy_file_is_found(canary: str) -> None:
    parts = [pickle.dumps(part, 2) for part in (torch.serialization.MAGIC_NUMBER, 1001, {}, {"a": 1}, [])]
    for index in range(1, 5):
        bad = [*parts]
        bad[index] = pickle.dumps(Runs(os.system, (canary,)), 2)
        contents = inspect_pickle(b"".join(bad) + bytes(100))
        assert contents.kind == "torch legacy file" and contents.dangerous, index
    assert inspect_pickle(b"".join(parts) + bytes(100)).clean


def _tar(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def test_the_tar_format_of_old_torch_is_followed_past_its_data(canary: str) -> None:
    storage = pickle.dumps(("0", "cpu", torch.FloatStorage), 2) + struct.pack("<q", 3) + b"c\x80\x04." * 3
    tensor = pickle.dumps(("1", "0", torch.FloatTensor), 2) + struct.pack("<ii3q", 1, 0, 3, 1, 0)
    attack = pickle.dumps(Runs(os.system, (canary,)), 2)
    healthy = {"storages": pickle.dumps(2, 2) + storage * 2, "tensors": pickle.dumps(2, 2) + tensor * 2}
    contents = inspect_pickle(_tar(**healthy, pickle=pickle.dumps({"a": 1}, 2)))
    assert contents.kind == "torch tar file" and contents.error is None and not contents.dangerous
    assert contents.pickles == 7 and not contents.clean and "tar format" in contents.notes[0]
    for name in ("storages", "tensors", "pickle"):
        members = {**healthy, "pickle": pickle.dumps({"a": 1}, 2)}
        members[name] = (
            attack if name == "pickle" else members[name][: -len(storage if name == "storages" else tensor)] + attack
        )
        assert inspect_pickle(_tar(**members)).dangerous, name
    with pytest.raises(NotAPickle, match="not one that torch has written"):
        inspect_pickle(_tar(readme=b"hello"))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["pickle", "zip", "legacy"])
def test_a_truncated_file_is_told_with_what_came_before(kind: str, share: float) -> None:
    value = [argparse.Namespace(a="x" * 300), list(range(1000, 1300))]
    whole = {
        "pickle": pickle.dumps(value),
        "zip": saved(value),
        "legacy": saved(value, _use_new_zipfile_serialization=False),
    }[kind]
    contents = inspect_pickle(whole[: int(len(whole) * share)])
    assert contents.error and not contents.clean
    assert "truncated" in contents.error
    assert kind == "zip" or "argparse.Namespace" in paths(contents)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x1f\x8b" + bytes(40), "gzip"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
        (struct.pack("<Q", 40) + b'{"w":{"dtype":"F32"}}' + bytes(60), "safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"hello, world\n" * 10, "no pickle"),
        (b"\xff\xfe\x00\x01" * 50, "no pickle"),
        (bytes(1000), "no pickle"),
    ],
)
def test_a_foreign_file_is_refused_with_what_it_is(data: bytes, words: str) -> None:
    with pytest.raises(NotAPickle, match=words):
        inspect_pickle(data)


def test_a_zip_without_a_pickle_is_foreign_and_a_damaged_entry_is_damage() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(NotAPickle, match="without a data.pkl"):
        inspect_pickle(buffer.getvalue())
    whole = bytearray(saved({"a": argparse.Namespace()}))
    whole[whole.index(b"argparse")] ^= 1
    assert "damaged" in str(inspect_pickle(bytes(whole)).error)


def test_opcodes_that_weights_only_does_not_know_are_listed() -> None:
    contents = inspect_pickle(saved({"a": 1}, pickle_protocol=4))
    assert "FRAME" in contents.opcodes and not contents.clean
    assert inspect_pickle(pickle.dumps({"a": 1})).clean  # a bare pickle is not for torch.load


def test_ids_of_data_that_torch_does_not_know_are_counted() -> None:
    class Own(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return "own" if isinstance(value, set) else None

    buffer = io.BytesIO()
    Own(buffer, 4).dump([{1}, {2}])
    contents = inspect_pickle(buffer.getvalue())
    assert (contents.persistent_ids, contents.foreign_ids) == (2, 2)


def test_a_tuple_bomb_takes_no_time() -> None:
    bomb = b"\x80\x02)" + b"q\x00h\x00\x86" * 200
    contents = inspect_pickle(bomb + b"U\x07storage" + b"h\x00" * 4 + b"tQ.")
    assert contents.error or contents.foreign_ids <= 1
    key = b"\x80\x02(U\x07storagectorch\nFloatStorage\n)" + b"2\x86" * 200 + b"U\x03cpuK\x03tQ."
    assert inspect_pickle(key).foreign_ids == 1


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=1),
        np.arange(3),
        np.random.default_rng(0),
        Path("x"),
        argparse.Namespace(a=1),
        torch.nn.Linear(2, 2),
        collections.Counter("ab"),
        ValueError("x"),
        1j,
        {frozenset({1}), range(3)},
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_ordinary_objects_are_not_dangerous_and_every_opcode_is_followed(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    contents = inspect_pickle(data)
    assert not contents.dangerous and contents.error is None
    trace = follow(io.BytesIO(data))
    named = sum(opcode.name in ("GLOBAL", "STACK_GLOBAL") for opcode, *_ in pickletools.genops(data))
    assert len(trace.imports) == named and trace.size == len(data)


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "subprocess.Popen",
        "shutil.rmtree",
        "pty.spawn",
        "socket.create_connection",
        "runpy.run_path",
        "builtins.exec",
        "pickle.loads",
        "torch.hub.load",
        "_pickle.loads",
        "torch.storage._load_from_bytes",
        "numpy.load",
    ],
)
def test_known_ways_to_run_code_are_known(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert runs_code(module, name)


def test_inspecting_imports_nothing_that_the_file_names() -> None:
    import sys

    assert "this" not in sys.modules
    assert inspect_pickle(b"cthis\ns\n.").globals[0].path == "this.s"
    assert "this" not in sys.modules


def test_it_becomes_plain_data() -> None:
    document = inspect_pickle(b"cos\nsystem\n.").to_dict()
    assert document["clean"] is False and document["globals"][0]["module"] == "os"

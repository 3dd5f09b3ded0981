"""Payloads: what is sound comes out bit for bit, what is not is refused by name, and nothing of it is ever executed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
from collections import OrderedDict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_control.errors import RefitRefusedError
from engine_control.refit.payload.bucket import flatten, unflatten
from engine_control.refit.payload.rebuild import load_payload
from engine_control.refit.payload.safetensors_format import file_bytes, tensors

NAMED = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "bf16": torch.randn(2, 3, dtype=torch.float32).to(torch.bfloat16),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
    "fp32": torch.randn(5),
    "fp8": torch.randn(4).to(torch.float8_e4m3fn),
}


def same(named: Any, expected: dict[str, torch.Tensor]) -> bool:
    found = {name: tensor.clone() for name, tensor in named}
    return found.keys() == expected.keys() and all(
        found[n].dtype == t.dtype and found[n].shape == t.shape and found[n].tolist() == t.tolist()
        for n, t in expected.items()
    )


# safetensors


def test_what_we_write_the_safetensors_library_reads_and_the_other_way_round() -> None:
    ours = bytes(file_bytes(NAMED.items()))
    assert same(safetensors.torch.load(ours).items(), NAMED)
    theirs = safetensors.torch.save(NAMED, metadata={"format": "pt"})
    assert same(tensors(theirs, field="safetensors"), NAMED)
    as_tensor = torch.frombuffer(bytearray(theirs), dtype=torch.uint8)
    assert same(tensors(as_tensor, field="safetensors"), NAMED)


def test_a_file_cut_short_anywhere_or_with_bytes_behind_it_is_refused() -> None:
    file = bytes(file_bytes(NAMED.items()))
    for length in range(len(file)):
        with pytest.raises(RefitRefusedError):
            list(tensors(file[:length], field="safetensors"))
    with pytest.raises(RefitRefusedError, match="bytes behind"):
        list(tensors(file + b"\0", field="safetensors"))


def a_file(header: str, data: bytes = b"\0" * 8) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


def entry(dtype: str = "F32", shape: str = "[2]", offsets: str = "[0,8]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{{"a":{entry()},"a":{entry()}}}', "occurs twice"),
        (f'{{"a":{entry(offsets="[4,12]")}}}', "gap"),
        (f'{{"a":{entry()},"b":{entry(shape="[1]", offsets="[4,8]")}}}', "overlap"),
        (f'{{"a":{entry(offsets="[8,0]")}}}', "data_offsets"),
        (f'{{"a":{entry(offsets="[0,8,9]")}}}', "data_offsets"),
        (f'{{"a":{entry(offsets="[0,true]")}}}', "data_offsets"),
        (f'{{"a":{entry(shape="[3]")}}}', "12 bytes"),
        (f'{{"a":{entry(shape="[-1,-2]")}}}', "shape"),
        (f'{{"a":{entry(shape="[4611686018427387904,4]")}}}', "shape"),
        (f'{{"a":{entry(shape="[2.0]")}}}', "shape"),
        (f'{{"a":{entry(dtype="F4")}}}', "unknown safetensors dtype"),
        ('{"a":[]}', "not an entry"),
        ("[]", "not an object"),
        ("{", "can't be read"),
        ('{"a":' + "[" * 100_000, "can't be read"),
        (f'{{"a":{entry("BOOL", "[8]")}}}', "0 and 1"),
    ],
)
def test_a_header_that_breaks_the_format_is_refused(header: str, message: str) -> None:
    with pytest.raises(RefitRefusedError, match=message):
        list(tensors(a_file(header, b"\2" * 8), field="safetensors"))


def test_a_header_longer_than_the_format_allows_is_refused_before_it_is_read() -> None:
    with pytest.raises(RefitRefusedError, match="at most 100000000"):
        list(tensors((200_000_000).to_bytes(8, "little") + b"{}", field="safetensors"))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_file_with_flipped_bytes_is_read_inside_its_bounds_or_refused(flips: list[tuple[int, int]]) -> None:
    file = bytearray(file_bytes(NAMED.items()))
    for at, value in flips:
        file[at % len(file)] = value
    try:
        read = list(tensors(file, field="safetensors"))
    except RefitRefusedError:
        return
    assert sum(tensor.nbytes for _, tensor in read) < len(file)


# buckets


def test_a_bucket_of_mixed_dtypes_comes_out_as_it_went_in_although_nothing_in_it_is_aligned() -> None:
    flat, metadata = flatten(NAMED.items())
    assert flat.dtype == torch.uint8
    assert [m.start_idx % m.dtype.itemsize for m in metadata if m.numel] != [0] * 6
    assert same(unflatten({"flattened_tensor": flat, "metadata": metadata}, field="bucket"), NAMED)
    assert same(unflatten({"flattened_tensor": flat, "metadata": [vars(m) for m in metadata]}, field="b"), NAMED)


def test_an_empty_bucket_is_a_bucket() -> None:
    flat, metadata = flatten([])
    assert list(unflatten({"flattened_tensor": flat, "metadata": metadata}, field="bucket")) == []


def test_a_bucket_of_one_dtype_that_counts_elements_is_read_too() -> None:
    parts = {"a": torch.randn(2, 2), "b": torch.randn(3)}
    metadata = [place("a", (2, 2), torch.float32, 0, 4), place("b", (3,), torch.float32, 4, 7)]
    flat = torch.cat([t.flatten() for t in parts.values()])
    assert same(unflatten({"flattened_tensor": flat, "metadata": metadata}, field="bucket"), parts)


def place(name: Any, shape: Any, dtype: Any, start: Any, end: Any, numel: Any = None) -> dict[str, Any]:
    numel = end - start if numel is None else numel
    return {"name": name, "shape": shape, "dtype": dtype, "start_idx": start, "end_idx": end, "numel": numel}


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([place("a", (4,), torch.float32, 4, 20)], "bytes 4 to 20 of a bucket of 16"),
        ([place("a", (1,), torch.float32, -4, 0)], "not positions"),
        ([place("a", (1,), torch.float32, 8, 4, -4)], "not positions"),
        ([place("a", (1,), torch.float32, 0.0, 4, 4)], "not positions"),
        ([place("a", (2,), torch.float32, 0, 4)], "is 8 bytes"),
        ([place("a", (1,), torch.float32, 0, 4, 1)], "numel 1"),
        ([place("a", (-1, -1), torch.float32, 0, 4)], "shape"),
        ([place("a", (1,), "float33", 0, 4)], "dtype"),
        ([place("", (1,), torch.float32, 0, 4)], "no name"),
        ([place("a", (2,), torch.float32, 0, 8), place("b", (1,), torch.float32, 4, 8)], "shares bytes"),
        (["a"], "no name"),
    ],
)
def test_a_bucket_whose_tensors_do_not_lie_where_it_says_is_refused(places: list[Any], message: str) -> None:
    with pytest.raises(RefitRefusedError, match=message):
        list(unflatten({"flattened_tensor": torch.zeros(16, dtype=torch.uint8), "metadata": places}, field="bucket"))


def test_elements_of_one_dtype_can_not_be_said_to_be_another() -> None:
    bucket = {"flattened_tensor": torch.zeros(4), "metadata": [place("a", (2,), torch.float64, 0, 4)]}
    with pytest.raises(RefitRefusedError, match="uint8"):
        list(unflatten(bucket, field="bucket"))


# pickles

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(plain, st.sampled_from([3, 4, 5]))
def test_plain_data_is_read_as_python_reads_it(value: Any, protocol: int) -> None:
    assert load_payload(pickle.dumps(value, protocol)) == value


def test_torch_sizes_dtypes_and_ordered_dicts_are_plain_data_too() -> None:
    value = OrderedDict(shape=torch.Size([2, 3]), dtype=torch.bfloat16)
    for protocol in (2, 4, 5):
        read = load_payload(pickle.dumps(value, protocol))
        assert read == {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16}
        assert type(read["shape"]) is torch.Size


class Calls:
    """Something that Python's own unpickler would call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def hostile(canary: Path) -> dict[str, bytes]:
    command = f"touch {canary}"
    return {
        "posix.system": pickle.dumps(Calls(os.system, command)),
        "builtins.eval": pickle.dumps(Calls(eval, f"open({str(canary)!r}, 'w')")),
        "builtins.getattr": pickle.dumps(Calls(getattr, "a", "upper")),
        "functools.partial": pickle.dumps(functools.partial(os.system, command)),
        "builtins.print": b"\x80\x04cbuiltins\nprint\n)R.",
        "torch.storage._load_from_bytes": pickle.dumps({"a": torch.ones(2)}),
        "torch.serialization.load": pickle.dumps(Calls(torch.load, str(canary))),
        "a call of torch.Tensor": b"\x80\x04ctorch\nTensor\n)R.",
        "a new torch.Tensor": b"\x80\x04ctorch\nTensor\n)\x81.",
        "a new NoneType": b"\x80\x04N)\x81.",
        "a call of str": b"\x80\x04X\x02\x00\x00\x00os)R.",
        "_codecs.encode": pickle.dumps(b"abc", 2),
        "os.path.join": b"\x80\x04\x8c\x07os.path\x8c\x04join\x93.",
        "b'i'": b"\x80\x04(ios\nsystem\n.",
        "b'\\\\x82'": b"\x80\x04\x82\x01.",
        "b'Q'": b"\x80\x04NQ.",
        "multiprocessing.resource_sharer.DupFd": b"\x80\x04cmultiprocessing.resource_sharer\nDupFd\n.",
    }


@pytest.mark.parametrize("name", hostile(Path("x")))
def test_what_a_payload_may_not_name_is_refused_by_its_name_and_never_called(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(RefitRefusedError) as refused:
        load_payload(hostile(canary)[name])
    assert name.replace("\\\\", "\\") in str(refused.value)
    assert not canary.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x01N.",
        b"\x80\x06N.",
        b"\x80\x04",
        b"\x80\x04.",
        b"\x80\x04N",
        b"\x80\x04N.N.",
        b"\x80\x04NN.",
        b"\x80\x04(.",
        b"\x80\x04(\x94.",
        b"\x80\x04}(K\x01u.",
        b"\x80\x04}]K\x01s.",
        b"\x80\x04NK\x01a.",
        b"\x80\x04h\x05.",
        b"\x80\x04X\xff\xff\xff\xffab.",
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",
        b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
        b"\x80\x04ctorch\nSize\n]K\x01aR.",
        b"\x80\x04ctorch\nSize\n(X\x01\x00\x00\x00at\x85R.",
        b"\x80\x04" + b"(" * 10_000,
    ],
)
def test_bytes_that_are_no_pickle_are_refused(data: bytes) -> None:
    with pytest.raises(RefitRefusedError):
        load_payload(data)


class FlattenedTensorMetadata:
    """As a trainer pickles it, whose class is another module's."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def renamed(data: bytes, module: str) -> bytes:
    """The pickle with this test's module exchanged."""
    return data.replace(
        b"\x8c" + bytes([len(__name__)]) + __name__.encode(), b"\x8c" + bytes([len(module)]) + module.encode()
    )


def frameless(value: object) -> bytes:
    data = pickle.dumps(value, 4)
    return data[:2] + data[11:]  # the frame's length would not fit after a renaming


def test_the_metadata_of_a_trainers_bucket_keeps_its_plain_attributes_and_takes_no_others() -> None:
    module = "sglang.srt.weight_sync.tensor_bucket"
    state = place("w", torch.Size([2]), torch.float32, 0, 8)
    read = load_payload(renamed(frameless([FlattenedTensorMetadata(**state)]), module))
    bucket = {"flattened_tensor": torch.ones(2).view(torch.uint8), "metadata": read}
    assert same(unflatten(bucket, field="bucket"), {"w": torch.ones(2)})
    with pytest.raises(RefitRefusedError, match="not the attributes"):
        load_payload(renamed(frameless(FlattenedTensorMetadata(**state, __class__=1)), module))
    with pytest.raises(RefitRefusedError, match=r"sglang\.other\.FlattenedTensorMetadata"):
        load_payload(renamed(frameless(FlattenedTensorMetadata(**state)), "sglang.other"))


def test_a_cuda_handle_without_such_a_device_and_a_tensor_outside_of_its_memory_are_refused() -> None:
    arguments = [None, torch.Size([2]), (1,), 0, None, torch.float32, "a-uuid", b"h", 8, 0, False, b"r", 0, b"e", False]

    def payload(**changed: Any) -> bytes:
        values = list(arguments)
        for index, value in changed.items():
            values[int(index[1:])] = value
        return frameless(Calls(rebuild_cuda_tensor, *values)).replace(
            b"\x8c" + bytes([len(__name__)]) + __name__.encode(), b"\x8c\x20torch.multiprocessing.reductions"
        )

    with pytest.raises(RefitRefusedError, match="not the one that the tensor lies on"):
        load_payload(payload())
    for changed in ({"_1": torch.Size([3])}, {"_2": (2,)}, {"_3": 1}):
        with pytest.raises(RefitRefusedError, match="leaves its memory of 2 elements"):
            load_payload(payload(**changed))
    for changed in ({"_2": (-1,)}, {"_3": -1}, {"_8": "8"}, {"_2": (1, 1)}):
        with pytest.raises(RefitRefusedError, match=r"not the shape|not the strides|not a dtype"):
            load_payload(payload(**changed))


def rebuild_cuda_tensor() -> None:
    """Stands in a pickle for torch's."""


def test_cpu_tensors_behind_file_descriptors_are_refused_with_the_way_out() -> None:
    with pytest.raises(RefitRefusedError, match="file_system"):
        load_payload(bytes(ForkingPickler.dumps([("a", torch.ones(2))])))


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=3)), max_size=4),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_mutated_payloads_are_refused_or_read_and_run_nothing(
    splices: list[tuple[int, bytes]], cut: int, evil: bool
) -> None:
    canary = Path(f"/tmp/canary-{os.getpid()}")
    value = [
        {"shape": torch.Size([2]), "dtype": torch.int8, "list": [1, (2, b"3")]},
        Calls(os.system, f"touch {canary}") if evil else 1,
    ]
    data = bytearray(pickle.dumps(value))
    for at, new in splices:
        at %= len(data)
        data[at : at + len(new)] = new
    whole_or_cut = bytes(data) if cut % 3 else bytes(data[: cut % len(data)])
    with contextlib.suppress(RefitRefusedError):
        load_payload(whole_or_cut)
    assert not canary.exists()


def test_the_header_json_has_the_code_of_every_dtype_that_safetensors_knows() -> None:
    file = bytes(file_bytes([("a", torch.ones(1, dtype=torch.complex64))]))
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    assert header["a"]["dtype"] == "C64"

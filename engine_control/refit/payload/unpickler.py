"""Reads the pickles in which SGLang-style trainers send tensors, as data: an interpreter that can't call what it likes.

Python's own unpickler imports and calls whatever a pickle names. This one knows the opcodes of protocols 2 to 5 that
build plain values, and looks each global up in a table (made in `rebuild`) by its exact module and name. What it finds
there is this project's own function that checks its arguments, or a marker that can't be called. A global outside of
the table, and any opcode that could reach further, ends the reading.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Never

from engine_control.errors import EngineError, RefitRefusedError

FIELD = "serialized_named_tensors"
MAX_INTEGER_BYTES = 64
HINT = "Send tensors, names and containers alone, or safetensors (load_format 'safetensors')."


@dataclass(frozen=True)
class Marker:
    """A class or function that a pickle names and that only stands for itself here: nothing can be called by it."""

    name: str


@dataclass(frozen=True)
class Rebuilder:
    """A function of ours that stands for the one a pickle names. It gets the pickle's arguments and checks them."""

    name: str
    call: Callable[..., object]


@dataclass(frozen=True)
class HolderClass:
    """A class whose instances become `Holder`s with these attributes and no others."""

    name: str
    attributes: frozenset[str]


@dataclass
class Holder:
    """An instance of a class that a pickle names, without that class: its plain attributes."""

    cls: HolderClass
    state: dict[str, object] = field(default_factory=dict)

    def __getattr__(self, attribute: str) -> object:
        try:
            return self.__dict__["state"][attribute]
        except KeyError:
            raise AttributeError(attribute) from None


Globals = Mapping[tuple[str, str], object]


def load(data: bytes | bytearray, table: Globals) -> Any:
    """The object that the pickle describes.

    Containers, text, bytes and numbers are Python's own (an ordered dict is a dict); a global is what `table` holds.

    Raises:
        RefitRefusedError: a global that isn't in the table, an opcode that is not read, or bytes that are no pickle.
    """
    machine = _Machine(data, table)
    try:
        return machine.run()
    except EngineError:
        raise
    except RecursionError as error:
        raise RefitRefusedError("the pickle is nested too deeply", field=FIELD, hint=HINT) from error
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError, ValueError, OverflowError) as error:
        raise RefitRefusedError(
            f"malformed pickle at byte {machine.position}: {type(error).__name__}: {error}", field=FIELD, hint=HINT
        ) from error


class _Mark:
    """Where an opcode that takes many values stops."""


_MARK = _Mark()


class _Machine:
    """The stack, the memo and the position of one reading."""

    def __init__(self, data: bytes | bytearray, table: Globals) -> None:
        self.data = memoryview(data)
        self.table = table
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        if bytes(self.data[:1]) != b"\x80" or not 2 <= self.data[1] <= 5:
            raise RefitRefusedError("not a pickle of protocol 2 to 5", field=FIELD, hint=HINT)
        while (code := self.take(1)[0]) != ord("."):
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise RefitRefusedError(f"pickle opcode {bytes([code])!r} is not read", field=FIELD, hint=HINT)
            operation(self)
        if self.position != len(self.data) or len(self.stack) != 1 or self.stack[0] is _MARK:
            raise ValueError("it does not end with one value")
        return self.stack[0]

    def take(self, count: int) -> memoryview:
        if count < 0 or count > len(self.data) - self.position:
            raise IndexError("it is truncated")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> str:
        end = bytes(self.data[self.position : self.position + 1000]).index(b"\n")
        text = str(self.take(end), "ascii")
        self.take(1)
        return text

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def pop_to_mark(self) -> list[Any]:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                values = self.stack[index + 1 :]
                del self.stack[index:]
                return values
        raise ValueError("no mark")

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise TypeError(f"a {type(value).__name__} where a {kind.__name__} should be")
        return value

    def find(self, module: object, name: object) -> object:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a global's name is not text")
        if (module, name) not in self.table:
            blocked(f"{module}.{name}")
        found = self.table[module, name]
        if isinstance(found, EngineError):  # one that is known, and refused with a reason of its own
            raise type(found)(found.message, field=found.field, value=found.value, hint=found.hint)
        return found


def blocked(name: str) -> Never:
    """Refuses a global by its name."""
    raise RefitRefusedError(f"a weight payload may not name {name}", field=FIELD, value=name, hint=HINT)


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda m: m.push(value)


def _integer(form: str) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.number(form))


def _text(form: str) -> Callable[[_Machine], None]:
    return lambda m: m.push(str(m.take(m.number(form)), "utf-8", "surrogatepass"))


def _bytes(form: str) -> Callable[[_Machine], None]:
    return lambda m: m.push(bytes(m.take(m.number(form))))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def build(m: _Machine) -> None:
        values = [m.pop() for _ in range(count)]
        m.push(tuple(reversed(values)))

    return build


def _long(m: _Machine) -> None:
    count = m.number("<B")
    if count > MAX_INTEGER_BYTES:
        raise ValueError("an absurdly large integer")
    m.push(int.from_bytes(m.take(count), "little", signed=True))


def _get(form: str) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.memo[m.number(form)])


def _put(form: str) -> Callable[[_Machine], None]:
    def store(m: _Machine) -> None:
        m.memo[m.number(form)] = _value(m.stack[-1])

    return store


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = _value(m.stack[-1])


def _value(value: object) -> object:
    if value is _MARK:
        raise ValueError("a mark where a value should be")
    return value


def _drop(m: _Machine) -> None:
    m.stack.pop()


def _drop_to_mark(m: _Machine) -> None:
    m.pop_to_mark()


def _append(m: _Machine) -> None:
    value = m.pop()
    m.top(list).append(value)


def _appends(m: _Machine) -> None:
    values = m.pop_to_mark()
    m.top(list).extend(values)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.top(dict)[_key(key)] = value


def _set_items(m: _Machine) -> None:
    values = m.pop_to_mark()
    m.top(dict).update(_pairs(values))


def _pairs(values: list[Any]) -> dict[object, object]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    return {_key(key): value for key, value in zip(values[::2], values[1::2], strict=True)}


def _key(key: object) -> object:
    if type(key) not in (str, int, bytes):
        raise TypeError(f"a {type(key).__name__} as a key")
    return key


def _global(m: _Machine) -> None:
    m.push(m.find(m.line(), m.line()))


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.push(m.find(module, name))


def _reduce(m: _Machine) -> None:
    arguments, function = m.pop(), m.pop()
    if not isinstance(function, Rebuilder) or type(arguments) is not tuple:
        blocked(f"a call of {getattr(function, 'name', None) or type(function).__name__}")
    try:
        m.push(function.call(*arguments))
    except (TypeError, ValueError, RuntimeError) as error:  # a wrong number of arguments; torch refusing a handle
        raise RefitRefusedError(
            f"{function.name} failed on the payload's arguments: {error}", field=FIELD, value=function.name, hint=HINT
        ) from error


def _new_object(m: _Machine) -> None:
    arguments, cls = m.pop(), m.pop()
    if not isinstance(cls, HolderClass) or arguments != ():
        blocked(f"a new {getattr(cls, 'name', None) or type(cls).__name__}")
    m.push(Holder(cls))


def _build(m: _Machine) -> None:
    state = m.pop()
    holder = m.top(Holder)
    if type(state) is not dict or not set(state) <= holder.cls.attributes:
        raise ValueError(f"not the attributes of {holder.cls.name}")
    holder.state.update(state)


_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: _check_protocol(m.number("<B")),
    0x95: lambda m: _check_frame(m, m.number("<Q")),
    ord("("): _constant(_MARK),
    ord("0"): _drop,
    ord("1"): _drop_to_mark,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("J"): _integer("<i"),
    ord("K"): _integer("<B"),
    ord("M"): _integer("<H"),
    0x8A: _long,
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): _text("<I"),
    0x8C: _text("<B"),
    0x8D: _text("<Q"),
    ord("B"): _bytes("<I"),
    ord("C"): _bytes("<B"),
    0x8E: _bytes("<Q"),
    0x96: _bytes("<Q"),
    ord("]"): lambda m: m.push([]),
    ord("a"): _append,
    ord("e"): _appends,
    ord("l"): lambda m: m.push(m.pop_to_mark()),
    ord(")"): _constant(()),
    ord("t"): lambda m: m.push(tuple(m.pop_to_mark())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("}"): lambda m: m.push({}),
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("d"): lambda m: m.push(_pairs(m.pop_to_mark())),
    ord("h"): _get("<B"),
    ord("j"): _get("<I"),
    ord("q"): _put("<B"),
    ord("r"): _put("<I"),
    0x94: _memoize,
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: _new_object,
    ord("b"): _build,
}


def _check_protocol(version: int) -> None:
    if not 2 <= version <= 5:
        raise ValueError(f"protocol {version}")


def _check_frame(m: _Machine, length: int) -> None:
    if length > len(m.data) - m.position:
        raise IndexError("it is truncated")

"""Reads the front of a GGUF file: key-value metadata and tensor descriptions, never tensor data.

Why not `gguf.GGUFReader`: it makes several numpy views per string, which takes 2 s for a vocabulary of 49k tokens and
8 s for one of 152k, and it trusts every count in the file. This reader steps over string arrays (0.05 s and 0.1 s on
the same files) and holds no more than a window of the file. It uses `pread`, not a memory map, since a file that
shrinks under a map kills the process with SIGBUS.

Every count and length is checked against the bytes that are left before it is used, and the whole front part, the
number of keys, tensors and array strings are bounded. So any input ends, soon, in a `GgufFront` or in `GgufInvalid`.
"""

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf

from pools.errors import GgufInvalid, ModelFileUnreadable

Scalar = int | float | bool | str

FRONT_LIMIT_BYTES = 256 * 2**20  # the largest vocabularies in use (262k tokens, 515k merges) take about 16 MiB
STRING_LIMIT_BYTES = 16 * 2**20  # one value; the longest real ones are chat templates of some 10 KB
NAME_LIMIT_BYTES = 2**16 - 1  # the format's own limit for a key
KEY_LIMIT = 2**16
TENSOR_LIMIT = 2**18
ARRAY_STRINGS_LIMIT = 2**23  # in all arrays together; about 2 s of stepping
KEPT_ARRAY_ITEMS = 4096  # longer arrays are vocabularies, of which only the length matters here
WINDOW_BYTES = 2**20

_SCALAR_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 2**62


@dataclass(frozen=True)
class ArrayValue:
    """An array of the metadata: `count` items of GGUF value type `item_type`; `items` is empty unless it is a short
    array of numbers or booleans."""

    item_type: int
    count: int
    items: tuple[int | float | bool, ...]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's description; `offset_bytes` counts from the start of the data section, `size_bytes` is 0 for a
    `type_id` that this version does not know."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int
    size_bytes: int

    @property
    def element_count(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class GgufFront:
    """All of a GGUF file but its tensor data, which begins at `data_start_bytes`; `size_bytes` is the whole file's."""

    version: int
    size_bytes: int
    data_start_bytes: int
    metadata: dict[str, Scalar | ArrayValue]
    tensors: tuple[TensorInfo, ...]


@contextmanager
def open_model_file(path: Path) -> Iterator[int]:
    """Yields a read-only descriptor of a regular file; raises ModelFileUnreadable for anything else.

    Opens without blocking, so that a named pipe is refused and not waited for.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileUnreadable(f"cannot open {path}: {reason}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ModelFileUnreadable(f"{path} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def read_front(path: Path) -> GgufFront:
    """Reads metadata and tensor descriptions of the GGUF file at `path`, in memory bounded by them.

    Raises ModelFileUnreadable if there is no such file, GgufInvalid if it is no complete GGUF: wrong magic, byte order
    or version, truncated (tensor data included), counts or lengths beyond the file, nested arrays, duplicate names.
    """
    with open_model_file(path) as fd:
        try:
            return _Reader(fd).front()
        except GgufInvalid as error:
            raise GgufInvalid(f"{path}: {error.message}") from None
        except OSError as error:
            raise ModelFileUnreadable(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    """A cursor over the file's front part with a window of it in memory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size_bytes = os.fstat(fd).st_size
        self._window = b""
        self._window_start = 0
        self._offset = 0  # inside the window
        self._array_strings_left = ARRAY_STRINGS_LIMIT

    @property
    def position(self) -> int:
        return self._window_start + self._offset

    @property
    def left_bytes(self) -> int:
        return min(self.size_bytes, FRONT_LIMIT_BYTES) - self.position

    def front(self) -> GgufFront:
        version = self._version()
        tensor_count, key_count = self._number("<Q"), self._number("<Q")
        # the smallest key-value pair takes 14 bytes, the smallest tensor description 33
        self._check_count("keys", key_count, min(KEY_LIMIT, self.left_bytes // 14))
        self._check_count("tensors", tensor_count, min(TENSOR_LIMIT, self.left_bytes // 33))
        metadata: dict[str, Scalar | ArrayValue] = {}
        for _ in range(key_count):
            key = self._string(NAME_LIMIT_BYTES)
            if not key or key in metadata:
                raise GgufInvalid(f"empty or duplicate key {key!r}")
            metadata[key] = self._value(key)
        tensors = tuple(self._tensor() for _ in range(tensor_count))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise GgufInvalid(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-self.position // alignment) * alignment
        self._check_tensors(tensors, data_start)
        return GgufFront(version, self.size_bytes, data_start, metadata, tensors)

    def _version(self) -> int:
        magic = self._take(4) if self.left_bytes >= 4 else b""
        if magic != b"GGUF":
            raise GgufInvalid("not a GGUF file (it does not begin with the letters GGUF)")
        version = self._number("<I")
        if version & 0xFFFF == 0 and version:
            raise GgufInvalid("a big-endian GGUF, which engines cannot load here")
        if version not in (2, 3):
            raise GgufInvalid(f"GGUF version {version} is not supported (2 and 3 are)")
        return version

    def _value(self, key: str) -> Scalar | ArrayValue:
        value_type = self._number("<I")
        if value_type == _STRING:
            return self._string(STRING_LIMIT_BYTES)
        if value_type == _ARRAY:
            return self._array(key)
        return self._scalar(key, value_type)

    def _scalar(self, key: str, value_type: int) -> int | float | bool:
        if value_type not in _SCALAR_FORMATS:
            raise GgufInvalid(f"{key} has the unknown value type {value_type}")
        layout = struct.Struct(_SCALAR_FORMATS[value_type])
        value: int | float | bool = layout.unpack(self._take(layout.size))[0]
        return value

    def _array(self, key: str) -> ArrayValue:
        item_type, count = self._number("<I"), self._number("<Q")
        if item_type == _STRING:
            self._check_count(f"strings of {key}", count, min(self._array_strings_left, self.left_bytes // 8))
            self._array_strings_left -= count
            self._skip_strings(count)
            return ArrayValue(item_type, count, ())
        if item_type not in _SCALAR_FORMATS:  # nested arrays are in the format's text, but no loader takes them
            raise GgufInvalid(f"{key} is an array of the unsupported value type {item_type}")
        item_bytes = struct.calcsize(_SCALAR_FORMATS[item_type])
        self._check_count(f"items of {key}", count, self.left_bytes // item_bytes)
        if count > KEPT_ARRAY_ITEMS:
            self._skip(count * item_bytes)
            return ArrayValue(item_type, count, ())
        layout = f"<{count}{_SCALAR_FORMATS[item_type][1:]}"
        return ArrayValue(item_type, count, struct.unpack(layout, self._take(count * item_bytes)))

    def _tensor(self) -> TensorInfo:
        name = self._string(NAME_LIMIT_BYTES)
        dimension_count = self._number("<I")
        if dimension_count > _MAX_DIMENSIONS:
            raise GgufInvalid(f"tensor {name!r} has {dimension_count} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimension_count))
        type_id, offset_bytes = self._number("<I"), self._number("<Q")
        elements = 1
        for extent in shape:
            elements *= extent
        if elements > _MAX_ELEMENTS or max(shape, default=0) > _MAX_ELEMENTS:
            raise GgufInvalid(f"tensor {name!r} has an impossible shape")
        block_elements, block_bytes = _block_layout(type_id)
        if shape and shape[0] % block_elements:
            raise GgufInvalid(f"tensor {name!r} has rows of {shape[0]} elements, not whole blocks of {block_elements}")
        return TensorInfo(name, shape, type_id, offset_bytes, elements // block_elements * block_bytes)

    def _check_tensors(self, tensors: tuple[TensorInfo, ...], data_start: int) -> None:
        seen: set[str] = set()
        for tensor in tensors:
            if tensor.name in seen:
                raise GgufInvalid(f"duplicate tensor {tensor.name!r}")
            seen.add(tensor.name)
            end = data_start + tensor.offset_bytes + tensor.size_bytes
            if end > self.size_bytes:
                missing = end - self.size_bytes
                raise GgufInvalid(f"truncated: tensor {tensor.name!r} ends {missing} bytes beyond the end of the file")

    def _check_count(self, what: str, count: int, limit: int) -> None:
        if count > limit:
            raise GgufInvalid(f"{count} {what} are more than the file can hold or this version reads")

    def _number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _string(self, limit_bytes: int) -> str:
        length = self._number("<Q")
        if length > limit_bytes:
            raise GgufInvalid(f"a string of {length} bytes at byte {self.position} (at most {limit_bytes} are allowed)")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise GgufInvalid(f"a string before byte {self.position} is not UTF-8") from None

    def _skip_strings(self, count: int) -> None:
        """Steps over `count` strings: the loop that decides how long a large vocabulary takes, so it stays inside
        one window as long as it can."""
        unpack_length = _U64.unpack_from
        while count:
            window, offset = self._window, self._offset
            last_start = len(window) - 8
            while count and offset <= last_start:
                end = offset + 8 + unpack_length(window, offset)[0]
                if end > len(window):
                    break
                offset = end
                count -= 1
            self._offset = offset
            if count:
                self._skip(self._number("<Q"))
                count -= 1

    def _skip(self, count_bytes: int) -> None:
        if count_bytes > self.left_bytes:
            raise GgufInvalid(self._beyond(count_bytes))
        target = self._offset + count_bytes
        if target <= len(self._window):
            self._offset = target
        else:
            self._window, self._window_start, self._offset = b"", self._window_start + target, 0

    def _take(self, count_bytes: int) -> bytes:
        if count_bytes > self.left_bytes:
            raise GgufInvalid(self._beyond(count_bytes))
        if self._offset + count_bytes > len(self._window):
            self._load(count_bytes)
        taken = self._window[self._offset : self._offset + count_bytes]
        if len(taken) != count_bytes:  # the file shrank since it was opened
            raise GgufInvalid(self._beyond(count_bytes))
        self._offset += count_bytes
        return taken

    def _load(self, count_bytes: int) -> None:
        start = self.position
        self._window = os.pread(self._fd, max(WINDOW_BYTES, count_bytes), start)
        self._window_start, self._offset = start, 0

    def _beyond(self, count_bytes: int) -> str:
        if self.size_bytes > FRONT_LIMIT_BYTES and self.position + count_bytes <= self.size_bytes:
            return f"the part before the tensor data is larger than {FRONT_LIMIT_BYTES} bytes"
        return f"truncated: {count_bytes} bytes wanted at byte {self.position} of {self.size_bytes}"


def type_name(type_id: int) -> str:
    """Names a tensor type as quantisations are called (`Q4_1`); `type42` for one that this version does not know."""
    try:
        name: str = gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        return f"type{type_id}"
    return name


def _block_layout(type_id: int) -> tuple[int, int]:
    """(elements, bytes) of one block; (1, 0) for an unknown type, whose place in the file then stays unchecked."""
    try:
        layout: tuple[int, int] = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
    except (ValueError, KeyError):
        return 1, 0
    return layout

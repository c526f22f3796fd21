"""Safetensors files between LibTorch and Python's standard library: each side reads what the other wrote."""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile


def bfloat16(value):
    """The upper half of the float: exact for small whole numbers."""
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


# Code of struct, and how a number becomes what struct packs.
CODES = {"F64": ("d", float), "F32": ("f", float), "F16": ("e", float), "BF16": ("H", bfloat16), "I64": ("q", int),
         "I32": ("i", int), "I16": ("h", int), "I8": ("b", int), "U8": ("B", int), "BOOL": ("?", bool)}


def counted(count, dtype):
    return [i % (2 if dtype == "BOOL" else 7) for i in range(count)]


def every_kind():
    """As every_kind() in safetensors_test.cpp: dtype, shape and numbers by name."""
    strided = [4 * row + column for column in (1, 2) for row in range(3)]
    shapes = {"bool": ("BOOL", [5]), "f64": ("F64", [2, 3]), "f32": ("F32", [3, 2, 2]), "f16": ("F16", [3]),
              "bf16": ("BF16", [2, 2]), "i64": ("I64", []), "i32": ("I32", [4]), "i16": ("I16", [3]),
              "i8": ("I8", [3]), "u8": ("U8", [7]), "empty": ("F32", [0, 4]), 'a "name" \n\\ é': ("F32", [2])}
    kinds = {}
    for name, (dtype, shape) in shapes.items():
        count = 1
        for size in shape:
            count *= size
        kinds[name] = (dtype, shape, counted(count, dtype))
    kinds["strided"] = ("F32", [2, 3], [i % 7 for i in strided])
    return kinds


def pack(dtype, numbers):
    code, convert = CODES[dtype]
    return struct.pack(f"<{len(numbers)}{code}", *[convert(n) for n in numbers])


def run_cpp(test, folder):
    program = pathlib.Path(os.environ["SYNCNORM_BIN"]) / "syncnorm_tests"
    environment = dict(os.environ, SYNCNORM_EXCHANGE_FOLDER=str(folder))
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([program, f"--gtest_filter=SafetensorsExchange.{test}"], env=environment, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{test} failed:\n{done.stdout}")


def check_written_by_cpp(folder):
    run_cpp("WritesForPython", folder)
    file = (folder / "from_cpp.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", file[:8])
    assert length % 8 == 0, length
    header = json.loads(file[8:8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    kinds = every_kind()
    assert header.keys() == kinds.keys(), header.keys()
    data = file[8 + length:]
    for name, (dtype, shape, numbers) in kinds.items():
        entry = header[name]
        begin, end = entry["data_offsets"]
        assert (entry["dtype"], entry["shape"]) == (dtype, shape), (name, entry)
        assert data[begin:end] == pack(dtype, numbers), name
        assert begin % struct.calcsize(CODES[dtype][0]) == 0, name


def check_read_by_cpp(folder):
    header, data = {}, b""
    for name, (dtype, shape, numbers) in every_kind().items():
        packed = pack(dtype, numbers)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    header["__metadata__"] = {"by": "python"}
    text = json.dumps(header).encode()
    (folder / "from_python.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    run_cpp("ReadsFromPython", folder)


with tempfile.TemporaryDirectory() as name:
    check_written_by_cpp(pathlib.Path(name))
    check_read_by_cpp(pathlib.Path(name))
print("safetensors files agree in both directions")

"""State dicts between LibTorch and Python: each side reads what the other wrote. Exits with 77 where torch is absent."""

import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
try:
    import torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)


class Code:
    """Something that only executing code from the file could rebuild."""


def network():
    """The network of exchange_network() in state_dict_test.cpp, with Python's own batch norms."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.SyncBatchNorm(3), torch.nn.BatchNorm2d(3, affine=False))
    net.register_buffer("f16", torch.zeros(5, dtype=torch.float16))
    net.register_buffer("bf16", torch.zeros(2, 2, dtype=torch.bfloat16))
    net.register_buffer("f64", torch.zeros(3, dtype=torch.float64))
    net.register_buffer("flags", torch.zeros(4, dtype=torch.bool))
    net.register_buffer("bytes", torch.zeros(4, dtype=torch.uint8))
    net.register_buffer("empty", torch.zeros(0, 4))
    net.register_buffer("scalar", torch.zeros(()))
    net.register_buffer("channels_last", torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    net.register_buffer("part", torch.zeros(10, dtype=torch.int64)[3:7])
    return net


def fill(net):
    """As fill() in state_dict_test.cpp."""
    tensors = [p for _, p in net.named_parameters()] + [b for _, b in net.named_buffers()]
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            tensor.copy_(((torch.arange(tensor.numel()) + index) % 7).view(tensor.shape))
    return net


def run_cpp(test, folder):
    program = pathlib.Path(os.environ["SYNCNORM_BIN"]) / "syncnorm_tests"
    environment = dict(os.environ, SYNCNORM_EXCHANGE_FOLDER=str(folder))
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([program, f"--gtest_filter=StateDictExchange.{test}"], env=environment, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{test} failed:\n{done.stdout}")


def check_written_by_cpp(folder):
    run_cpp("WritesForPython", folder)
    state = torch.load(folder / "from_cpp.pt")  # weights_only, torch.load's default
    net = network()
    net.load_state_dict(state)
    expected = fill(network()).state_dict()
    assert state.keys() == expected.keys(), (state.keys(), expected.keys())
    for key, tensor in state.items():
        assert tensor.dtype == expected[key].dtype, key
        assert torch.equal(tensor, expected[key]), key
        assert torch.equal(net.state_dict()[key], expected[key]), key


def check_read_by_cpp(folder):
    net = fill(network())
    state = net.state_dict()
    torch.save(state, folder / "ordered_dict.pt")
    torch.save(dict(state), folder / "plain_dict.pt")
    torch.save({**state, **dict(net.named_parameters())}, folder / "parameters.pt")
    torch.save({"model": state, "epoch": 3}, folder / "nested.pt")
    torch.save({**state, "epoch": 3}, folder / "number.pt")
    torch.save({"module." + key: tensor for key, tensor in state.items()}, folder / "wrapped.pt")
    torch.save({**state, "code": Code()}, folder / "code.pt")
    torch.save(state, folder / "old_format.pt", _use_new_zipfile_serialization=False)
    run_cpp("ReadsFromPython", folder)


with tempfile.TemporaryDirectory() as name:
    check_written_by_cpp(pathlib.Path(name))
    check_read_by_cpp(pathlib.Path(name))
print("state dicts agree in both directions")

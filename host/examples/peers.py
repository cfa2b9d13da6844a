#!/usr/bin/env python3
"""Times other loaders on a safetensors file: all tensors to one GPU.

    peers.py --make GIB TENSORS FILE     writes a file of that many equal tensors
    peers.py [--loads N] FILE            times every loader that is installed

A rate is the file's size over the time from opening the file to the last byte
on the device, in 10^9 bytes a second, for the last of N loads in a process of
its own (3 by default, so that imports, contexts and caches are warm). Loaders
that are not installed, or fail, are listed with the reason.
"""

import argparse
import json
import os
import subprocess
import sys
import time


def safetensors(path):
    from safetensors.torch import load_file

    return load_file(path, device="cuda")


def fastsafetensors(path):
    from fastsafetensors import fastsafe_open

    with fastsafe_open(path, device="cuda:0", nogds=True) as f:
        return {name: f.get_tensor(name) for name in f.keys()}


def instanttensor(path):
    from instanttensor import safe_open

    with safe_open(path, framework="pt", device=0) as f:
        return dict(f.tensors())


def runai(path):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return {name: tensor.to("cuda") for name, tensor in streamer.get_tensors()}


LOADERS = {f.__name__: f for f in (safetensors, fastsafetensors, instanttensor, runai)}


def time_one(loader, path, loads):
    """Runs in a process of its own; prints seconds as JSON."""
    import torch

    torch.zeros(1, device="cuda")
    seconds = []
    for _ in range(loads):
        torch.cuda.synchronize()
        start = time.perf_counter()
        tensors = LOADERS[loader](path)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        del tensors
        torch.cuda.empty_cache()
    print(json.dumps(seconds))


def make(gib, count, path):
    size = (gib << 30) // count
    header, start = {}, 0
    for i in range(count):
        header[f"t{i:05}"] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    noise = os.urandom(64 << 20)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        left = start
        while left:
            left -= f.write(noise[: min(left, len(noise))])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--make", nargs=2, type=int, metavar=("GIB", "TENSORS"))
    parser.add_argument("--loads", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        return make(*options.make, options.file)
    if options.one:
        return time_one(options.one, options.file, options.loads)
    with open(options.file, "rb") as f:
        while f.read(64 << 20):
            pass
    size = os.path.getsize(options.file)
    for loader in LOADERS:
        command = [sys.executable, __file__, "--one", loader, "--loads", str(options.loads), options.file]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            print(f"{loader:16} no answer within 120 s")
            continue
        if ran.returncode != 0:
            print(f"{loader:16} {(ran.stderr.strip().splitlines() or ['failed'])[-1][:100]}")
            continue
        seconds = json.loads(ran.stdout.strip().splitlines()[-1])
        print(f"{loader:16} first {size / seconds[0] / 1e9:6.2f} GB/s, last {size / seconds[-1] / 1e9:6.2f} GB/s")


if __name__ == "__main__":
    main()

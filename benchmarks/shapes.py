"""Shapes of the paper's models without torch, and the memory of this process: for benchmarks of aggregation."""

import pathlib

import numpy as np

LENET = {
    "conv1.weight": (6, 1, 5, 5),
    "conv1.bias": (6,),
    "conv2.weight": (16, 6, 5, 5),
    "conv2.bias": (16,),
    "fc1.weight": (120, 400),
    "fc1.bias": (120,),
    "fc2.weight": (84, 120),
    "fc2.bias": (84,),
    "fc3.weight": (10, 84),
    "fc3.bias": (10,),
}


def resnet18_shapes(classes=10):
    """Names and shapes of ResNet18's 62 arrays with group normalisation and a 3x3 stem: 11,173,962 parameters."""
    shapes = {"conv1.weight": (64, 3, 3, 3), "norm1.weight": (64,), "norm1.bias": (64,)}
    width = 64
    for layer, out in enumerate((64, 128, 256, 512), 1):
        for block in range(2):
            name = f"layer{layer}.{block}"
            shapes[f"{name}.conv1.weight"] = (out, width, 3, 3)
            shapes[f"{name}.conv2.weight"] = (out, out, 3, 3)
            for norm in ("norm1", "norm2"):
                shapes |= {f"{name}.{norm}.weight": (out,), f"{name}.{norm}.bias": (out,)}
            if width != out:
                shapes[f"{name}.shortcut.0.weight"] = (out, width, 1, 1)
                shapes |= {f"{name}.shortcut.1.weight": (out,), f"{name}.shortcut.1.bias": (out,)}
            width = out
    shapes |= {"fc.weight": (classes, 512), "fc.bias": (classes,)}
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 11_173_962
    return shapes


def memory(what):
    """VmRSS (now) or VmHWM (peak) of this process, MB; `ru_maxrss` would include the peak of its parent."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(what))

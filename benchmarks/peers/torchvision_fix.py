"""Declares the two operators that a torchvision built for CUDA looks for when it is imported beside a CPU torch."""

import torch

_library = torch.library.Library("torchvision", "DEF")
for _name, _inputs in (("nms", "Tensor dets, Tensor scores"), ("qnms", "Tensor dets, Tensor scores")):
    _library.define(f"{_name}({_inputs}, float iou_threshold) -> Tensor")

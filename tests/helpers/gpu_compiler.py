"""Compiles the GPU kernels that a call launches, for an H100 and without one. triton's interpreter is less strict."""

from unittest import mock

import torch

KINDS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


def compile_kernels(call):
    """The compiled kernels of all launches; nothing is launched, so tensors may be on the device "meta"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    launches = []
    with mock.patch.object(JITFunction, "run", lambda self, *args, **options: launches.append((self, args, options))):
        call()
    assert launches
    compiled = []
    for kernel, arguments, options in launches:
        given = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
        signature, constants = {}, {}
        for place, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            signature[parameter.name] = "constexpr" if parameter.is_constexpr else kind_of(value)
            if parameter.is_constexpr:
                constants[(place,)] = value
        source = ASTSource(kernel, signature, constants)
        build = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
        compiled.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=build))
    return compiled


def kind_of(value):
    """The type of an argument, as triton writes it."""
    if isinstance(value, tuple):
        return tuple(kind_of(one) for one in value)
    if isinstance(value, torch.Tensor):
        return KINDS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"

"""Triton kernels compiled for a GPU, which needs none."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rl_kernels.fused import COMPILED


def compiled_for_hopper(
    file: str, name: str, kind_of: Callable[[str], str], constants: Mapping[str, Any], **options: int
) -> Any:
    """The kernel of that name in `rl_kernels.jit.{file}`, as launches compile it. kind_of: from a pointer's argument to
    its type, such as `*bf16`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"rl_kernels.jit.{file}"), name)
    signature, attributes = {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in kernel.do_not_specialize:
            signature[argument] = "i32"
        else:
            signature[argument] = kind_of(argument)
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, **COMPILED})

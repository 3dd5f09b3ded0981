"""Row-invariant operations: the bits of a row never depend on which other rows are computed beside it.

`exact_mode` switches them on around any torch code of this thread; `AttentionPlan` tells attention which tokens of a
padded batch are real. This package imports no sibling.
"""

from rl_kernels.attention import AttentionPlan, attention
from rl_kernels.checkpointing import exact_forward
from rl_kernels.conv import patch_conv
from rl_kernels.linear import linear
from rl_kernels.mode import exact_mode, exact_mode_is_on
from rl_kernels.reduce import row_mean, row_sum

__all__ = [
    "AttentionPlan",
    "attention",
    "exact_forward",
    "exact_mode",
    "exact_mode_is_on",
    "linear",
    "patch_conv",
    "row_mean",
    "row_sum",
]

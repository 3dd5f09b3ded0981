"""Which rank does what: ranks of one half of guidance stand side by side, and share a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_rl.config import ParallelConfig
from engine_control.errors import InvalidRequestError


@dataclass(frozen=True)
class Layout:
    """`sp_degree` ranks share the tokens of a forward; with CFG parallelism two such groups share the guidance."""

    sp_degree: int
    cfg_degree: int

    @property
    def ranks(self) -> int:
        return self.sp_degree * self.cfg_degree


def layout_of(config: ParallelConfig) -> Layout:
    """The layout that a configuration asks for.

    Raises:
        InvalidRequestError: degrees that contradict each other, or ring attention.
    """
    ulysses = config.sp_degree if config.ulysses_degree is None else config.ulysses_degree
    if config.ring_degree != 1:
        raise InvalidRequestError(
            "ring attention merges partial softmaxes, in another order at every degree: it can't keep the bits",
            field="ring_degree",
            value=config.ring_degree,
            hint="Leave it at 1; --sp-degree splits the sequence by heads (Ulysses).",
        )
    for name, value in (("sp_degree", config.sp_degree), ("ulysses_degree", ulysses)):
        if value < 1:
            raise InvalidRequestError("must be at least 1", field=name, value=value, hint="1 is one device.")
    if config.sp_degree not in (1, ulysses):
        raise InvalidRequestError(
            f"sp_degree is ulysses_degree x ring_degree, here {ulysses} x 1",
            field="sp_degree",
            value=config.sp_degree,
            hint="Give --sp-degree alone.",
        )
    return Layout(ulysses, 2 if config.enable_cfg_parallel else 1)


def check_heads(heads: int, layout: Layout) -> None:
    """Refuses a model whose attention heads can't be dealt out evenly."""
    if heads % layout.sp_degree:
        fitting = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise InvalidRequestError(
            f"{heads} attention heads can't be shared by {layout.sp_degree} ranks",
            field="sp_degree",
            value=layout.sp_degree,
            hint=f"Degrees that fit this model: {', '.join(fitting)}.",
        )


def device_of(rank: int, device: str, layout: Layout, *, share_device: bool) -> str:
    """The device of a rank, when rank 0's is `device`: the same CPU, or the GPU that comes `rank` places later.

    Raises:
        InvalidRequestError: there are fewer GPUs than ranks, and they weren't told to share one.
    """
    import torch  # the command line checks a layout without it

    first = torch.device(device)
    if first.type != "cuda" or share_device:
        return device
    index, present = first.index or 0, torch.cuda.device_count()
    if layout.ranks > 1 and index + layout.ranks > present:
        raise InvalidRequestError(
            f"{layout.ranks} ranks from {first.type}:{index} on need as many GPUs, and {present} are present",
            field="sp_degree",
            value=layout.sp_degree,
            hint="Use a smaller degree, or --share-device to check bits (not speed) on one GPU.",
        )
    return f"cuda:{index + rank}" if layout.ranks > 1 else device

"""Which rank does what: ranks that share weights stand side by side, and groups of them share a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_rl.config import ParallelConfig
from engine_control.errors import InvalidRequestError


@dataclass(frozen=True)
class Place:
    """Where a rank stands: in which half of guidance, at which share of the tokens, with which part of the weights."""

    half: int
    share: int
    part: int


@dataclass(frozen=True)
class Layout:
    """`sp_degree` ranks share the tokens of a forward; with CFG parallelism two such groups share the guidance. In
    place of each of these ranks stand `tp_size` that share the weights."""

    sp_degree: int
    cfg_degree: int
    tp_size: int = 1

    @property
    def ranks(self) -> int:
        return self.sp_degree * self.cfg_degree * self.tp_size

    @property
    def splits_forward(self) -> bool:
        """Whether a forward is one of several ranks, which a graph or a compiler can't hold."""
        return self.sp_degree * self.tp_size > 1

    @property
    def field(self) -> tuple[str, object]:
        """The configuration's field that asks for more than one rank, and its value: what a refusal names."""
        if self.tp_size > 1:
            return "tp_size", self.tp_size
        return (
            ("sp_degree", self.sp_degree)
            if self.cfg_degree == 1 or self.sp_degree > 1
            else ("enable_cfg_parallel", True)
        )

    def place(self, rank: int) -> Place:
        others, part = divmod(rank, self.tp_size)
        half, share = divmod(others, self.sp_degree)
        return Place(half, share, part)


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
    for name, value in (("sp_degree", config.sp_degree), ("ulysses_degree", ulysses), ("tp_size", config.tp_size)):
        if value < 1:
            raise InvalidRequestError("must be at least 1", field=name, value=value, hint="1 is one device.")
    if config.sp_degree not in (1, ulysses):
        raise InvalidRequestError(
            f"sp_degree is ulysses_degree x ring_degree, here {ulysses} x 1",
            field="sp_degree",
            value=config.sp_degree,
            hint="Give --sp-degree alone.",
        )
    return Layout(ulysses, 2 if config.enable_cfg_parallel else 1, config.tp_size)


def check_heads(heads: int, layout: Layout) -> None:
    """Refuses a model whose attention heads can't be dealt out evenly."""
    for name, own, others in (("tp_size", layout.tp_size, 1), ("sp_degree", layout.sp_degree, layout.tp_size)):
        if heads % (own * others):
            fitting = [str(n) for n in range(1, heads + 1) if heads % (n * others) == 0]
            raise InvalidRequestError(
                f"{heads} attention heads can't be shared by {own * others} ranks",
                field=name,
                value=own,
                hint=f"Values that fit this model: {', '.join(fitting)}.",
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
        name, value = layout.field
        raise InvalidRequestError(
            f"{layout.ranks} ranks from {first.type}:{index} on need as many GPUs, and {present} are present",
            field=name,
            value=value,
            hint="Use a smaller degree, or --share-device to check bits (not speed) on one GPU.",
        )
    return f"cuda:{index + rank}" if layout.ranks > 1 else device

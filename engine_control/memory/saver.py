"""What an engine gives back while a trainer needs it, under which tag, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine_control.errors import InsufficientMemoryError, InvalidRequestError
from engine_control.memory.backup import Backup, FileBackup, SlabBackup
from engine_control.memory.base import MemoryMechanism, storage_key, storages_of

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Released:
    """What a release did. bytes_freed: free now, for other processes too. tags: those that were active before."""

    bytes_freed: int
    tags: list[str]


@dataclass(frozen=True)
class Resumed:
    """What a resume did. tags: those that were released before. bytes: of their tensors. undefined: the names of those
    whose contents are undefined, since they were dropped without a backup."""

    tags: list[str]
    bytes: int
    undefined: list[str]


@dataclass(frozen=True)
class _Holding:
    tensors: Callable[[], Named]
    discardable: Callable[[str], bool]
    scratch: bool


@dataclass(frozen=True)
class _Asleep:
    """A released tag: its tensors, those of their storages that have a backup, and the names of the others."""

    tensors: list[torch.Tensor]
    saved: list[torch.UntypedStorage]
    undefined: list[str]
    size: int


class MemorySaver:
    """Releases the memory of tags and resumes it. One thread calls it, between two steps.

    Backups of a GPU's memory lie in host memory that is kept from cycle to cycle; those of a CPU's in an unlinked file,
    since a copy in RAM would free nothing.
    """

    def __init__(self, mechanism: MemoryMechanism, *, pinned: bool, backup_folder: str | None = None) -> None:
        """pinned: page-locks the host memory of a GPU's backups. backup_folder: where the files of a CPU's backups go
        (None: the system's folder for temporary files; one in RAM saves nothing)."""
        self._mechanism = mechanism
        self._pinned = pinned
        self._backup_folder = backup_folder
        self._holdings: dict[str, _Holding] = {}
        self._hooks: dict[str, list[Callable[[], object]]] = {}
        self._backups: dict[str, Backup] = {}
        self._asleep: dict[str, _Asleep] = {}

    @property
    def released(self) -> frozenset[str]:
        """The tags that are released at the moment."""
        return frozenset(self._asleep)

    @property
    def tags(self) -> list[str]:
        """All tags, in the order in which they became known."""
        return list(dict.fromkeys([*self._holdings, *self._hooks]))

    def hold(
        self,
        tag: str,
        tensors: Callable[[], Named],
        *,
        discardable: Callable[[str], bool] = lambda name: True,
        scratch: bool = False,
    ) -> None:
        """Afterwards `tag` can be released, and what lies under it now is in memory that can be freed.

        tensors: what lies under the tag, by name; asked again at each release. They must be the modules' own parameters
            and buffers, not detached aliases (`state_dict()` has those), since their `.data` may be replaced. What is
            on another device than the mechanism's, or not strided, is left alone.
        discardable: whether a release without backup may lose that tensor. It is kept if it shares memory with one that
            may not be lost.
        scratch: what lies there matters to nobody after a release, whose hooks see to that: it is never kept, nor
            called undefined.

        Raises:
            InvalidRequestError: the tag is taken, or another tag holds some of the same memory.
        """
        if tag in self._holdings:
            raise InvalidRequestError(f"the tag {tag!r} is held already", field="tag", value=tag)
        self._refuse_shared(tag, self._on_device(tensors()))
        self._holdings[tag] = _Holding(tensors, discardable, scratch)
        self._mechanism.adopt(tag, list(self._on_device(tensors()).values()))

    def on_release(self, tag: str, hook: Callable[[], object]) -> None:
        """Calls `hook` each time before the memory of `tag` goes: whatever is made from it, or cached beside it, must
        go too. A tag with hooks alone is a tag."""
        self._hooks.setdefault(tag, []).append(hook)

    def release(self, tags: Sequence[str], *, backup: bool) -> Released:
        """Frees the memory of `tags`; released ones are no-ops. With `backup` every bit is kept, without it only what
        is not discardable.

        Raises:
            InvalidRequestError: an unknown tag; nothing was released.
            InsufficientMemoryError: there is no room for the backups; nothing was released.
        """
        due = [tag for tag in self._known(tags) if tag not in self._asleep]
        for tag in due:
            for hook in self._hooks.get(tag, []):
                hook()
        self._synchronise()
        asleep: dict[str, _Asleep] = {}
        try:
            for tag in due:
                asleep[tag] = self._save(tag, backup)
        except BaseException:
            for tag in due:
                self._backup(tag).drop()
            raise
        freed = 0
        for tag, contents in asleep.items():
            self._asleep[tag] = contents
            freed += self._mechanism.release(tag, contents.tensors)
        return Released(freed, due)

    def resume(self, tags: Sequence[str]) -> Resumed:
        """Gets the memory of `tags` back, and the contents that have a backup; active ones are no-ops. All or nothing.

        Whether an undefined tensor was filled since is the caller's to know: later releases don't name it again.

        Raises:
            InvalidRequestError: an unknown tag; nothing was resumed.
            InsufficientMemoryError: they don't all fit; none was resumed, backups are still held, and a retry may work.
        """
        due = [tag for tag in self._known(tags) if tag in self._asleep]
        needed = self.needed_bytes(due)
        back: list[str] = []
        try:
            for tag in due:
                self._mechanism.resume(tag, self._asleep[tag].tensors)
                back.append(tag)
            for tag in due:
                if self._asleep[tag].saved:
                    self._backup(tag).restore(self._asleep[tag].saved)
        except BaseException as error:
            self._synchronise()
            for tag in back:
                self._mechanism.release(tag, self._asleep[tag].tensors)
            if isinstance(error, InsufficientMemoryError):
                raise self._does_not_fit(due, needed, error) from error
            raise
        undefined = [name for tag in due for name in self._asleep[tag].undefined]
        for tag in due:
            self._backup(tag).drop()
            del self._asleep[tag]
        return Resumed(due, needed, undefined)

    def needed_bytes(self, tags: Sequence[str]) -> int:
        """What a resume of those tags would take, in bytes of their tensors; active ones take nothing.

        Raises:
            InvalidRequestError: an unknown tag.
        """
        return sum(self._asleep[tag].size for tag in self._known(tags) if tag in self._asleep)

    def close(self) -> None:
        """Gives back the backups' memory and files. What is released by then can't come back with its contents."""
        for backup in self._backups.values():
            backup.close()
        self._backups.clear()

    def _save(self, tag: str, backup: bool) -> _Asleep:
        """Makes the tag ready to go: all that must come back is in its backup afterwards."""
        holding = self._holdings.get(tag)
        if holding is None:
            return _Asleep([], [], [], 0)
        named = self._on_device(holding.tensors())
        self._mechanism.adopt(tag, list(named.values()))
        lost = set() if backup and not holding.scratch else {storage_key(t) for t in named.values()}
        lost -= {storage_key(t) for name, t in named.items() if not holding.discardable(name)}
        saved = storages_of(t for t in named.values() if storage_key(t) not in lost)
        if saved:
            self._backup(tag).save(saved)
        undefined = [n for n, tensor in named.items() if storage_key(tensor) in lost and not holding.scratch]
        size = sum(storage.nbytes() for storage in storages_of(named.values()))
        return _Asleep(list(named.values()), saved, undefined, size)

    def _backup(self, tag: str) -> Backup:
        if tag not in self._backups:
            on_host = self._mechanism.device.type == "cpu"
            self._backups[tag] = FileBackup(self._backup_folder) if on_host else SlabBackup(pinned=self._pinned)
        return self._backups[tag]

    def _on_device(self, named: Named) -> dict[str, torch.Tensor]:
        device = self._mechanism.device
        return {
            name: tensor
            for name, tensor in named.items()
            if tensor.device == device and tensor.layout == torch.strided and tensor.untyped_storage().nbytes()
        }

    def _refuse_shared(self, tag: str, named: Named) -> None:
        mine = {storage_key(tensor): name for name, tensor in named.items()}
        for other, holding in self._holdings.items():
            for name, tensor in holding.tensors().items():
                if storage_key(tensor) in mine:
                    raise InvalidRequestError(
                        f"{mine[storage_key(tensor)]!r} of tag {tag!r} shares memory with {name!r} of tag {other!r}",
                        field="tag",
                        value=tag,
                        hint="Hold tied tensors under one tag.",
                    )

    def _known(self, tags: Iterable[str]) -> list[str]:
        """The tags, each once.

        Raises:
            InvalidRequestError: there is no such tag.
        """
        known = self.tags
        for tag in tags:
            if tag not in known:
                raise InvalidRequestError(
                    f"unknown memory tag {tag!r}", field="tags", value=tag, hint=f"Known: {', '.join(known)}."
                )
        return list(dict.fromkeys(tags))

    def _synchronise(self) -> None:
        if self._mechanism.device.type == "cuda":
            torch.cuda.synchronize(self._mechanism.device)

    def _does_not_fit(self, tags: list[str], needed: int, error: InsufficientMemoryError) -> InsufficientMemoryError:
        device, free = self._mechanism.device, self._mechanism.free_bytes()
        return InsufficientMemoryError(
            f"{needed} bytes are needed to resume {', '.join(tags)}, {free} are free on {device}: {error.message}",
            field="tags",
            value=", ".join(tags),
            hint="Free memory there and resume again: nothing is lost.",
        )

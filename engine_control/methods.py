"""The control calls as methods, with SGLang's names, for engines that run in the caller's own process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from engine_control.refit.backends.direct import direct_info
from engine_control.refit.manifest import manifest_of


class ControlMethods:
    """Mixed into a Python pipeline. Each method runs one command of `engine_control.control` to its end, and raises the
    `EngineError` that it was refused with; then nothing has changed."""

    def control_command(self, name: str, /, **arguments: Any) -> Any:
        """Runs a command by its name and returns its answer."""
        raise NotImplementedError

    def begin_weight_update(self, selector: str = "all", **options: Any) -> dict[str, Any]:
        """Opens a session; see `RefitConductor.begin_weight_update` for the options."""
        answer: dict[str, Any] = self.control_command("begin_weight_update", selector=selector, **options)
        return answer

    def end_weight_update(self, *, weight_version: str | None = None, **options: Any) -> dict[str, Any]:
        """Verifies and commits."""
        answer: dict[str, Any] = self.control_command("end_weight_update", weight_version=weight_version, **options)
        return answer

    def abort_weight_update(self, *, session_id: str | None = None) -> dict[str, Any]:
        """Undoes what came since the begin."""
        answer: dict[str, Any] = self.control_command("abort_weight_update", session_id=session_id)
        return answer

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        module: str | None = None,
        weight_update_mode: str | None = None,
        lora_alpha: float | None = None,
        lora_rank: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Applies tensors of this process within the open session. They are read before this returns. With
        `weight_update_mode="lora_merge"` they are pairs of factors, merged onto the base (`refit.lora`)."""
        lora = {"weight_update_mode": weight_update_mode, "lora_alpha": lora_alpha, "lora_rank": lora_rank}
        return self._update("direct", direct_info(named_tensors, module) | lora, options)

    def unmerge_lora(self, target_modules: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
        """Puts back the base of every weight that a `lora_merge` has changed, bit for bit."""
        modules = None if target_modules is None else list(target_modules)
        answer: dict[str, Any] = self.control_command("unmerge_lora", target_modules=modules, **options)
        return answer

    def load_lora_adapter(self, lora_name: str, lora_path: str, **options: Any) -> dict[str, Any]:
        """Loads a folder that peft has saved as the adapter of that name; see `adapters.AdapterConductor`."""
        answer: dict[str, Any] = self.control_command(
            "load_lora_adapter", lora_name=lora_name, lora_path=lora_path, **options
        )
        return answer

    def load_lora_adapter_from_tensors(
        self, lora_name: str, config_dict: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], **options: Any
    ) -> dict[str, Any]:
        """Loads an adapter from peft's configuration and tensors of this process. They are copied."""
        answer: dict[str, Any] = self.control_command(
            "load_lora_adapter_from_tensors", lora_name=lora_name, config_dict=config_dict, tensors=tensors, **options
        )
        return answer

    def unload_lora_adapter(self, lora_name: str, **options: Any) -> dict[str, Any]:
        """Forgets an adapter."""
        answer: dict[str, Any] = self.control_command("unload_lora_adapter", lora_name=lora_name, **options)
        return answer

    def list_lora_adapters(self) -> dict[str, Any]:
        """Every adapter by its name: version, source, layers, rank, bytes."""
        adapters: dict[str, Any] = self.control_command("list_lora_adapters")
        return adapters

    def update_weights_from_disk(
        self, model_path: str, *, target_modules: Sequence[str] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Applies a checkpoint's tensors, as a session of its own if none is open."""
        modules = None if target_modules is None else list(target_modules)
        info = {"model_path": model_path, "target_modules": modules, "load_format": options.pop("load_format", None)}
        return self._update("disk", info, {"target_modules": modules, **options})

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str = "weight_update_group",
        load_format: str | None = None,
        weight_update_mode: str | None = None,
        lora_alpha: float | None = None,
        lora_rank: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Receives tensors over a process group that `init_weights_update_group` has joined."""
        info = {
            "weight_update_mode": weight_update_mode,
            "lora_alpha": lora_alpha,
            "lora_rank": lora_rank,
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
        }
        return self._update("distributed", info, options)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        *,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> dict[str, Any]:
        """Has every rank join a group in which the trainer is rank 0. Blocks until all are there."""
        info = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        answer: dict[str, Any] = self.control_command("init_weight_transfer", transport="distributed", info=info)
        return answer

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> dict[str, Any]:
        """Leaves the group."""
        answer: dict[str, Any] = self.control_command(
            "shutdown_weight_transfer", transport="distributed", info={"group_name": group_name}
        )
        return answer

    def refit(
        self,
        named_tensors: Mapping[str, torch.Tensor],
        *,
        module: str | None = None,
        weight_version: str | None = None,
        partial: bool = False,
        staged: bool = False,
    ) -> dict[str, Any]:
        """A whole session: all tensors, checked against their manifest, or none."""
        name = module or self.control_command("weight_modules")["main"][0]
        self.begin_weight_update(target_modules=[name], partial=partial, staged=staged)
        try:
            self.update_weights_from_tensor(named_tensors.items(), module=name)
        except BaseException:
            self.abort_weight_update()
            raise
        manifest = manifest_of((name, key, tensor) for key, tensor in named_tensors.items())
        return self.end_weight_update(weight_version=weight_version, manifest=manifest)

    def update_weight_version(self, new_version: str, *, abort_all_requests: bool = False) -> dict[str, Any]:
        """Renames the weights as they are."""
        answer: dict[str, Any] = self.control_command(
            "update_weight_version", new_version=new_version, abort_all_requests=abort_all_requests
        )
        return answer

    def get_weights_checksum(self, module_names: Sequence[str] | None = None) -> dict[str, str]:
        """SHA-256 of each module."""
        names = None if module_names is None else list(module_names)
        sums: dict[str, str] = self.control_command("get_weights_checksum", module_names=names)
        return sums

    def get_weights_by_name(self, name: str, truncate_size: int = 100, *, module: str | None = None) -> Any:
        """The first rows of a weight."""
        return self.control_command("get_weights_by_name", name=name, truncate_size=truncate_size, module=module)

    def pause_generation(self, mode: str = "abort") -> dict[str, Any]:
        """Pauses; see `Pause.pause_generation` for the modes."""
        answer: dict[str, Any] = self.control_command("pause_generation", mode=mode)
        return answer

    def continue_generation(self) -> dict[str, Any]:
        """Goes on."""
        answer: dict[str, Any] = self.control_command("continue_generation")
        return answer

    def flush_cache(self) -> dict[str, Any]:
        """Drops what is cached across requests."""
        answer: dict[str, Any] = self.control_command("flush_cache")
        return answer

    def release_memory_occupation(
        self, tags: Sequence[str] | None = None, *, backup: bool | None = None
    ) -> dict[str, Any]:
        """Gives memory back, by tag."""
        names = None if tags is None else list(tags)
        answer: dict[str, Any] = self.control_command("release_memory_occupation", tags=names, backup=backup)
        return answer

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Gets it again."""
        answer: dict[str, Any] = self.control_command(
            "resume_memory_occupation", tags=None if tags is None else list(tags)
        )
        return answer

    def is_sleeping(self) -> bool:
        """Whether any tag is released."""
        return bool(self.control_command("is_sleeping"))

    def control_state(self) -> dict[str, Any]:
        """Where the engine stands."""
        state: dict[str, Any] = self.control_command("control_state")
        return state

    def _update(self, transport: str, info: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.control_command("update_weights", transport=transport, info=info, **options)
        return answer

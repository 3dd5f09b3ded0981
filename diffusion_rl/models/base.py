"""What a model family owes the engine. A family adapts one diffusers pipeline class; it holds no request state.

The engine calls, for each request: `check_fields`, `size`, `check_size`, `prompt`, `guidance`, `check_prompt`,
`schedule`, and `encode_prompt` (once a prompt), of models that edit pictures `given_pictures` and `encode_pictures` as
well; for each step of a batch: `predict`; for each finished sample: `pictures`.
`replay` calls `predict` again, with the trainer's transformer.
"""

from __future__ import annotations

import inspect
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion_rl.batch import (
    FIRST,
    Conditioning,
    DenoiseBatch,
    Guidance,
    ImageLatents,
    ImageShapes,
    Pictures,
    PromptEmbeds,
    Rows,
    Size,
    size_of,
)
from diffusion_rl.condition_images import read_pictures
from diffusion_rl.models.decoder import Decoding
from diffusion_rl.models.offload import device_of_module
from diffusion_rl.models.prompt_encoding import PromptEncoding
from diffusion_rl.models.runner import Runner, eager
from diffusion_rl.parallel.arrangement import Arrangement
from diffusion_rl.parallel.cfg import combine_guidance, guidance_scales
from diffusion_rl.parallel.sequence import SequenceSpec
from diffusion_rl.parallel.tensor import TensorParallel, TensorPlan
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import CondValue, DenoisingEnv
from diffusion_rl.schedulers import RolloutSchedulerMixin
from engine_control.errors import InvalidRequestError
from rl_kernels import AttentionPlan, exact_forward
from rl_kernels.certify import Certificate
from rl_kernels.mode import EXACT, Choices, exact_mode
from rl_kernels.staging import to_device

SMALLEST_SIGMA = 1e-6  # below it 1 / sigma leaves fp32
DEFAULTS_FILE = "rollout_defaults.json"  # in a checkpoint's folder: defaults that differ from the pipeline class's own


@dataclass(frozen=True)
class Defaults:
    """What a request gets for the fields it leaves out. guidance_scale is that of classifier-free guidance;
    embedded_guidance is None where the transformer takes none; num_frames is for models of videos, image_area for those
    that edit pictures: the pixels that these are scaled to."""

    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    embedded_guidance: float | None = None
    num_frames: int | None = None
    image_area: int | None = None


BlockForwards = Mapping[type[torch.nn.Module], Callable[..., Any]]


class ModelFamily(PromptEncoding):
    """Base of the families; `pipeline_class_name` is the diffusers class that the family serves.

    A size is passed on as `*size`: a family of videos takes `num_frames` behind `height` and `width`.

    `dtype` and `device` are the transformer's when the family was made: move a pipeline before, not after. `choices`
    and `decodes_together` are what certification found on that device, `certificate` its table once it has looked.
    """

    pipeline_class_name: ClassVar[str]
    text_first: ClassVar[bool]  # the order of a joint attention sequence
    max_shift: ClassVar[float] = 1.15  # of dynamic shifting, where the scheduler's configuration names none
    sequence_spec: ClassVar[SequenceSpec]  # where the transformer's tokens may be split over ranks
    tensor_plan: ClassVar[TensorPlan]  # how its weights are
    probe_prompts: ClassVar[tuple[str, str]] = ("a", "a b c")  # of two lengths, as the transformer counts tokens
    limits_guidance: ClassVar[bool] = False  # whether its pipeline has cfg_normalization and cfg_truncation
    most_pictures: ClassVar[int] = 0  # that a request brings, at least one of them; 0: its pipeline takes none
    image_area: ClassVar[int | None] = None  # pixels that the pipeline scales these to
    compiles: ClassVar[bool] = True  # whether its transformer's forward has one shape for torch.compile
    block_forwards: ClassVar[BlockForwards] = {}  # fused forwards, by the class of the transformer's blocks

    def __init__(self, pipeline: Any, defaults_folder: Path | None = None) -> None:
        self.pipeline = pipeline
        for module in pipeline.components.values():
            if isinstance(module, torch.nn.Module):
                module.eval()
        self.choices: Choices = EXACT
        self.certificate: Certificate | None = None
        self.runner: Runner = eager
        self.decoding = Decoding()
        self.tensor: TensorParallel | None = None
        # Asking the module walks all its parameters, which is too slow for every step.
        self.decodes_together: Size | None = None
        self.dtype: torch.dtype = pipeline.transformer.dtype
        self.device: torch.device = device_of_module(pipeline.transformer)
        self.defaults = self._defaults(defaults_folder)

    @property
    def transformer(self) -> torch.nn.Module:
        return self.pipeline.transformer

    @property
    def transformers(self) -> Mapping[str, torch.nn.Module]:
        """Those that compute steps, by their names in the pipeline; all of one architecture."""
        return {FIRST: self.pipeline.transformer}

    def step_transformers(self, timesteps: torch.Tensor) -> tuple[str, ...]:
        """The name of the transformer that computes each of T steps, from their timesteps `[T]` fp32 on the CPU."""
        return (FIRST,) * len(timesteps)

    @property
    def attention_heads(self) -> int:
        """Of each of the transformer's blocks: what ranks deal out."""
        return int(self.pipeline.transformer.config.num_attention_heads)

    @property
    def velocity_dtype(self) -> torch.dtype:
        """Of velocities, and so of an ODE request's states, as in the pipeline."""
        return self.dtype

    @property
    def default_side(self) -> int:
        """Pixels of the pipeline's own default."""
        return int(self.pipeline.default_sample_size * self.pipeline.vae_scale_factor)

    def split_weights(self, ranks: TensorParallel, device: str) -> None:
        """Leaves this rank's part of the transformers' weights, and puts the whole pipeline on `device`. A family that
        is to be split is loaded on the CPU: the device then never holds what isn't its own.

        Raises:
            InvalidRequestError: a width can't be dealt out evenly; nothing has changed.
        """
        from diffusion_rl.parallel.tensor_styles import split_weights  # DTensor takes a second to import

        for transformer in self.transformers.values():
            self.tensor_plan.check(transformer, ranks.size)
        for module in self.pipeline.components.values():
            if isinstance(module, torch.nn.Module):
                if module in self.transformers.values():
                    split_weights(module, self.tensor_plan, ranks, torch.device(device))
                else:
                    module.to(device)
        self.tensor, self.device = ranks, self.pipeline.transformer.device

    @property
    @abstractmethod
    def size_multiple(self) -> int:
        """Height and width must be multiples of this many pixels."""

    @property
    def frame_multiple(self) -> int | None:
        """A video has 1 frame more than a multiple of this many; None for models of pictures."""
        return None

    @abstractmethod
    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latent, as the transformer takes it."""

    @abstractmethod
    def initial_noise_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape in which the initial latent's noise is drawn, before `pack`."""

    def pack(self, noise: torch.Tensor) -> torch.Tensor:
        """`[n, *initial_noise_shape]` as `[n, *latent_shape]`."""
        return noise

    @abstractmethod
    def guidance(self, params: RolloutParams) -> Guidance:
        """How the request is guided, as the pipeline would guide it."""

    def dynamic_shift(self, height: int, width: int) -> float | None:
        """`mu` for schedulers that shift by image size: diffusers' `calculate_shift`, linear in the image's tokens."""
        config = self.pipeline.scheduler.config
        fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        smallest, largest = config.get("base_shift", 0.5), config.get("max_shift", self.max_shift)
        slope = (largest - smallest) / (most - fewest)
        return float(self._image_tokens(height, width) * slope + (smallest - slope * fewest))

    def default_sigmas(self, steps: int) -> list[float] | None:
        """The sigmas that the pipeline hands its scheduler; None when it leaves them to the scheduler."""
        return None

    def predict(
        self,
        batch: DenoiseBatch,
        transformer: torch.nn.Module | None = None,
        *,
        arrangement: Arrangement | None = None,
    ) -> torch.Tensor:
        """The velocity after guidance, `[n, ...]` in `velocity_dtype`, for each sample independently.

        Runs inside `exact_mode`. `transformer` replaces the family's own (a trainer's, with gradients). With an
        arrangement over ranks, every rank makes this call with an equal batch, and each gets the whole result.
        """
        model, arrangement = transformer or self.transformers[batch.transformer], arrangement or Arrangement()
        own = transformer is None and arrangement.capturable and not torch.is_grad_enabled()
        runner = self.runner if own else eager

        def forward(rows: Rows) -> torch.Tensor:
            plan, inputs = self.transformer_inputs(rows)
            with exact_forward(model, plan, self.choices, self.block_forwards), arrangement.sharding(plan):
                return self.velocity(runner(model, plan, inputs), rows)

        positive = _rows(batch, [c.positive for c in batch.conditioning])
        negatives = [c.negative for c in batch.conditioning if c.negative is not None]
        if not negatives:
            return forward(positive)
        return self.combine(*arrangement.guidance(forward, _rows(batch, negatives), positive), batch.conditioning)

    @abstractmethod
    def transformer_inputs(self, rows: Rows) -> tuple[AttentionPlan, dict[str, Any]]:
        """The arguments of the transformer's forward for these rows, and where their true tokens are."""

    def plan_of_call(self, arguments: Mapping[str, Any]) -> AttentionPlan | None:
        """Where the true tokens are in a trainer's call of the transformer; None: its arguments alone don't say it."""
        return None

    def velocity(self, output: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The velocity `[r, ...]` that an output of the transformer for these rows stands for."""
        return output

    def combine(
        self, negative: torch.Tensor, positive: torch.Tensor, conditioning: Sequence[Conditioning]
    ) -> torch.Tensor:
        """The guided velocity `[n, ...]` from those without and with the prompt, by each sample's conditioning."""
        return combine_guidance(negative, positive, guidance_scales(conditioning))

    def pictures(self, latents: torch.Tensor, *size: int) -> torch.Tensor:
        """`decode`, in the way that was chosen for it on this device."""
        return self.decoding(self.decode, latents, *size)

    @abstractmethod
    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The pictures of final latents `[n, ...]`, fp32 `[n, C, H, W]` (videos `[n, C, F, H, W]`) in [0, 1].

        Only at the size that `decodes_together` names does a picture's last bit not depend on n.
        """

    @abstractmethod
    def cond_kwargs(self, prompt: PromptEmbeds, height: int, width: int) -> dict[str, CondValue]:
        """One prompt's arguments of the transformer's forward, on the CPU, in memory of their own."""

    def prompt_from_kwargs(self, kwargs: Mapping[str, Any]) -> PromptEmbeds:
        """`cond_kwargs` undone, on this family's device."""
        pooled = kwargs.get("pooled_projections")
        return PromptEmbeds(
            kwargs["encoder_hidden_states"].to(self.device), None if pooled is None else pooled.to(self.device)
        )

    def denoising_env(self, conditioning: Conditioning, *size: int) -> DenoisingEnv:
        """What the transformer is conditioned on, on the CPU, from which `conditioning_from_env` comes back."""
        negative, image = conditioning.negative, conditioning.image
        shapes: list[list[int]] = [] if image is None else [list(shape) for shape in image.shapes]
        image_kwargs = {} if image is None else {"image_latents": host_copy(image.latents), "image_shapes": shapes}
        return DenoisingEnv(
            pos_cond_kwargs=self.cond_kwargs(conditioning.positive, *size),
            neg_cond_kwargs=None if negative is None else self.cond_kwargs(negative, *size),
            image_kwargs=image_kwargs,
            guidance=conditioning.embedded_guidance,
        )

    def conditioning_from_env(
        self, env: DenoisingEnv, guidance_scale: float, cfg_normalization: float = 0.0
    ) -> Conditioning:
        """`denoising_env` undone, on this family's device."""
        positive = self.prompt_from_kwargs(env.pos_cond_kwargs)
        negative = None if env.neg_cond_kwargs is None else self.prompt_from_kwargs(env.neg_cond_kwargs)
        latents, image = env.image_kwargs.get("image_latents"), None
        if isinstance(latents, torch.Tensor):
            image = ImageLatents(latents.to(self.device), image_shapes(env))
        return Conditioning(positive, negative, guidance_scale, env.guidance, cfg_normalization, image)

    def exact(self) -> AbstractContextManager[None]:
        """The mode that all of this family's arithmetic runs in, for a stock pipeline or code of one's own."""
        return exact_mode(choices=self.choices)

    def check_fields(self, params: RolloutParams) -> None:
        """Refuses fields that this model has no use for."""
        unused: dict[str, object] = {}
        if self.defaults.num_frames is None and params.num_frames not in (None, 1):
            unused["num_frames"] = params.num_frames
        if len(self.transformers) == 1 and params.guidance_scale_2 is not None:
            unused["guidance_scale_2"] = params.guidance_scale_2
        if self.most_pictures == 0 and params.image is not None:
            unused["image"] = "a picture"
        for name in ("cfg_normalization", "cfg_truncation"):
            if not self.limits_guidance and getattr(params, name) is not None:
                unused[name] = getattr(params, name)
        for name, value in unused.items():
            raise InvalidRequestError(
                f"the loaded model has no use for {name}",
                code="unsupported_field",
                field=name,
                value=value,
                hint="Leave it out.",
            )

    def given_pictures(self, params: RolloutParams, *, max_pixels: float = math.inf) -> Pictures | None:
        """Those that the request brings for the model to edit; None: the model takes none.

        Raises:
            InvalidRequestError: there is none, or one can't be used.
            LimitExceededError: one has more than `max_pixels`.
        """
        if self.most_pictures == 0:
            return None
        if params.image is None:
            raise InvalidRequestError(
                "the loaded model edits pictures, and there is none", field="image", hint="Send the picture to edit."
            )
        return read_pictures(params.image, most=self.most_pictures, max_pixels=max_pixels)

    def image_shapes(self, pictures: Pictures) -> ImageShapes:
        """The grids of tokens that `encode_pictures` makes of them; samples that share a forward agree in these."""
        raise NotImplementedError

    def encode_pictures(self, pictures: Pictures) -> ImageLatents:
        """Encodes pictures as the pipeline does, bit for bit, one by one."""
        raise NotImplementedError

    def probe_image(self, size: Size) -> ImageLatents | None:
        """Random numbers in the place of an encoded picture, for a probe of samples of that size."""
        return None

    def size(self, params: RolloutParams) -> Size:
        """What the request asks for, the model's defaults filled in."""
        defaults = self.defaults
        num_frames = None if defaults.num_frames is None else params.num_frames or defaults.num_frames
        return size_of(params.height or defaults.height, params.width or defaults.width, num_frames)

    def check_size(self, height: int, width: int) -> None:
        """Refuses a size that the latent grid can't hold."""
        for name, value in (("height", height), ("width", width)):
            if value % self.size_multiple:
                below = value // self.size_multiple * self.size_multiple
                raise InvalidRequestError(
                    f"must be a multiple of {self.size_multiple}",
                    field=name,
                    value=value,
                    hint=f"Send {max(below, self.size_multiple)} or {below + self.size_multiple}.",
                )

    def scheduler(
        self, step_kind: type[RolloutSchedulerMixin], flow_shift: float | None
    ) -> FlowMatchEulerDiscreteScheduler:
        """A fresh scheduler of the checkpoint's own configuration with the step kind mixed in."""
        name = f"{step_kind.__name__.removesuffix('Mixin')}FlowMatchEulerDiscreteScheduler"
        mixed: Any = type(name, (step_kind, FlowMatchEulerDiscreteScheduler), {})
        shift = (
            {} if flow_shift is None else {"shift": flow_shift, "use_dynamic_shifting": False, "shift_terminal": None}
        )
        return mixed.from_config(self.pipeline.scheduler.config, **shift)

    def schedule(
        self, scheduler: FlowMatchEulerDiscreteScheduler, params: RolloutParams, steps: int, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(sigmas, timesteps)`, each `[T + 1]` fp32 on the CPU and ending with 0, as diffusers computes them."""
        if params.sigmas is not None and params.sigmas[-1] == 0:
            sigmas = torch.tensor(params.sigmas, dtype=torch.float32)
            refuse_bad_grid(sigmas, params)
            return sigmas, sigmas * scheduler.config.num_train_timesteps
        if steps == 1 and scheduler.config.shift_terminal:
            scheduler.register_to_config(shift_terminal=None)  # stretching a single step would divide by zero
        mu = {"mu": self.dynamic_shift(*size)} if scheduler.config.use_dynamic_shifting else {}
        given = list(params.sigmas) if params.sigmas is not None else self.default_sigmas(steps)
        if given is None:
            scheduler.set_timesteps(steps, device="cpu", **mu)
        else:
            scheduler.set_timesteps(sigmas=given, device="cpu", **mu)
        timesteps = scheduler.timesteps.float()
        refuse_bad_grid(scheduler.sigmas, params)
        return scheduler.sigmas.float().cpu(), torch.cat([timesteps, timesteps.new_zeros(1)])

    def _defaults(self, folder: Path | None) -> Defaults:
        """The pipeline's own defaults, and over them those of the checkpoint's folder."""
        call = inspect.signature(self.pipeline.__call__).parameters
        distilled = self.pipeline.transformer.config.get("guidance_embeds", False)
        scale = call["true_cfg_scale"].default if "true_cfg_scale" in call else call["guidance_scale"].default
        values: dict[str, Any] = {
            "height": call["height"].default or self.default_side,
            "width": call["width"].default or self.default_side,
            "num_inference_steps": call["num_inference_steps"].default,
            "guidance_scale": scale,
            "max_sequence_length": call["max_sequence_length"].default,
            "embedded_guidance": call["guidance_scale"].default if distilled else None,
            "num_frames": call["num_frames"].default if "num_frames" in call else None,
            "image_area": self.image_area,
        }
        if folder is not None and (folder / DEFAULTS_FILE).is_file():
            values |= json.loads((folder / DEFAULTS_FILE).read_text())
        return Defaults(**values)

    def _image_tokens(self, height: int, width: int) -> int:
        """Tokens that the transformer makes of a picture of that size."""
        return (height // self.size_multiple) * (width // self.size_multiple)

    def _text_rows(self, rows: Rows) -> tuple[torch.Tensor, AttentionPlan]:
        """Embeddings of all rows of a forward `[rows, longest, D]`, padded at their ends, and the plan over them."""
        lengths = tuple(len(p.prompt_embeds) for p in rows.prompts)
        # Embeddings from outside may have a dtype of their own, which must not be that of the rows beside them.
        embeds = [p.prompt_embeds.to(rows.latents.dtype) for p in rows.prompts]
        padded = torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
        image_tokens = self._image_tokens(*rows.size) + rows.condition_tokens
        plan = AttentionPlan(lengths, padded.shape[1], image_tokens, text_first=self.text_first)
        return padded, plan

    def _pooled_rows(self, rows: Rows) -> torch.Tensor:
        """Pooled embeddings of all rows of a forward `[rows, P]`."""
        return torch.stack([p.pooled.to(rows.latents.dtype) for p in rows.prompts if p.pooled is not None])


def _rows(batch: DenoiseBatch, prompts: list[PromptEmbeds]) -> Rows:
    embedded = [c.embedded_guidance for c in batch.conditioning if c.embedded_guidance is not None]
    guidance = to_device(torch.tensor(embedded, dtype=torch.float32), batch.latents.device) if embedded else None
    size = batch.height, batch.width
    images = tuple(c.image for c in batch.conditioning if c.image is not None)
    return Rows(batch.latents, batch.timesteps, tuple(prompts), *size, guidance, batch.num_frames, images)


def image_shapes(env: DenoisingEnv) -> ImageShapes:
    """Of the pictures that a sample edits, by its denoising environment."""
    found: Any = env.image_kwargs.get("image_shapes", ())
    return tuple((frames, height, width) for frames, height, width in found)


def refuse_bad_grid(sigmas: torch.Tensor, params: RolloutParams) -> None:
    """Refuses a grid that isn't finite and strictly falling, as an extreme shift can make it in fp32."""
    if not sigmas.isfinite().all() or not (sigmas.diff() < 0).all() or sigmas[-2] < SMALLEST_SIGMA:
        raise InvalidRequestError(
            "in fp32 the sigmas don't fall strictly, or come too close to 0",
            field="flow_shift" if params.sigmas is None else "sigmas",
            value=params.flow_shift if params.sigmas is None else list(params.sigmas),
            hint="Use a smaller shift, fewer steps, or a final grid of your own in `sigmas`.",
        )


def uniform_sigmas(steps: int) -> list[float]:
    """From 1 to 1 / steps in equal steps: what most pipelines hand their scheduler."""
    return list(np.linspace(1.0, 1 / steps, steps))


def vae_pictures(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """An `AutoencoderKL`'s pictures `[n, 3, H, W]` fp32 in [0, 1] of latents `[n, C, h, w]`."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    pictures = vae.decode(scaled, return_dict=False)[0].float()
    return (pictures * 0.5 + 0.5).clamp(0, 1)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy that shares no memory with the engine, whatever device the tensor is on."""
    return tensor.detach().to("cpu", copy=True)

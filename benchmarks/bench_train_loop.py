"""Where does the time of a training loop go when trainer and engine have GPUs of their own?

    python -m benchmarks.bench_train_loop --shape sd3.5-medium --size 512 --epochs 3

The loop of `examples/flow_grpo` with its own plan, reward and training step, at a full-size shape with random weights:
the engine in a process of its own (`--layout` says on how many GPUs), the trainer, which trains a LoRA adapter, on the
GPU behind them. Each epoch rolls out groups, rewards the pictures, trains, and refits by broadcast of the merged
weights, verified by digest. Seconds by phase, and the share of the epoch in which each side had nothing to do: one
waits for the other, for the loop is on policy. Ratios are exactly 1.0 in the first epoch, or it fails. `--device cpu`
with a `tiny` shape is for trying it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import measure
from benchmarks.bench_gpu_ranks import attempted, noted, parallel_of
from benchmarks.full_size import SHAPES
from benchmarks.loop_engine import LoopEngine
from benchmarks.rank_refit_sender import LOOPBACK, bucketed
from diffusion_rl.config import EngineConfig
from diffusion_rl.parallel.layout import Layout, device_of, layout_of
from diffusion_rl.shapes import parse
from diffusion_rl.shapes.drawing import PALETTE
from diffusion_rl.training import GroupKey, group_seed
from engine_control.refit.backends.distributed import FLAT, WeightSender
from engine_control.refit.manifest import manifest_of
from examples.flow_grpo.policy import Policy
from examples.flow_grpo.reward import reward_of
from examples.flow_grpo.rollouts import Plan, plan_of
from examples.flow_grpo.settings import Settings
from examples.flow_grpo.update import advantages_of, train

QUESTION = "Where does an epoch's time go when trainer and engine have GPUs of their own?"
LIMIT = (
    "On policy the two sides take turns: an epoch is at least rollout plus training, and the idle shares of both sides "
    "add up to 1 less what both do together (the refit)."
)
REWARDED_SIDE = 64  # the checker's pictures
NEGATIVE = "blurry"
PHASES = ("rollout", "reward", "train", "merge", "refit")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; exits with 1 if it could not be run to its end."""
    arguments = options().parse_args(argv)
    if arguments.device == "cuda":
        arguments.device = "cuda:0"
    report = measure.Report("train_loop", QUESTION, measure.settings_of(arguments), limit=LIMIT)
    failed = attempted(lambda: run_loop(report, arguments))
    if "error" in failed:
        noted(report, arguments, {"case": "the loop", **failed})
    epochs = [row for row in report.results if "seconds" in row]
    for name in (*PHASES, "epoch"):
        if epochs:
            report.ratios[f"{name}: median seconds"] = statistics.median(row["seconds"][name] for row in epochs)
    for side in ("engine", "trainer"):
        if epochs:
            report.ratios[f"{side}: idle share"] = statistics.median(row["idle"][side] for row in epochs)
    report.write(arguments.out)
    measure.print_table(f"{arguments.shape}: a training loop", ["what", ""], list(report.ratios.items()))
    if "error" in failed:
        print(f"WRONG: {failed['error']}")
    return 1 if "error" in failed else 0


def options() -> Any:
    parser = measure.command_line("train_loop", __doc__ or "", repeats=1)
    parser.add_argument("--shape", default="sd3.5-medium", help=f"one of SD3's, of {', '.join(SHAPES)}")
    parser.add_argument("--size", type=int, default=512, help="pixels a side")
    parser.add_argument("--layout", default="sp1", help="of the engine, such as sp2")
    parser.add_argument("--epochs", type=int, default=3, help="the first one warms up, and is not in the medians")
    parser.add_argument("--prompts", type=int, default=4, help="groups an epoch")
    parser.add_argument("--group", type=int, default=8, help="samples a group")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples of a forward and backward")
    parser.add_argument("--lora", type=int, default=32, help="the adapter's rank")
    parser.add_argument("--bucket-mib", type=int, default=1024, help="of a broadcast of the refit")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no epoch is begun after so many seconds")
    return parser


def run_loop(report: measure.Report, arguments: Any) -> None:
    budget = measure.Budget(arguments.budget_s)
    parallel = parallel_of(arguments.layout, share_device=False)
    ranks = layout_of(parallel).ranks
    engine = LoopEngine(EngineConfig(arguments.shape, device=arguments.device, parallel=parallel))
    trainer: Trainer | None = None
    try:
        trainer = Trainer(arguments, device_of(ranks, arguments.device, Layout(ranks + 1, 1), share_device=False))
        about = engine.answer()
        noted(report, arguments, {"case": "the engine", "certified": about["certified"], "ranks": ranks})
        trainer.meet(engine, ranks)
        for epoch in range(1, arguments.epochs + 1):
            if epoch > 1 and not budget.allows(0):
                noted(report, arguments, {"case": f"epoch {epoch} and later", "left_out": "the budget is spent"})
                return
            row = trainer.epoch(engine, epoch)
            warmup = epoch == 1 and arguments.epochs > 1
            noted(report, arguments, {"case": f"epoch {epoch}", **({"warmup": row} if warmup else row)})
    finally:
        engine.close()
        if trainer is not None:
            trainer.close()


class Trainer:
    """The trainer's side: a policy on its device, and a group in which the engine's ranks get its weights."""

    def __init__(self, arguments: Any, device: str) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._size = arguments.size
        self._bucket_bytes = arguments.bucket_mib << 20
        self._settings = Settings(
            epochs=arguments.epochs,
            prompts=arguments.prompts,
            group=arguments.group,
            steps=arguments.steps,
            sde_from=1,
            sde_to=1,
            guidance=4.5,
            micro_batch=arguments.micro_batch,
            lora=arguments.lora,
        )
        self._policy = Policy(self._settings, family=SHAPES[arguments.shape](device))
        self._sender: WeightSender | None = None

    def meet(self, engine: LoopEngine, ranks: int) -> None:
        """Opens the group and has the engine's ranks join it."""
        nccl = self._device.type == "cuda"
        self._sender = WeightSender(
            LOOPBACK,
            world_size=1 + ranks,
            backend="nccl" if nccl else "gloo",
            device=self._device if nccl else None,
        )
        engine.tell_call("init_weight_transfer", transport="distributed", info=self._sender.init_info())
        self._sender.join()
        engine.answer()

    def epoch(self, engine: LoopEngine, number: int) -> dict[str, Any]:
        """One epoch: what its phases took, and what they found."""
        plan = plan_of(self._settings, number)
        at = [measure.now()]
        groups, engine_seconds = engine.roll_out(self._requests(plan))
        at.append(measure.now())
        pictures = [(s.generated_output, s.prompt) for group in groups for s in group if s.generated_output is not None]
        rewards = torch.tensor([rewarded(small(picture), caption) for picture, caption in pictures])
        advantages = advantages_of(self._settings, plan, rewards.view(len(groups), -1))
        at.append(measure.now())
        trained = train(self._policy, self._settings, plan, groups, advantages.to(self._device))
        at.append(measure.now())
        weights = self._policy.engine_weights()
        at.append(measure.now())
        self._refit(engine, weights, str(number))
        at.append(measure.now())
        seconds = {name: at[i + 1] - at[i] for i, name in enumerate(PHASES)}
        whole = at[-1] - at[0]
        return {
            "seconds": {**seconds, "epoch": whole},
            "rollout_seconds_in_engine": engine_seconds,
            "idle": {
                "engine": 1 - (engine_seconds + seconds["refit"]) / whole,
                "trainer": seconds["rollout"] / whole,
            },
            "samples": len(pictures),
            "reward": float(rewards.mean()),
            "gradient_norm": trained.gradient_norms[-1],
            "ratios": trained.ratios,
            "ratios_exactly_one": trained.exactly_one,
            "largest_ratio_gap": trained.largest_gap,
            "refit_bytes": sum(tensor.nbytes for tensor in weights.values()),
        }

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _requests(self, plan: Plan) -> list[dict[str, Any]]:
        fields = {
            "height": self._size,
            "width": self._size,
            "negative_prompt": NEGATIVE,
            "num_outputs_per_prompt": self._settings.group,
            "num_inference_steps": self._settings.steps,
            "guidance_scale": self._settings.guidance,
            "rollout_noise_level": self._settings.noise_level,
            "rollout_sde_step_indices": plan.sde_steps,
            "rollout_return_step_indices": (*plan.sde_steps, plan.sde_steps[-1] + 1),
            "rollout_return_dit_trajectory": True,
            "rollout_return_denoising_env": True,
            "rollout_debug_mode": False,
            "init_same_noise": self._settings.same_noise,
        }
        keys = [GroupKey(run=self._settings.seed, epoch=plan.epoch, prompt=i) for i in range(len(plan.captions))]
        prompts = zip(plan.captions, keys, strict=True)
        return [{**fields, "prompt": caption, "seed": group_seed(key)} for caption, key in prompts]

    def _refit(self, engine: LoopEngine, weights: dict[str, torch.Tensor], version: str) -> None:
        assert self._sender is not None
        manifest = manifest_of(("transformer", name, tensor) for name, tensor in weights.items())
        engine.call("begin_weight_update", target_modules=["transformer"])
        for bucket in bucketed(list(weights.items()), self._bucket_bytes):
            info = {**self._sender.announce(bucket, load_format=FLAT), "target_modules": ["transformer"]}
            engine.tell_call("update_weights", transport="distributed", info=info, flush_cache=False)
            self._sender.send(bucket, load_format=FLAT)
            engine.answer()
        engine.call("end_weight_update", manifest=manifest, weight_version=version)


def small(picture: torch.Tensor) -> torch.Tensor:
    """A picture `[3, H, W]` at the checker's size."""
    return F.interpolate(picture[None], size=(REWARDED_SIDE, REWARDED_SIDE), mode="area")[0]


def rewarded(picture: torch.Tensor, caption: str) -> float:
    """The example's reward, and how near the picture's mean colour is to the background that was asked for: pictures of
    random weights have little else to be told apart by."""
    background = torch.tensor(PALETTE[parse(caption).background]) / 255
    return reward_of(picture, caption).value + 1 - float((picture.mean((1, 2)) - background).abs().mean())


if __name__ == "__main__":
    sys.exit(main())

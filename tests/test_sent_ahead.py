"""Tensors that travel before the message that holds them."""

from __future__ import annotations

import socket
import subprocess

import msgspec
import pytest
import torch

from diffusion_rl.config import EngineConfig
from diffusion_rl.params import RolloutParams
from engine_control.child import start_child
from engine_control.config import engine_environment
from engine_control.wire import WireError, frame, receive_message, send_message
from engine_control.worker import Add, Ahead, Ready, Reply


def test_a_message_refers_to_tensors_that_the_peer_has() -> None:
    one, other = socket.socketpair()
    with one, other:
        sent, new = torch.arange(5.0), torch.ones(2)
        there = torch.arange(5.0)
        send_message(one, {"a": sent, "b": [new, sent]}, earlier={7: sent})
        message = receive_message(other, earlier={7: there})
        assert message["a"] is there
        assert message["b"][1] is there
        assert torch.equal(message["b"][0], new)
        send_message(one, sent, earlier={8: sent})
        with pytest.raises(WireError, match="extension 2"):
            receive_message(other, earlier={7: there})


def test_samples_reach_the_service_as_they_finish_and_the_reply_names_them() -> None:
    environment = engine_environment(1)
    process, connection = start_child("diffusion_rl.server.worker", environment, stdin=subprocess.PIPE)
    with process, connection:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(EngineConfig(device="cpu")))
        process.stdin.close()
        assert isinstance(msgspec.convert(receive_message(connection), Ready), Ready)
        params = RolloutParams(
            "cat", seed=1, num_outputs_per_prompt=3, num_inference_steps=2, rollout_return_dit_trajectory=True
        )
        send_message(connection, Add(1, "one", params))
        ahead: dict[int, torch.Tensor] = {}
        parts = 0
        while True:
            message = msgspec.convert(receive_message(connection, earlier=ahead), Ahead | Reply)
            if isinstance(message, Reply):
                break
            parts += 1
            ahead |= message.numbered()
        process.kill()
    assert parts == 3
    assert message.error is None
    for index, sample in enumerate(message.result):
        assert sample["sample_index"] == index
        assert any(sample["generated_output"] is tensor for tensor in ahead.values())
        assert any(sample["dit_trajectory"]["latents"] is tensor for tensor in ahead.values())
    own = sum(part.nbytes for part in frame(message, earlier=ahead))
    assert own < sum(tensor.nbytes for tensor in ahead.values()) / 10

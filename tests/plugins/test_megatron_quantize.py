"""Megatron ranks that publish block-scaled FP8: the bits of the oracle's full tensors, quantised.

Run as a module, this file is one such rank. Blocks are small and divide nothing, so that most straddle ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from awex_core.meta.server import MetaServer
from tests.support.families import tiny_models
from tests.support.kernels.fp8_reference import quantize_reference
from tests.support.trainers.trainer import ROOT, Trainer, TrainerSpec, join_ranks, run_ranks

TOKEN = "test-token"
BLOCK = (48, 80)
STEPS = (1, 2)


def rank_main(folder: Path) -> None:
    import megatron_awex

    join_ranks()
    spec = TrainerSpec.of_kind("qwen3", layout="tp=2", dtype="bfloat16")
    trainer = Trainer(spec)
    config = json.loads((folder / "template" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    sync = megatron_awex.attach(trainer.chunks, trainer.optimizer, hf_config=config, quantize="fp8_block")
    for step in STEPS:
        trainer.train_step()
        sync.write_weights(step)  # to no engine; what an engine would read lies in the writer's memory
        trainer.dump_raw(folder / str(step))
        save_published(sync.writer, folder / str(step))
    sync.close()
    trainer.close()


def save_published(writer: Any, folder: Path) -> None:
    boxes, views = [], {}
    for row, shard in enumerate(writer.layout.shards()):
        dtype = getattr(torch, shard.dtype)
        view = writer.memory.view(shard.buffer, shard.offset, shard.extent, shard.stride, dtype)
        views[str(row)] = view.clone().contiguous()
        boxes.append((shard.tensor.name, shard.tensor.shape, shard.start))
    save_file(views, folder / f"published{dist.get_rank()}.safetensors")
    (folder / f"published{dist.get_rank()}.json").write_text(json.dumps(boxes))


def published(folder: Path) -> dict[str, torch.Tensor]:
    """What both ranks publish, put together."""
    whole: dict[str, torch.Tensor] = {}
    for rank in range(2):
        views = load_file(folder / f"published{rank}.safetensors")
        for row, (name, shape, start) in enumerate(json.loads((folder / f"published{rank}.json").read_text())):
            view = views[str(row)]
            into = whole.setdefault(name, torch.full(shape, float("nan")).to(view.dtype))
            into[tuple(slice(s, s + size) for s, size in zip(start, view.shape, strict=True))] = view
    return whole


@pytest.mark.timeout(240)
def test_two_ranks_publish_the_bits_of_the_full_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.make_model(tmp_path / "template", "qwen3")
    with MetaServer(TOKEN, lease_s=20) as server:
        monkeypatch.setenv("AWEX_META_SERVER", server.address)
        monkeypatch.setenv("AWEX_TOKEN", TOKEN)
        run_ranks("tests.plugins.test_megatron_quantize", 2, [str(tmp_path)], limit_s=120)
    for step in STEPS:
        folder = tmp_path / str(step)
        oracle = ["tests/oracle/megatron_to_hf.py", str(folder), str(folder / "hf"), "--template"]
        command = [sys.executable, *oracle, str(tmp_path / "template")]
        subprocess.run(command, cwd=ROOT, check=True, timeout=60)
        expected = {}
        for file in (folder / "hf").glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                expected[name] = tensor
                if name.endswith("_proj.weight"):
                    expected[name], expected[name + "_scale_inv"] = quantize_reference(tensor, BLOCK)
        found = published(folder)
        assert set(found) == set(expected) and sum(name.endswith("_scale_inv") for name in found) == 4 * 7
        for name, tensor in expected.items():
            assert tensor.dtype == found[name].dtype, name
            assert torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8)), name


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))

"""Tiny configurations of public model families, as data in ``public_families.json``: odd features kept, sizes small.

    python -m tests.support.public_families OUT_DIR --kind falcon-h1 --seed 1

Each is what ``transformers.AutoConfig.for_model`` takes, and whether the model is
a causal one or one of images and text. Imports neither torch nor an engine until
a checkpoint is made.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Public:
    """A family: its model type, the class of transformers that makes it, and its configuration."""

    model_type: str
    auto: str
    fields: dict[str, Any]


PUBLIC = {name: Public(**entry) for name, entry in json.loads(_FILE.read_text()).items()}


def make_public(out: Path | str, kind: str, *, dtype: str = "bfloat16", seed: int = 0, **sizes: Any) -> Path:
    """Write a checkpoint, as ``tiny_models.make_model`` does; every number in it depends on the seed."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from tests.support.tiny_models import byte_tokenizer

    torch.manual_seed(seed)
    family = PUBLIC[kind]
    config = AutoConfig.for_model(family.model_type, **family.fields, **sizes)
    auto = {"causal": AutoModelForCausalLM, "image": AutoModelForImageTextToText}[family.auto]
    path = Path(out)
    auto.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    file = path / "model.safetensors"
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point():  # what an initialiser makes uniform would hide a tensor in the wrong place
            tensors[name] = (tensor.float() + 0.1 * torch.randn(tensor.shape, generator=random)).to(tensor.dtype)
    save_file(tensors, file, {"format": "pt"})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=sorted(PUBLIC), required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_public(args.out, args.kind, seed=args.seed))


if __name__ == "__main__":
    main()

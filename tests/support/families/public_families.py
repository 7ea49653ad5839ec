"""Tiny configurations of public model families, as data in ``public_families.json``: odd features kept, sizes small.

    python -m tests.support.families.public_families OUT_DIR --kind falcon-h1 --seed 1

Each is what ``transformers.AutoConfig.for_model`` takes, and whether the model is
a causal one or one of images and text. Published checkpoints differ from what
transformers writes in some fields of ``config.json`` and in some names, which
engines read: these are given too. Imports neither torch nor an engine until a
checkpoint is made.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Public:
    """A family: its model type, the class of transformers that makes it, and its configuration.

    ``published`` is what the published ``config.json`` has besides, or has not (null); ``renamed`` which parts of
    tensors' names are others in the published checkpoint, ``transposed`` the ends of names of tensors that it has
    the other way.
    """

    model_type: str
    auto: str
    fields: dict[str, Any]
    published: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()

    def as_published(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """A tensor as the published checkpoint has it."""
        turned = tensor.mT.contiguous() if name.endswith(self.transposed) else tensor
        for ours, theirs in self.renamed.items():
            name = name.replace(ours, theirs)
        return name, turned


PUBLIC = {
    name: Public(**entry | {"transposed": tuple(entry.get("transposed", ()))})
    for name, entry in json.loads(_FILE.read_text()).items()
}


def make_public(out: Path | str, kind: str, *, dtype: str = "bfloat16", seed: int = 0, **sizes: Any) -> Path:
    """Write a checkpoint, as ``tiny_models.make_model`` does; every number in it depends on the seed."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from tests.support.families.tiny_models import byte_tokenizer

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
    save_file(dict(family.as_published(*named) for named in tensors.items()), file, {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(_merged(written, family.published), indent=1))
    return path


def _merged(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Fields of a configuration with more, also of the configurations in it; without those that are None there."""
    inner = {name: _merged(fields[name], value) for name, value in more.items() if isinstance(value, dict)}
    absent = {name for name, value in more.items() if value is None}
    return {name: value for name, value in (fields | more | inner).items() if name not in absent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=sorted(PUBLIC), required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_public(args.out, args.kind, seed=args.seed))


if __name__ == "__main__":
    main()

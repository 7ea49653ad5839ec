"""What differs between releases of vLLM, tried on the installed one made to do as the other does."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import engine_env
from tests.support.warm import run_to_end

pytestmark = pytest.mark.timeout(240)

REGISTERED_ANEW = """
import torch
from vllm.model_executor.model_loader.reload import meta, record_metadata_for_reloading
from vllm_awex import compat

class Rotary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.ones(4), persistent=False)
        self.register_buffer("scale", torch.ones(1))

def restore(layer, info, original=meta.restore_layer_on_meta):
    original(layer, info)
    for name, buffer in list(layer._buffers.items()):  # vLLM 0.25.1 forgets that some are not persistent
        layer.register_buffer(name, buffer)

meta.restore_layer_on_meta = restore
model = torch.nn.Sequential(Rotary())
record_metadata_for_reloading(model)
with compat.checkpoint_format(model):
    assert model.state_dict().keys() == {"0.cos_sin_cache", "0.scale"}
print(sorted(model.state_dict()))
"""


def test_tracing_leaves_buffers_as_persistent_as_they_were() -> None:
    """One that is not persistent has no place in a checkpoint, and is not demanded of the trainer."""
    done = run_to_end([sys.executable, "-c", REGISTERED_ANEW], engine_env(1), limit_s=200)
    assert done.returncode == 0 and "['0.scale']" in done.stdout, done.stderr[-2000:]

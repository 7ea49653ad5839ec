"""What differs between releases of vLLM, tried on the installed one made to do as the other does."""

from __future__ import annotations

import sys

import pytest

from tests.support.engines.jobs import engine_env
from tests.support.processes.warm import run_to_end

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


CACHED = """
import torch
from vllm_awex import compat

class Attention(torch.nn.Linear):
    pass

one, two = Attention(2, 2), Attention(2, 2)
cache = torch.empty(64)
one.kv_cache, two.kv_cache = cache[:32], [(cache[32:48], torch.empty(8))]
one.view_of_cache, one.scale = cache.view(8, 8), torch.ones(1)
found = {tensor.data_ptr() for tensor in compat.all_tensors(torch.nn.Sequential(one, two))}
assert found == {t.data_ptr() for t in (one.weight, one.bias, two.weight, two.bias, one.scale)}
print("weights only")
"""


def test_key_value_caches_are_not_looked_at_with_the_weights() -> None:
    """They change with every token, and reading one that sleeps while the weights are awake ends the process."""
    done = run_to_end([sys.executable, "-c", CACHED], engine_env(1), limit_s=200)
    assert done.returncode == 0 and "weights only" in done.stdout, done.stderr[-2000:]

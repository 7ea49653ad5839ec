"""What a run of SGLang's own loader leaves behind in a model that serves."""

from __future__ import annotations

import pytest

from tests.support.engines.sglang_jobs import BIN, sglang_env
from tests.support.processes.warm import run_to_end

pytestmark = pytest.mark.timeout(240)

BOUND_ANEW = """
import torch
from awex_core.errors import PlanError
from sglang_awex import compat

model = torch.nn.Sequential(torch.nn.Linear(2, 2))
attention = model[0]
attention.w_kc, attention.table = torch.ones(2), torch.ones(2)
derived, table = attention.w_kc, attention.table
with compat.keeping_tensors(model):
    attention.w_kc, attention.w_vc = torch.zeros(2), torch.zeros(2)
assert attention.w_kc is derived and not hasattr(attention, "w_vc")
try:
    with compat.keeping_tensors(model):
        attention.table = torch.zeros(2)
except PlanError as error:
    assert attention.table is table
    print("refused:", error)
"""


def test_what_a_loader_derives_stays_where_graphs_read_it() -> None:
    """The end of an update derives it again, in place; what nothing derives again is refused by name."""
    done = run_to_end([str(BIN / "python"), "-c", BOUND_ANEW], sglang_env(1), limit_s=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused:" in done.stdout and "0.table" in done.stdout and "w_kc" not in done.stdout

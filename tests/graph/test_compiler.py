"""PyTorch's compiler is not loaded where nothing is compiled, and is there, whole, where it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAMS = {
    "optimizers do without": """
with without_compiler():
    weight = torch.nn.Parameter(torch.ones(2))
    for optimizer in (torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight])):
        weight.grad = torch.ones(2)
        optimizer.step()
    assert "torch._dynamo.convert_frame" not in sys.modules
assert not any(name.startswith("torch._dynamo") for name in sys.modules), "something is left behind"
assert not isinstance(torch._dynamo, compiler._StandIn)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
""",
    "it gives way to a name": """
with without_compiler():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
    assert not isinstance(sys.modules["torch._dynamo"], compiler._StandIn)
marked = [cell.cell_contents for cell in torch.optim.Optimizer.add_param_group.__closure__]
assert not any(hasattr(function, "__dynamo_disable") for function in marked)
""",
    "it gives way to a part": """
with without_compiler():
    import torch._dynamo.utils as part
    assert part is sys.modules["torch._dynamo.utils"] is torch._dynamo.utils
""",
    "it gives way to a mark of another package": """
with without_compiler():
    marked = torch._dynamo.disable(lambda x: x)
    assert not isinstance(sys.modules["torch._dynamo"], compiler._StandIn)
assert torch.compile(marked, backend="eager", fullgraph=False)(torch.ones(1)) == 1
assert getattr(marked, "_torchdynamo_disable", False)
""",
    "a process leaves it out": """
compiler.leave_out_compiler()
torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
assert "torch._dynamo.convert_frame" not in sys.modules
with without_compiler():
    pass
assert isinstance(sys.modules["torch._dynamo"], compiler._StandIn)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiler_is_left_out_until_it_is_needed(name: str) -> None:
    head = "import sys\nimport torch\nfrom manyhands.graph import compiler\n"
    head += "from manyhands.graph.compiler import without_compiler\n"
    done = subprocess.run(
        [sys.executable, "-c", head + PROGRAMS[name]], capture_output=True, text=True, timeout=120, check=False
    )
    assert not done.returncode, done.stderr


def test_garbage_is_collected_again_after_loading() -> None:
    import gc

    from manyhands.graph.compiler import without_collecting

    assert gc.isenabled()
    with without_collecting():
        assert not gc.isenabled()
    assert gc.isenabled()

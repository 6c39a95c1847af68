"""Arrays that Numba frees while a kernel still uses their address, which no run of a kernel shows reliably."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
ALLOCATIONS = ("empty", "zeros", "full", "ones")


def freed_too_early(code: str) -> list[str]:
    """Arrays of a kernel's own that are never named after their address was kept: Numba frees an array after the
    last use of its name, and what is reached by address is no use."""
    found = []
    for function in ast.walk(ast.parse(code)):
        if not isinstance(function, ast.FunctionDef) or not any(
            "njit" in ast.dump(decorator) for decorator in function.decorator_list
        ):
            continue
        parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        own, kept, named = set(), {}, {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                call = node.value.func
                if isinstance(call, ast.Attribute) and call.attr in ALLOCATIONS:
                    own.update(target.id for target in node.targets if isinstance(target, ast.Name))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                parent = parents[node]
                if isinstance(parent, ast.Attribute) and parent.attr == "ctypes":
                    above: list[ast.AST] = [node]
                    while above[-1] is not function:
                        above.append(parents[above[-1]])
                    statement = next(one for one in above if isinstance(one, ast.stmt))
                    again = any(isinstance(one, ast.For | ast.While) for one in above)  # named in each round
                    if isinstance(statement, ast.Assign) and not again:
                        kept[node.id] = max(kept.get(node.id, 0), node.lineno)
                else:
                    named[node.id] = max(named.get(node.id, 0), node.lineno)
        found += [f"{function.name}: {name}" for name in own & set(kept) if named.get(name, 0) <= kept[name]]
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_kernels_keep_references_to_arrays_in_use(path):
    assert freed_too_early(path.read_text()) == []


def test_the_check_detects_the_mistake():
    code = """
@njit(cache=True)
def kernel(count):
    room = np.empty(count, dtype=np.int64)
    at = i64_at(room.ctypes.data)
    for n in range(count):
        at[n] = n
"""
    assert freed_too_early(code) == ["kernel: room"]
    assert freed_too_early(code + "    room[0] = 0\n") == []

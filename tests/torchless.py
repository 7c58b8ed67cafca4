"""Where torch cannot be had, every test that needs none runs; the others are skipped, each with its reason.

A module that cannot be imported for want of torch or Lightning is skipped whole. A test that comes to need torch only
as it runs is marked `torch`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

OF_TORCH = ("torch", "lightning", "torchmetrics")
"""What is installed together, or not at all."""
HAS_TORCH = all(find_spec(name) for name in OF_TORCH)


class Module(pytest.Module):
    """A module of tests, skipped if what it imports is torch's and is not there."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Import it, and find its tests."""
        try:
            return super().collect()
        except self.CollectError as error:
            missing = (getattr(error.__cause__, "name", None) or "").partition(".")[0]
            if missing in OF_TORCH:
                pytest.skip(f"imports {missing}", allow_module_level=True)
            raise


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "torch: needs torch as it runs")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HAS_TORCH else Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in () if HAS_TORCH else items:
        if item.get_closest_marker("torch"):
            item.add_marker(pytest.mark.skip(reason="needs torch as it runs"))

"""What is published: a missing extra names itself, the README stands alone, the archives hold what they should.

The archives are those in the folder that `SHARDQUEUE_DIST` names, which `.ci/publish` builds.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shardqueue
from shardqueue import open_mailbox
from shardqueue.errors import InvalidInputError, MailboxRefusedError
from shardqueue.timeline import picture

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardqueue"
with (ROOT / "pyproject.toml").open("rb") as file:
    PROJECT: dict[str, Any] = tomllib.load(file)["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


# -- without an extra ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "client", "module", "extra"),
    [("gs://bucket/queue", "gcsfs", "gcs", "gcs"), ("az://bucket/queue", "adlfs", "azure", "azure")],
)
def test_a_store_whose_client_is_missing_names_the_extra(
    url: str, client: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, client, None)
    monkeypatch.delitem(sys.modules, f"shardqueue.mailbox.{module}", raising=False)
    assert client in str(EXTRAS[extra])
    with pytest.raises(MailboxRefusedError, match=rf"{client}.*pip install 'shardqueue\[{extra}\]'"):
        open_mailbox(url)


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "can_draw", lambda: False)
    assert "matplotlib" in str(EXTRAS["plots"])
    with pytest.raises(InvalidInputError, match=r"pip install \"shardqueue\[plots\]\""):
        picture.check(Path("timeline.png"))


@pytest.mark.parametrize(("client", "module"), [("gcsfs", "gcs"), ("adlfs", "azure")])
def test_an_extra_asks_for_what_the_code_asks_for(client: str, module: str) -> None:
    text = (PACKAGE / "mailbox" / f"{module}.py").read_text()
    floors = re.findall(rf'require_version\("{client}", .*, "([\d.]+)", "{module}"\)', text)
    assert EXTRAS[module] == [f"{client}>={floor}" for floor in floors]


# -- the README, as an index of packages shows it --------------------------------------------------------


def relative_links(text: str) -> list[str]:
    """Links and pictures that lead nowhere but in the repository."""
    found = re.findall(
        r"\]\(([^)\s]+)|(?:src|href)=\"([^\"]+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )
    links = [one or other for one, other in found]
    return [link for link in links if not link.startswith(("#", "https://", "mailto:"))]


def test_the_readme_has_no_link_into_the_repository() -> None:
    assert relative_links((ROOT / "README.md").read_text(encoding="utf-8")) == []


def test_such_a_link_is_seen() -> None:
    text = 'A [design](docs/design/001.md), [here](#here), <img src="a.png">.\n```python\n[x](y)\n```\n'
    assert relative_links(text) == ["docs/design/001.md", "a.png"]


# -- the archives ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dist() -> Path:
    if "SHARDQUEUE_DIST" not in os.environ:
        pytest.skip("no archives: .ci/publish builds them")
    return Path(os.environ["SHARDQUEUE_DIST"])


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def sources(folder: Path) -> Iterable[str]:
    """The files of the package in the checkout."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder.parent).as_posix()


@pytest.mark.full
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read(f"shardqueue-{shardqueue.__version__}.dist-info/METADATA").decode()
    inside = [
        name for name in names if not name.startswith(f"shardqueue-{shardqueue.__version__}.dist-info/")
    ]
    assert sorted(inside) == sorted(sources(PACKAGE))
    assert "shardqueue/py.typed" in inside
    ends = {Path(name).suffix for name in inside}
    assert ends <= {".py", ".typed", ".html", ".css", ".js"}
    metadata = Parser().parsestr(text)
    assert metadata["Version"] == PROJECT["version"] == shardqueue.__version__
    assert metadata["License-Expression"] == "MIT"
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra", [])) == set(EXTRAS)
    assert len(metadata.get_all("Requires-Dist", [])) == len(PROJECT["dependencies"]) + sum(
        map(len, EXTRAS.values())
    )


@pytest.mark.full
def test_the_sdist_holds_what_its_tests_need_and_nothing_else(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {name.split("/")[0] for name in names}
    expected = {"shardqueue", "tests", "benchmarks", "notebooks", "docs"}
    expected |= {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert tops == expected
    assert {f"tests/{Path(__file__).name}", *sources(PACKAGE)} <= set(names)
    ends = {Path(name).suffix for name in names}
    assert ends <= {
        ".py",
        ".typed",
        ".html",
        ".css",
        ".js",
        ".md",
        ".toml",
        ".jinja2",
        ".ipynb",
        ".svg",
        ".png",
        "",
    }


@pytest.mark.full
def test_the_public_names_are_typed_completely(dist: Path) -> None:
    """By Pyright: every public name's type is written down, and so is that of all it leads to."""
    report = json.loads((dist / "types.json").read_text())["typeCompleteness"]
    assert report["exportedSymbolCounts"]["withUnknownType"] == 0
    public = {
        *(f"shardqueue.{name}" for name in shardqueue.__all__),
        *(f"shardqueue.{home}.{name}" for home, names in LEADING.items() for name in names),
    }
    symbols = {symbol["name"]: symbol for symbol in report["symbols"] if symbol["isExported"]}
    assert public <= set(symbols)
    roots = {*public, *(home_of(name) for name in shardqueue.__all__), "shardqueue.errors"}
    unclear = [
        name
        for name, symbol in symbols.items()
        if any(name == root or name.startswith(f"{root}.") for root in roots)
        and (symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"])
    ]
    assert unclear == []


LEADING = {
    "lightning": ("ElasticStrategy", "SharedQueueDataModule", "SharedQueueCallback"),
    "elastic": ("Elastic", "ElasticStep"),
    "simulate": ("Node", "Outcome", "simulate"),
}
"""Public names beside those of the package itself."""


def home_of(name: str) -> str:
    """Where a public name is written."""
    value = getattr(shardqueue, name)
    return f"{value.__module__}.{name}"

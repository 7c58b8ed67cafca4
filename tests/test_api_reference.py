"""The API reference: it builds without a warning, leaves out no public name, and says what the code says."""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from shardqueue import errors
from shardqueue.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

BUILD = Path(__file__).parents[1] / "docs" / "api" / "build.py"
MADE_BY_THE_LIBRARY = {"Chosen", "ElasticStep", "Mailbox", "SharedQueue", "Step", "Wrapper"}
SECTION = re.compile(r"^(\w+):\n((?:[ ]{4}.*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)


def entries(text: str, section: str) -> list[str]:
    """What a section of a docstring in Google's style describes: `Args`, `Raises`, `Attributes`."""
    bodies = [body for name, body in SECTION.findall(f"{text}\n") if name == section]
    return [
        name.lstrip("*") for body in bodies for names in ENTRY.findall(body) for name in names.split(", ")
    ]


class Public(NamedTuple):
    """Something people are shown."""

    name: str
    text: str
    parameters: tuple[str, ...]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    pytest.importorskip("pdoc", reason="pip install 'shardqueue[docs]'")
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("docs_api_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(module: ModuleType) -> list[str]:
    """The public names of a module: `__all__`, or the classes and functions that are written in it."""
    found = getattr(module, "__all__", None)
    if found is None:
        written = (vars(module)[name] for name in vars(module) if not name.startswith("_"))
        found = [one.__name__ for one in written if getattr(one, "__module__", "") == module.__name__]
    return [name for name in found if callable(getattr(module, name))]


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    found = inspect.signature(function).parameters
    return tuple(name for name in found if not name.startswith("_") and name not in ("self", "cls"))


def made(value: type) -> tuple[str, ...]:
    """The arguments of a class that programs make: of one that they only get, nobody need know them."""
    made_by_us = value.__name__ in MADE_BY_THE_LIBRARY or issubclass(value, Exception)
    return () if made_by_us or is_dataclass(value) else parameters(value)


def public(build: ModuleType) -> Iterator[Public]:
    for home in build.MODULES:
        module = import_module(home)
        for name in names(module):
            value = getattr(module, name)
            if not isinstance(value, type):
                yield Public(f"{home}.{name}", value.__doc__ or "", parameters(value))
                continue
            yield Public(f"{home}.{name}", vars(value).get("__doc__") or "", made(value))
            told_of = set(vars(Mailbox)) if value is not Mailbox else set()
            for member in build.MEMBERS.get(name, set(vars(value)) - told_of):
                code = vars(value).get(member)
                code = getattr(code, "__func__", getattr(code, "fget", code))
                if inspect.isfunction(code) and not member.startswith("_"):
                    yield Public(f"{home}.{name}.{member}", code.__doc__ or "", parameters(code))


def wrong(one: Public) -> list[str]:
    """What its docstring leaves out or makes up."""
    text = inspect.cleandoc(one.text)
    found = [] if text else [f"{one.name}: no docstring"]
    described = entries(text, "Args")
    if described:
        found += [f"{one.name}: {name} is no argument" for name in described if name not in one.parameters]
        found += [f"{one.name}: {name} is not described" for name in one.parameters if name not in described]
    else:
        words = set(re.findall(r"\w+", text))
        found += [f"{one.name}: {name} is not told of" for name in one.parameters if name not in words]
    for name in entries(text, "Raises"):
        if not isinstance(getattr(errors, name, getattr(builtins, name, None)), type):
            found.append(f"{one.name}: there is no {name}")
    return found


def test_docstrings_describe_the_arguments_and_errors_there_are(build: ModuleType) -> None:
    found = list(public(build))
    assert len(found) > 80
    assert [line for one in found for line in wrong(one)] == []


def test_what_is_shown_of_a_class_is_there(build: ModuleType) -> None:
    """A method or a property; or an attribute, which the docstring describes."""
    for home in build.MODULES:
        module = import_module(home)
        for name in set(names(module)) & set(build.MEMBERS):
            value = getattr(module, name)
            described = entries(inspect.cleandoc(value.__doc__), "Attributes")
            assert [
                one for one in build.MEMBERS[name] if not hasattr(value, one) and one not in described
            ] == []


@pytest.mark.parametrize(
    ("text", "parameters", "said"),
    [
        ("", (), "no docstring"),
        (
            "Do it.\n\nArgs:\n    this: what.\n    that: what.\n        More: of it.",
            ("this",),
            "that is no argument",
        ),
        ("Do it.\n\nArgs:\n    this: what.\n", ("this", "other"), "other is not described"),
        ("Do it.", ("this",), "this is not told of"),
        ("Do it.\n\nRaises:\n    NoSuchError: never.", (), "there is no NoSuchError"),
    ],
)
def test_what_is_wrong_is_seen(text: str, parameters: tuple[str, ...], said: str) -> None:
    assert [line.partition(": ")[2] for line in wrong(Public("name", text, parameters))] == [said]


def test_what_is_right_is_not(build: ModuleType) -> None:
    text = "Do it.\n\nArgs:\n    a, b: what.\n    **rest: more.\n\nRaises:\n    ClosedError: late.\n    OSError: no."
    assert wrong(Public("name", text, ("a", "b", "rest"))) == []


@pytest.mark.full
def test_the_reference_builds_and_is_whole(build: ModuleType, tmp_path: Path) -> None:
    build.build(tmp_path)
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}
    assert set(pages) == {"index.html", *(f"{name.replace('.', '/')}.html" for name in build.MODULES)}
    anchors = {page: set(re.findall(r'id="([^"]+)"', text)) for page, text in pages.items()}
    for one in public(build):
        home = max((name for name in build.MODULES if one.name.startswith(f"{name}.")), key=len)
        assert one.name.removeprefix(f"{home}.") in anchors[f"{home.replace('.', '/')}.html"], one.name
    for page, text in pages.items():
        for link in set(
            re.findall(r'href="([^"$]+)"', text)
        ):  # `$`: a template of the search, filled in later
            if "//" in link or link.startswith("data:"):
                continue
            file, _, anchor = link.partition("#")
            target = (
                (tmp_path / page).parent.joinpath(file).resolve().relative_to(tmp_path)
                if file
                else Path(page)
            )
            assert target.as_posix() in pages, (page, link)
            assert not anchor or anchor in anchors[target.as_posix()], (page, link)
    hidden = [f"{owner}.{name}" for owner, name in (("Session", "admit"), ("SharedQueueDataset", "begin"))]
    assert not {*hidden} & anchors["shardqueue.html"]

"""The public interface changes only on purpose: ``tests/public_interface.txt`` lists it."""

from __future__ import annotations

import difflib

from test_rooms import tool

import ngplus

interface = tool("public_interface")


def test_the_interface_is_the_one_that_is_listed() -> None:
    listed, found = interface.FILE.read_text().splitlines(), interface.text().splitlines()
    change = "\n".join(difflib.unified_diff(listed, found, "listed", "found", lineterm=""))
    assert not change, f"The public interface has changed. If that is meant: make interface, and CHANGELOG.md\n{change}"


def test_every_public_name_is_there() -> None:
    assert all(hasattr(ngplus, name) for name in ngplus.__all__)
    listed = interface.FILE.read_text()
    assert all(f"ngplus.{name}" in listed for name in ngplus.__all__)

"""Builds the C library from the sources of econmt_ops beside this folder; everything else stands in pyproject.toml.

ECONMT_PLATFORM names another system, for which zig builds it. A source distribution does not hold the sources: what is
installed from one uses the library of econmt-ops.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).resolve().parent.parent / "ops" / "econmt_ops" / "backends" / "c"
PLATFORM = os.environ.get("ECONMT_PLATFORM")


def library() -> dict[str, Any]:
    """Returns the arguments of setup() that build the library; none where its sources are not."""
    if not SOURCES.is_dir():
        return {}
    building = runpy.run_path(str(SOURCES / "platforms.py"))

    class BuildLibrary(build_py):
        def run(self) -> None:
            """Adds the library to the modules, or says in one line why not."""
            super().run()
            folder = Path("" if self.editable_mode else self.build_lib, "econmt_runtime")
            try:
                building["compile_library"](folder, PLATFORM)
            except OSError as error:
                if PLATFORM:
                    raise
                self.warn(
                    f"{error}, so it translates only with the library of econmt-ops; install gcc or set CC"
                )

    class NameWheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            """Returns the tag of any Python on the library's system."""
            here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            return "py3", "none", building["PLATFORMS"][PLATFORM].wheel if PLATFORM else here

    build = {"build_base": f"../build/runtime/{PLATFORM}"}
    return {"cmdclass": {"build_py": BuildLibrary, "bdist_wheel": NameWheel}, "options": {"build": build}}


setup(packages=find_packages(), package_data={"econmt_runtime": ["py.typed", "web/*"]}, **library())

"""Builds the C library from the sources of econmt_ops beside this folder; everything else stands in pyproject.toml.

The environment variable ECONMT_PLATFORM names another system than this one, for which zig builds it. A source
distribution does not hold the sources: what is installed from one uses the library of econmt-ops.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

OPS = Path(__file__).resolve().parent.parent / "ops" / "setup.py"


def library() -> dict[str, Any]:
    """Returns the arguments of setup() that build the library; none where its sources are not."""
    if not OPS.is_file():
        return {}
    ops, name = runpy.run_path(str(OPS)), os.environ.get("ECONMT_PLATFORM") or None
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")

    class BuildLibrary(ops["BuildKernels"]):  # type: ignore[misc]
        cost = "it translates only with that of econmt-ops"
        system = name

    class NameWheel(bdist_wheel):
        def get_tag(self) -> tuple[str, str, str]:
            """Returns any Python and the library's system."""
            return "py3", "none", ops["BUILDING"]["PLATFORMS"][name][1] if name else here

    return {
        "ext_modules": [Extension("econmt_runtime._kernels", [], optional=True)],
        "cmdclass": {"build_ext": BuildLibrary, "bdist_wheel": NameWheel},
        "options": {"build": {"build_base": f"../build/runtime/{name or 'here'}"}},
    }


setup(packages=find_packages(), package_data={"econmt_runtime": ["py.typed", "web/*"]}, **library())

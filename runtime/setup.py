"""Builds the C library from the sources of econmt_ops beside this folder; everything else stands in pyproject.toml.

A source distribution does not hold them: what is installed from one uses the library of econmt-ops.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup

OPS = Path(__file__).resolve().parent.parent / "ops" / "setup.py"


def library() -> dict[str, Any]:
    """Returns the arguments of setup() that build the library; none where its sources are not."""
    if not OPS.is_file():
        return {}
    ops = runpy.run_path(str(OPS))

    class BuildLibrary(ops["BuildKernels"]):  # type: ignore[misc]
        cost = "it translates only with that of econmt-ops"

    return {
        "ext_modules": [Extension("econmt_runtime._kernels", [], optional=True)],
        "cmdclass": {**ops["COMMANDS"], "build_ext": BuildLibrary},
        "options": {"build": {"build_base": f"../build/runtime/{ops['PLATFORM'] or 'here'}"}},
    }


setup(packages=find_packages(), package_data={"econmt_runtime": ["py.typed", "web/*"]}, **library())
